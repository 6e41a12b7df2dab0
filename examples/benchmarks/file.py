"""Bytes per entry of a delta in several file formats, compared with the entropy bound.

    python examples/benchmarks/file.py
    python examples/benchmarks/file.py --dtype bfloat16

Files are written and thrown away. Entries lie unevenly over the linear layers, as ID3 puts them: densities are drawn
from a lognormal distribution with a fixed seed. Within a layer they lie at random: no format can predict them.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import BERTS, bert, check_names, entries_of, report, run, saved_bytes, write_json
from safetensors.torch import load_file
from step_bench.settings import DTYPES
from torch import Tensor, nn

from sparsify import SparseDelta, SparsifyError

SIGMA = 1.0  # of the logarithm of a layer's density; the densest of BERT-base's has some ten times the median's
MOVE = 1e-3  # size of a change in training, about
Size = dict[str, object]  # format, entries, bytes, counted: what the bytes are, in words


def main(
    shape: Annotated[str, typer.Option(help=f"Model shape: {', '.join(BERTS)}; its linear layers.")] = "bert-base",
    entries: Annotated[int, typer.Option(help="Entries of the delta.")] = 320_000,
    dtype: Annotated[str, typer.Option(help="Of the model: float32 or bfloat16.")] = "float32",
    json: Annotated[Path | None, typer.Option(help="Also write the numbers here.")] = None,
) -> None:
    """Compare file formats: bytes an entry, all included, compared with the entropy bound."""
    check_names([shape], BERTS, "shape")
    check_names([dtype], DTYPES, "dtype")
    model = bert(shape, DTYPES[dtype])
    numel = sum(weight.numel() for weight in linear_weights(model).values())
    layers = len(linear_weights(model))
    if not layers <= entries <= numel // 50:  # beyond, the densest layers would be full
        raise SparsifyError(
            f"{entries:,} entries; expected {layers:,}, one a layer, to {numel // 50:,}, 2 % of {numel:,}."
        )
    sizes = measure(model, entries)
    bound = next(size["bytes"] for size in sizes if size["format"] == "entropy bound")
    report(
        f"{shape}, {dtype}: {entries:,} entries of {numel:,} in {layers} linear layers ({entries / numel:.3%}); "
        f"density of each layer lognormal, sigma {SIGMA:g}, seed 0; at random within a layer",
        ["format", "bytes an entry", "MB", "to the bound", "what is counted"],
        [
            (size["format"], f"{size['bytes'] / size['entries']:,.2f}", f"{size['bytes'] / 1e6:,.2f}",
             f"{size['bytes'] / size['entries'] / (bound / entries):,.2f}", size["counted"])
            for size in sizes
        ],
        left=(0, 4),
    )  # fmt: skip
    write_json(json, sizes, shape=shape, dtype=dtype, entries=entries, numel=numel, sigma=SIGMA)


def measure(model: nn.Module, entries: int) -> list[Size]:
    """Writes one delta of the model's linear layers in every format; this library's comes first."""
    weights = linear_weights(model)
    delta = make_delta(weights, uneven_counts(weights, entries))
    values = sum(part.values.nbytes for part in delta.tensors.values())
    rows = [
        ("sparsify", saved_bytes(delta), "the whole file"),
        ("entropy bound", entropy_bytes(delta) + values, "log2 C(N, B) bits of positions a tensor, and the values"),
        ("the paper's toolkit", toolkit_bytes(delta), "torch.save of values, int64 (row, column) pointers, shapes"),
        ("flat int64 positions", 8 * entries + values, "raw: 8 bytes a position, and the values"),
    ]
    sizes = [{"format": name, "entries": entries, "bytes": size, "counted": counted} for name, size, counted in rows]
    sizes += [peft_size(method, entries, model) for method in ("shira", "supertuning")]
    dense = sum(parameter.nbytes for parameter in model.parameters())
    return [*sizes, {"format": "the whole model", "entries": entries, "bytes": dense, "counted": "every parameter"}]


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {f"{name}.weight": module.weight for name, module in linear.items()}


def uneven_counts(weights: Mapping[str, Tensor], entries: int) -> dict[str, int]:
    """Entries by tensor, at least one each, in all ``entries``, with densities from a lognormal distribution."""
    noise = torch.randn(len(weights), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shares = torch.tensor([weight.numel() for weight in weights.values()]) * torch.exp(SIGMA * noise)
    ends = (shares.cumsum(0) / shares.sum() * (entries - len(weights))).round().long()
    return dict(zip(weights, (ends.diff(prepend=ends.new_zeros(1)) + 1).tolist(), strict=True))


def make_delta(weights: Mapping[str, Tensor], counts: Mapping[str, int]) -> SparseDelta:
    """A delta with that many entries in each tensor, at random positions."""
    generator, parts = torch.Generator().manual_seed(0), {}
    for name, weight in weights.items():
        indices = torch.randperm(weight.numel(), generator=generator)[: counts[name]].sort().values
        parts[name] = entries_of(weight, indices, moved)
    return SparseDelta(parts)


def moved(base: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(base.numel())
    return (base.float() + MOVE * torch.randn(base.numel(), generator=generator)).to(base.dtype)


def entropy_bytes(delta: SparseDelta) -> float:
    """Positions take at least log2 C(N, B) bits a tensor where every set of that size is equally likely."""
    nats = 0.0
    for part in delta.tensors.values():
        numel, count = math.prod(part.shape), part.count
        nats += math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
    return nats / math.log(2) / 8


def toolkit_bytes(delta: SparseDelta) -> int:
    """As `write_summary_to_disk` of the paper's toolkit stores it, in the order of the model's parameters, no names."""
    parts = delta.tensors.values()
    pointers = [torch.stack(torch.unravel_index(part.indices, part.shape), dim=1) for part in parts]
    content = ([part.values for part in parts], pointers, [], [part.shape for part in parts], delta.num_entries)
    with tempfile.TemporaryFile() as file:
        torch.save(content, file)
        return file.tell()


def peft_size(method: str, entries: int, model: nn.Module) -> Size:
    """Size of PEFT's file with about as many entries, which the method spreads over the layers by their sizes."""
    from peft import ShiraConfig, SupertuningConfig, get_peft_model

    weights = linear_weights(model)
    layers = [name.removesuffix(".weight") for name in weights]
    if method == "shira":
        rank = max(1, round(entries / sum(sum(weight.shape) for weight in weights.values())))
        config: Any = ShiraConfig(r=rank, target_modules=layers, random_seed=0)
    else:
        density = entries / sum(weight.numel() for weight in weights.values())
        config = SupertuningConfig(sparsity=1 - density, target_modules=layers)
    with tempfile.TemporaryDirectory() as folder:
        get_peft_model(copy.deepcopy(model), config).save_pretrained(folder)
        file = Path(folder, "adapter_model.safetensors")
        stored = load_file(file)
        counts = [tensor.numel() for tensor in stored.values() if tensor.is_floating_point()]
        counted = "adapter_model.safetensors, at the counts a layer that the method chooses itself"
        return {"format": f"PEFT {method}", "entries": sum(counts), "bytes": file.stat().st_size, "counted": counted}


if __name__ == "__main__":
    run(main)
