"""How many bytes a delta takes in one file format and another, beside what any format has to take.

In: a model shape, a number of entries, a dtype. Out: a :class:`Size` a format, measured on files that are written and
thrown away. Entries lie as ID3 puts them, unevenly over the layers: densities are drawn from a lognormal distribution
with a fixed seed. Within a layer they lie at random, so that no format can guess them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from sparsify.bench.shapes import BERTS
from sparsify.common.raw_bits import digest
from sparsify.delta.sparse_delta import SparseDelta, TensorDelta

SIGMA = 1.0  # of the logarithm of a layer's density; the densest of BERT-base's has some ten times the median's
MOVE = 1e-3  # what training changes an entry by, about

Weights = Mapping[str, Tensor]
Counts = Mapping[str, int]


@dataclass(frozen=True)
class Size:
    """What one format takes.

    Attributes:
        format: what it is called in the table.
        entries: of the delta that it stores.
        num_bytes: all of it.
        counted: what the bytes are, in words.
    """

    format: str
    entries: int
    num_bytes: float
    counted: str

    @property
    def bytes_per_entry(self) -> float:
        return self.num_bytes / self.entries


def build(shape: str, dtype: torch.dtype) -> nn.Module:
    """A BERT of the given shape with random weights."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model: nn.Module = BertModel(BertConfig.from_dict(BERTS[shape]))
    return model.to(dtype)


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of the model's linear layers by name."""
    return {
        f"{name}.weight": module.weight.detach()
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }


def uneven_counts(weights: Weights, entries: int, seed: int = 0) -> dict[str, int]:
    """Entries by tensor, at least one each, in all ``entries``, with densities from a lognormal distribution."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([weight.numel() for weight in weights.values()], dtype=torch.float64)
    shares = sizes * torch.exp(SIGMA * torch.randn(len(weights), generator=generator, dtype=torch.float64))
    ends = (shares.cumsum(0) / shares.sum() * (entries - len(weights))).round().long()
    counts = ends.diff(prepend=ends.new_zeros(1)) + 1
    return dict(zip(weights, counts.tolist(), strict=True))


def make_delta(weights: Weights, counts: Counts, train: Callable[[Tensor], Tensor]) -> SparseDelta:
    """A delta with that many entries in each tensor, at random positions; ``train`` makes the values."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, weight in weights.items():
        indices = torch.randperm(weight.numel(), generator=generator)[: counts[name]].sort().values
        base = weight.take(indices)
        tensors[name] = TensorDelta(indices, train(base), tuple(weight.shape), weight.dtype, "replace", digest(base))
    return SparseDelta(tensors)


def measure(shape: str, entries: int, dtype: torch.dtype) -> list[Size]:
    """Writes one delta in every format.

    Args:
        shape: one of ``BERTS``.
        entries: in all the linear layers together.
        dtype: of the model.

    Returns:
        A row a format, this library's first.
    """
    model = build(shape, dtype)
    weights = linear_weights(model)
    delta = make_delta(weights, uneven_counts(weights, entries), _moved)
    values_bytes = entries * dtype.itemsize
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            Size("sparsify", entries, _own_size(delta, Path(folder)), "the whole file"),
            Size(
                "entropy bound",
                entries,
                _entropy_bytes(delta) + values_bytes,
                "log2 C(N, B) bits of positions a tensor, and the values",
            ),
            Size(
                "the paper's toolkit",
                entries,
                _toolkit_size(delta, Path(folder)),
                "torch.save of a tuple: values, int64 (row, column) pointers, shapes",
            ),
            Size(
                "flat int64 positions", entries, 8 * entries + values_bytes, "raw: 8 bytes a position, and the values"
            ),
        ]
        for method in ("shira", "supertuning"):
            rows += _peft_sizes(method, delta, weights, model, Path(folder))
    dense = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    return [*rows, Size("the whole model", entries, dense, "every parameter, embeddings included")]


def _moved(base: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(base.numel())
    return (base.float() + MOVE * torch.randn(base.numel(), generator=generator)).to(base.dtype)


def _own_size(delta: SparseDelta, folder: Path) -> int:
    path = folder / "delta.safetensors"
    delta.save(path)
    return path.stat().st_size


def _toolkit_size(delta: SparseDelta, folder: Path) -> int:
    """As `write_summary_to_disk` of the paper's toolkit stores it, in the order of the model's parameters, no names."""
    parts = delta.tensors.values()
    pointers = [torch.stack(torch.unravel_index(part.indices, part.shape), dim=1) for part in parts]
    path = folder / "toolkit.pt"
    torch.save(([part.values for part in parts], pointers, [], [part.shape for part in parts], delta.num_entries), path)
    return path.stat().st_size


def _entropy_bytes(delta: SparseDelta) -> float:
    """What positions take at least where every set of that size is equally likely: log2 C(N, B) bits a tensor."""
    nats = 0.0
    for part in delta.tensors.values():
        numel, count = math.prod(part.shape), part.count
        nats += math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return nats / math.log(2) / 8


def _peft_sizes(method: str, delta: SparseDelta, weights: Weights, model: nn.Module, folder: Path) -> list[Size]:
    """The same delta in PEFT's format, and one with PEFT's own counts, which needs no padding."""
    own_counts = _peft_counts(method, delta.num_entries, weights)
    even = make_delta(weights, own_counts, lambda base: 2 * base)  # differences that every dtype holds exactly
    rows = []
    for words, one in (("", delta), (", its own counts", even)):
        adapter = one.to_peft(folder / "adapter", method, model)
        places = adapter.entries + adapter.corrections + adapter.padding
        extra = [f"{adapter.padding / places:.1%} of its places are padding"]
        if adapter.corrections:
            extra.append(f"{adapter.corrections / places:.1%} are corrections")
        setting = ", ".join(f"{key}={value:.6g}" for key, value in adapter.settings.items())
        counted = f"adapter_model.safetensors, {setting}: {', '.join(extra)}".replace("%", " %")
        rows.append(Size(f"PEFT {method}{words}", one.num_entries, adapter.num_bytes, counted))
    return rows


def _peft_counts(method: str, entries: int, weights: Weights) -> dict[str, int]:
    """Entries by tensor as PEFT's method itself would place about as many."""
    if method == "shira":
        r = max(1, round(entries / sum(sum(weight.shape) for weight in weights.values())))
        return {name: r * sum(weight.shape) for name, weight in weights.items()}
    density = entries / sum(weight.numel() for weight in weights.values())
    return {name: max(1, int(weight.numel() * density)) for name, weight in weights.items()}
