"""Rank correlation of the changes, trained minus pretrained, that two fine-tunings made.

In: two sparsified models, deltas or plain fine-tuned models, in any combination, and the base where they do not hold
it. Out: Spearman's coefficient over the changed entries, and for each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.extras import require
from sparsify.common.names import find_engine, named_tensors, plain_name
from sparsify.delta.patch_plan import check_not_drawn, find_targets, plan_entries
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError
from sparsify.training.export import entries_of


@dataclass(frozen=True)
class ChangeCorrelation:
    """Spearman's rank correlation of two fine-tunings' changes.

    Attributes:
        overall: over all compared entries; nan where one side's values are all equal.
        by_tensor: the same for each tensor with compared entries; nan also where there is a single one.
        num_entries: number of compared entries.
    """

    overall: float
    by_tensor: dict[str, float]
    num_entries: int


def change_correlation(
    a: nn.Module | SparseDelta,
    b: nn.Module | SparseDelta,
    base: nn.Module | None = None,
    *,
    among: str = "either",
    magnitude: bool = False,
) -> ChangeCorrelation:
    """Computes Spearman's rank correlation of the changes, trained minus pretrained, of two fine-tunings.

    Tensors that either side trained dense (``modules_to_save``) are left out: a new head has no pretrained values.
    With ``among="either"``, an entry that one side did not change counts as zero there. The paper compares with full
    fine-tuning, by ``magnitude=True, among="both"``.

    Args:
        a: a sparsified model, a delta, or a plain fine-tuned model; it is only read.
        b: the other one.
        base: the plain pretrained model; required for a plain model, and for a delta unless it stores differences.
        among: compares the entries that ``"either"`` side changed, or those that ``"both"`` did.
        magnitude: compares absolute values.

    Returns:
        The coefficient overall and by tensor. Memory and time are O(n log n) in the number of changed entries.

    Raises:
        SparsifyError: when ``a`` or ``b`` is something else, the base is missing or sparsified, a tensor has another
            shape or is missing, or fewer than two entries can be compared.
        BaseMismatchError: when names, shapes or a delta's hashes show that the base is another one.
        MissingExtraError: when scipy is not installed.

    Example:
        >>> base, a, b = nn.Linear(4, 1), nn.Linear(4, 1), nn.Linear(4, 1)
        >>> a.load_state_dict(base.state_dict()), b.load_state_dict(base.state_dict())
        (<All keys matched successfully>, <All keys matched successfully>)
        >>> _ = a.weight.data.add_(torch.tensor([1.0, 2.0, 3.0, 0.0]))
        >>> _ = b.weight.data.add_(torch.tensor([0.1, 0.4, 0.9, 0.0]))
        >>> change_correlation(a, b, base)
        ChangeCorrelation(overall=1.0, by_tensor={'weight': 1.0}, num_entries=3)
    """
    if among not in ("either", "both"):
        raise SparsifyError(f"among={among!r}; expected one of 'either', 'both'.")
    first, second = _changes("a", a, base), _changes("b", b, base)
    compared = {}
    for name in sorted((first.entries.keys() | second.entries.keys()) - first.dense - second.dense):
        _check_shapes(name, first, second)
        x, y = _aligned(first.entries.get(name, _UNCHANGED), second.entries.get(name, _UNCHANGED))
        keep = (x != 0) | (y != 0) if among == "either" else (x != 0) & (y != 0)
        if keep.any():
            compared[name] = (x[keep].abs(), y[keep].abs()) if magnitude else (x[keep], y[keep])
    num_entries = sum(x.numel() for x, _ in compared.values())
    if num_entries < 2:
        raise SparsifyError(
            f"{among} of a and b changed {num_entries} of the entries that can be compared; a correlation needs at "
            "least 2: give models that were trained"
            + (', or compare among="either".' if among == "both" else " further than that.")
        )
    overall = _spearman(torch.cat([x for x, _ in compared.values()]), torch.cat([y for _, y in compared.values()]))
    return ChangeCorrelation(overall, {name: _spearman(x, y) for name, (x, y) in compared.items()}, num_entries)


class _Entries(NamedTuple):
    """Changed entries of one tensor: flat positions (k,) int64, ascending, and changes (k,), on the CPU."""

    indices: Tensor
    changes: Tensor


_UNCHANGED = _Entries(torch.empty(0, dtype=torch.int64), torch.empty(0))


class _Changes(NamedTuple):
    """One side: changed entries, tensors trained dense, and shapes (a model's of all tensors) by name."""

    entries: dict[str, _Entries]
    dense: set[str]
    shapes: dict[str, tuple[int, ...]]
    is_model: bool


def _changes(side: str, source: nn.Module | SparseDelta, base: nn.Module | None) -> _Changes:
    if isinstance(source, SparseDelta):
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        return _Changes(_of_delta(side, source, base), set(source.whole), shapes, is_model=False)
    if not isinstance(source, nn.Module):
        raise SparsifyError(f"{side} is a {type(source).__name__}; expected a model or a SparseDelta.")
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(source).items()}
    engine = find_engine(source)
    if engine is None:
        delta = SparseDelta.diff(_checked_base(side, source, base), source, progress=False)
        parameters = {plain_name(name) for name, _ in source.named_parameters()}
        delta.tensors = {name: tensor for name, tensor in delta.tensors.items() if name in parameters}
        return _Changes(_of_delta(side, delta, base), set(delta.whole), shapes, is_model=True)
    engine.refresh()
    entries = {}
    for tensor in engine.tensors:
        if tensor.count:
            indices, values, base_values = entries_of(tensor, engine.unmasked)
            changes = values.cpu() if tensor.packed else _difference(values, base_values)
            entries[plain_name(tensor.name)] = _Entries(indices.cpu(), changes)
    return _Changes(entries, {plain_name(name) for name in engine.dense_names}, shapes, is_model=True)


