"""Compares two deltas: the entries that both change and, on their base, the directions in which they change them."""

from dataclasses import dataclass

import torch

from sparsify.common.raw_bits import same_values
from sparsify.delta.algebra import change, find_base
from sparsify.delta.entries import Base, check
from sparsify.delta.patch_plan import warn_of_casts
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError


@dataclass(frozen=True)
class Overlap:
    """The result of :func:`overlap`; without a base ``cosine`` and ``opposed`` are ``None``."""

    shared: int  # number of entries that both deltas change
    union: int  # number of entries that either changes
    cosine: float | None  # of the two changes on the shared entries; nan where nothing is shared
    opposed: int | None  # number of shared entries that move in opposite directions
    by_tensor: dict[str, int]  # number of shared entries by tensor, for those that have any
    conflicting_whole: tuple[str, ...]  # tensors that both store whole, with different values

    @property
    def jaccard(self) -> float:
        """Shared entries over entries in either; 0 where there are none."""
        return self.shared / self.union if self.union else 0.0

    def __str__(self) -> str:
        lines = [f"{self.shared:,} of {self.union:,} entries shared (Jaccard {self.jaccard:.4f})"]
        if self.cosine is not None and self.shared:
            lines.append(f"cosine on shared entries {self.cosine:.4f}; {self.opposed:,} pulled in opposite directions")
        if self.conflicting_whole:
            lines.append(f"stored whole by both, and different: {', '.join(self.conflicting_whole)}")
        return "\n".join(lines)


def overlap(a: SparseDelta, b: SparseDelta, base: Base | None = None) -> Overlap:
    """Compares two deltas of one base, entry by entry.

    Args:
        a: a delta.
        b: the other one.
        base: the plain model, or the path of its checkpoint; for cosine and opposed directions.

    Raises:
        SparsifyError: when the base is not that of both deltas, or a tensor has another shape in the two.

    Example:
        >>> base, tuned = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
        >>> delta = SparseDelta.diff(base, tuned)
        >>> print(overlap(delta, delta, base))
        4 of 4 entries shared (Jaccard 1.0000)
        cosine on shared entries 1.0000; 0 pulled in opposite directions
    """
    for given in (a, b):
        check(isinstance(given, SparseDelta), "overlap() got", given, "a SparseDelta: load() a path, total.on(base)")
    common = [name for name in a.tensors if name in b.tensors]
    bases = None if base is None else find_base(common, base)
    opposed, by_tensor, dtypes = 0, {}, []
    products = torch.zeros(3, dtype=torch.float64, device="cpu")  # a.b, a.a, b.b
    for name in common:
        parts = a.tensors[name], b.tensors[name]
        if parts[0].shape != parts[1].shape:
            shapes = f"{parts[0].shape} in one delta and {parts[1].shape} in the other"
            raise SparsifyError(f"tensor `{name}` has shape {shapes}: they are not of one base.")
        at = [torch.isin(mine.indices, other.indices, assume_unique=True) for mine, other in (parts, parts[::-1])]
        if count := int(at[0].sum()):
            by_tensor[name] = count
        if bases is not None:
            target = bases[name]
            dtypes += [(name, part.dtype, target.dtype) for part in parts]
            changes = (change(name, part, target) for part in parts)
            left, right = (own[mask] for own, mask in zip(changes, at, strict=True))
            products += torch.stack([left @ right, left @ left, right @ right])
            opposed += int((left * right < 0).sum())
    warn_of_casts(dtypes, "the base", stacklevel=3)
    shared = sum(by_tensor.values())
    union, both = a.num_entries + b.num_entries - shared, sorted(a.whole.keys() & b.whole.keys())
    conflicting = tuple(name for name in both if not same_values(a.whole[name], b.whole[name]))
    cosine = None if base is None else float(products[0] / (products[1] * products[2]).sqrt())
    moved = None if base is None else opposed
    return Overlap(shared, union, cosine, moved, dict(sorted(by_tensor.items())), conflicting)
