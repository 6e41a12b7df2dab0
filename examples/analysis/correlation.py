"""Spearman's rank correlation of the changes, trained minus pretrained, that two fine-tunings of one base made."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from scipy.stats import spearmanr
from torch import Tensor, nn

from sparsify import SparseDelta, SparsifyError


class ChangeCorrelation(NamedTuple):
    """The coefficient over all compared entries, and by tensor; nan where one side's values are all equal."""

    overall: float
    by_tensor: dict[str, float]
    num_entries: int


def change_correlation(
    a: nn.Module | SparseDelta,
    b: nn.Module | SparseDelta,
    base: nn.Module,
    *,
    among: str = "either",
    magnitude: bool = False,
) -> ChangeCorrelation:
    """Compares two sparsified models, deltas or plain fine-tuned models by the entries that they changed.

    Tensors that either side trained dense (``modules_to_save``) are left out: a new head has no pretrained values.
    The paper compares with full fine-tuning, by ``magnitude=True, among="both"``.

    Args:
        a: one fine-tuning.
        b: the other one.
        base: the plain pretrained model of both.
        among: compares the entries that ``"either"`` side changed, where the other side counts as zero, or those that
            ``"both"`` did.
        magnitude: compares absolute values.
    """
    if among not in ("either", "both"):
        raise SparsifyError(f"among={among!r}; expected one of 'either', 'both'.")
    (first, dense), (second, other_dense) = _changes(a, base), _changes(b, base)
    compared: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sorted((first.keys() | second.keys()) - dense - other_dense):
        zeros = torch.zeros_like(first[name] if name in first else second[name])
        x, y = first.get(name, zeros), second.get(name, zeros)
        keep = (x != 0) | (y != 0) if among == "either" else (x != 0) & (y != 0)
        if keep.any():
            compared[name] = (x[keep].abs(), y[keep].abs()) if magnitude else (x[keep], y[keep])
    num_entries = sum(x.numel() for x, _ in compared.values())
    if num_entries < 2:
        raise SparsifyError(f"{among} of a and b changed {num_entries} entries; a correlation needs at least 2.")
    overall = _spearman(*(torch.cat(side) for side in zip(*compared.values(), strict=True)))
    return ChangeCorrelation(overall, {name: _spearman(x, y) for name, (x, y) in compared.items()}, num_entries)


def _changes(source: nn.Module | SparseDelta, base: nn.Module) -> tuple[dict[str, Tensor], set[str]]:
    """The change of each parameter with changed entries, on the CPU, and the names of those trained dense."""
    if isinstance(source, SparseDelta):
        delta = source
    elif hasattr(source, "sparse_values"):
        delta = SparseDelta.from_model(source)
    else:
        delta = SparseDelta.diff(base, source, progress=False)
    weights = {name: weight for name, weight in base.named_parameters() if name in delta.tensors}
    before = {name: weight.detach().to("cpu", torch.float32, copy=True) for name, weight in weights.items()}
    with delta.applied(base):
        found = {name: weight.detach().to("cpu", torch.float32) - before[name] for name, weight in weights.items()}
    return found, set(delta.whole)


def _spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's coefficient of two samples (n,); nan where one of them is constant."""
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    return float(spearmanr(x.numpy(), y.numpy()).statistic)