def _of_delta(side: str, delta: SparseDelta, base: nn.Module | None) -> dict[str, _Entries]:
    check_not_drawn(delta.tensors, "a correlation")
    replaced = {name: tensor for name, tensor in delta.tensors.items() if tensor.kind == "replace"}
    targets = find_targets(replaced, _checked_base(side, delta, base), ()) if replaced else {}
    found = {}
    for name, tensor in delta.tensors.items():
        if tensor.kind == "add":
            changes = tensor.values.to(torch.promote_types(tensor.values.dtype, torch.float32))
        else:
            edit = plan_entries(name, tensor, targets[name])  # checks shape, dtype and hash; nothing is written
            changes = _difference(edit.new, edit.old)
        found[name] = _Entries(tensor.indices, changes)
    return found


def _checked_base(side: str, source: object, base: nn.Module | None) -> nn.Module:
    if base is None:
        raise SparsifyError(
            f"{side} is a {type(source).__name__}, which has trained values but not the pretrained ones; pass the "
            "pretrained model as base=."
        )
    if not isinstance(base, nn.Module) or find_engine(base) is not None:
        what = f"a sparsified {type(base).__name__}" if isinstance(base, nn.Module) else f"a {type(base).__name__}"
        raise SparsifyError(f"base is {what}; expected the plain pretrained model, loaded afresh.")
    return base


def _check_shapes(name: str, a: _Changes, b: _Changes) -> None:
    """Raises where the sides have a tensor in two shapes, or one of them is a model without it."""
    shapes = [side.shapes.get(name) for side in (a, b) if side.is_model or name in side.shapes]
    if len(set(shapes)) > 1:
        raise SparsifyError(
            f"tensor `{name}` has shape {shapes[0]} in a, {shapes[1]} in b (None: it is missing): compare fine-tunings "
            "of one base, with its tensors under the same names."
        )


def _aligned(a: _Entries, b: _Entries) -> tuple[Tensor, Tensor]:
    """The changes of both sides (n,) at the positions that either has, in one dtype; zero where one has none."""
    indices = torch.cat([a.indices, b.indices]).unique()
    dtype = torch.promote_types(a.changes.dtype, b.changes.dtype)
    x, y = torch.zeros(2, indices.numel(), dtype=dtype)
    x[torch.searchsorted(indices, a.indices)] = a.changes.to(dtype)
    y[torch.searchsorted(indices, b.indices)] = b.changes.to(dtype)
    return x, y


def _difference(trained: Tensor, base: Tensor) -> Tensor:
    """Trained minus base, on the CPU, in at least float32."""
    dtype = torch.promote_types(trained.dtype, torch.float32)
    return trained.detach().to("cpu", dtype) - base.detach().to("cpu", dtype)


def _spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's coefficient of two samples (n,); nan where one of them is constant."""
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    return float(require("scipy.stats", extra="plot").spearmanr(x.numpy(), y.numpy()).statistic)
