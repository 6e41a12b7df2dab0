"""The changed entries of one tensor, checked, and the encodings of their positions, which ``format.md`` specifies."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsify.common.raw_bits import same_values
from sparsify.errors import DeltaFormatError, SparsifyError

KINDS = ("replace", "add")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
ESCAPE = 0xFFFF
_CHUNK = 2**18  # numbers of a gap stream that are decoded at a time


@dataclass(frozen=True, eq=False)
class TensorDelta:
    """The changed entries of one tensor parameter, which the constructor checks.

    Args:
        indices: (count,) int64 on the CPU: flat row-major positions, strictly increasing; at least one.
        values: (count,) on the CPU, finite: the trained values, or differences.
        shape: the tensor's shape.
        dtype: the base's dtype, one of the values of ``DTYPES``.
        kind: ``"replace"``: ``values`` are the trained ones, in ``dtype``; ``"add"``: they are differences.
        base_sha256: SHA-256 of the base's values at the indices.
        quantization: how the base was quantized, such as ``"bitsandbytes nf4"``, if it was; its values are then the
            dequantized ones, in ``dtype``.

    Raises:
        SparsifyError: when the parts do not fit together.
    """

    indices: Tensor
    values: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    base_sha256: str
    quantization: str | None = None

    def __post_init__(self) -> None:
        indices, values, dtypes = self.indices, self.values, DTYPES.values()
        check(self.kind in KINDS, "kind is", self.kind, one_of(KINDS))
        check(self.dtype in dtypes, "dtype is", self.dtype, one_of(dtypes))
        check(indices.dtype == torch.int64, "indices are", indices.dtype, "torch.int64")
        fits = values.dtype in dtypes and (self.kind == "add" or values.dtype == self.dtype)
        check(fits, "values are", values.dtype, f"the base's {self.dtype} for kind {self.kind!r}")
        if indices.dim() != 1 or values.shape != indices.shape or not self.count:
            shapes = f"indices have shape {tuple(indices.shape)} and values {tuple(values.shape)}"
            raise SparsifyError(f"{shapes}, expected one dimension, equally long, with at least one entry")
        sha, scheme = self.base_sha256, self.quantization
        check(is_text("[0-9a-f]{64}", sha), "base_sha256 is", sha, "64 lower-case hex digits")
        fits = scheme is None or is_text("[ -~]{1,100}", scheme)
        check(fits, "quantization is", scheme, "None, or 1 to 100 characters of printable ASCII")
        for device in (indices.device, values.device):
            check(device.type == "cpu", "indices or values are on", device, "both on cpu")
        if bool((indices[1:] <= indices[:-1]).any()):
            raise SparsifyError("indices are not strictly increasing")
        if not 0 <= int(indices[0]) <= int(indices[-1]) < math.prod(self.shape):
            ends = f"from {int(indices[0])} to {int(indices[-1])}, in a tensor of {math.prod(self.shape)} entries"
            raise SparsifyError(f"indices are out of range: they go {ends}")
        if not values.sum().isfinite() and (bad := int((~values.isfinite()).sum())):  # sums may overflow
            raise SparsifyError(f"{bad} of {self.count} values are not finite: take a delta from before it diverged.")

    @property
    def count(self) -> int:
        """Number of entries."""
        return self.indices.numel()

    def equals(self, other: "TensorDelta") -> bool:
        """Whether the entries are equal in every bit, and of the same base."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return all(same_values(own, part) if isinstance(own, Tensor) else own == part for own, part in pairs)


TensorDeltas: TypeAlias = Mapping[str, TensorDelta]  # changed entries by tensor name
NamedTensors: TypeAlias = Mapping[str, Tensor]
Config: TypeAlias = Mapping[str, Any]  # how a delta came about
DeltaParts: TypeAlias = tuple[dict[str, TensorDelta], dict[str, Tensor], dict[str, Any]]  # dense tensors, config
StrPath: TypeAlias = str | os.PathLike[str]
Base: TypeAlias = nn.Module | StrPath  # a model, or the path of a checkpoint


def is_resized(shape: Sequence[int], before: Sequence[int]) -> bool:
    """Whether two shapes differ in one dimension, as those of a table, head or bias of another number of tokens."""
    return len(shape) == len(before) and sum(now != then for now, then in zip(shape, before, strict=True)) == 1


def encode_indices(indices: Tensor) -> Tensor:
    """Encodes flat positions (count,) in the fewest bytes: (count or more,) uint16 gaps, else uint32 or uint64."""
    gaps = indices.diff(prepend=indices.new_tensor([-1])) - 1
    escapes = gaps.div(ESCAPE, rounding_mode="floor")
    stream_length = indices.numel() + int(escapes.sum())
    wide = torch.uint32 if int(indices[-1:].sum()) < 2**32 else torch.uint64  # [-1:]: there may be no entry
    if 2 * stream_length > wide.itemsize * indices.numel():
        return indices.to(wide)
    stream = torch.full((stream_length,), ESCAPE, dtype=torch.int32, device=gaps.device)
    # an entry's number comes after its own escapes
    ends = torch.arange(indices.numel(), device=gaps.device) + escapes.cumsum(0)
    stream[ends] = (gaps % ESCAPE).int()
    return stream.to(torch.uint16)


def decode_indices(stored: Tensor, count: int) -> Tensor:
    """Decodes ``count`` positions, of which order and range are not checked; one beyond int64 comes out negative."""
    if stored.dim() != 1 or stored.dtype not in (torch.uint16, torch.uint32, torch.uint64):
        expected = "expected one dimension of uint16, uint32 or uint64"
        raise DeltaFormatError(f"indices are {stored.dtype} of shape {tuple(stored.shape)}, {expected}")
    # by chunks: each number of a gap stream takes 30 bytes while it is decoded
    chunks = stored.split(_CHUNK) if stored.dtype == torch.uint16 else ()
    if (found := stored.numel() - sum(int((chunk.view(torch.int16) == -1).sum()) for chunk in chunks)) != count:
        raise DeltaFormatError(f"indices hold {found} entries, expected {count}")
    if not chunks:
        return stored.to(torch.int64)
    if stored.numel() and int(stored[-1]) == ESCAPE:
        raise DeltaFormatError("indices end in the escape 0xFFFF, which needs an entry after it")
    indices, done, position = torch.empty(count, dtype=torch.int64, device=stored.device), 0, -1
    for chunk in chunks:
        is_entry = chunk.view(torch.int16) != -1
        # an escape skips 65535 positions, an entry its gap and itself
        positions = chunk.to(torch.int64).add_(is_entry).cumsum(0).add_(position)
        entries = positions if count == stored.numel() else positions[is_entry]
        indices[done : done + entries.numel()] = entries
        done += entries.numel()
        position = int(positions[-1:].sum())  # [-1:]: there may be no number
    return indices


def check(fits: bool, what: str, found: object, expected: str) -> None:
    """Raises for a part that is other than expected, whose text may come from a file."""
    if not fits:
        raise SparsifyError(f"{what} {found!r:.120}, expected {expected}")


def one_of(names: Iterable[object]) -> str:
    return f"one of {', '.join(map(str, names))}"


def is_text(pattern: str, value: object) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None
