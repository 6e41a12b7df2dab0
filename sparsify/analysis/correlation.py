"""Whether two fine-tunings changed a model alike: the rank correlation of their changes, trained minus pretrained.

In: two sparsified models, deltas or plain fine-tuned models, in any combination, and the base of those that do not
know it themselves. Out: Spearman's coefficient over the entries that changed, and for each tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.extras import require
from sparsify.common.names import find_engine, named_tensors, plain_name
from sparsify.delta.entries import TensorDelta
from sparsify.delta.patch_plan import check_not_drawn, find_targets, plan_entries
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.training.engine import Engine
from sparsify.training.export import entries_of

AMONG = ("either", "both")


@dataclass(frozen=True)
class ChangeCorrelation:
    """How alike two fine-tunings changed a model.

    Attributes:
        overall: Spearman's coefficient over all compared entries; nan where one side's values are all equal.
        by_tensor: the same for each tensor that has compared entries; nan also where it has a single one.
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
    """Spearman's rank correlation of the changes, trained minus pretrained, that two fine-tunings made.

    Tensors that either side trained dense beside its budget (``modules_to_save``) are left out: a new head has no
    pretrained values. Among ``"either"``, entries that only one side changed count with a zero on the other, so that
    two disjoint sets of entries come out below zero where magnitudes are compared. The paper compares
    ``magnitude=True, among="both"``, with full fine-tuning on one side.

    Args:
        a: a sparsified model, a delta, or a plain model that was fine-tuned in any way; it is only read.
        b: the other one.
        base: the pretrained model, plain. A plain model needs it, and a delta, unless that stores differences.
        among: which entries are compared: those that ``"either"`` changed, or that ``"both"`` did.
        magnitude: compare absolute values.

    Returns:
        The coefficient in all and by tensor. Memory and time are O(n log n) in the number of changed entries, which is
        the whole model for a plain one.

    Raises:
        SparsifyError: when ``a`` or ``b`` is something else, the base is missing or sparsified, a tensor has another
            shape or is missing, or fewer than two entries can be compared.
        BaseMismatchError: when the base is not the one that a delta or a plain model was trained on, as far as names,
            shapes and a delta's hashes tell.
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
    if among not in AMONG:
        raise SparsifyError(f"among={among!r}; expected one of {', '.join(map(repr, AMONG))}.")
    first, second = _changes("a", a, base), _changes("b", b, base)
    _check_shapes(first, second)
    compared = {}
    for name in sorted((first.entries.keys() | second.entries.keys()) - first.whole - second.whole):
        x, y = _aligned(first.entries.get(name, _NOTHING), second.entries.get(name, _NOTHING))
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


_NOTHING = _Entries(torch.empty(0, dtype=torch.int64), torch.empty(0))


class _Changes(NamedTuple):
    """What one side changed.

    Attributes:
        entries: changed entries by tensor name.
        whole: names of the tensors that it trained dense beside them.
        shapes: shapes by tensor name: of all tensors, or of those that it changed.
        has_all: whether ``shapes`` has all.
    """

    entries: dict[str, _Entries]
    whole: set[str]
    shapes: dict[str, tuple[int, ...]]
    has_all: bool


def _changes(side: str, source: nn.Module | SparseDelta, base: nn.Module | None) -> _Changes:
    if isinstance(source, SparseDelta):
        shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
        return _Changes(_of_delta(side, source, base), set(source.whole), shapes, has_all=False)
    if not isinstance(source, nn.Module):
        raise SparsifyError(f"{side} is a {type(source).__name__}; expected a model or a SparseDelta.")
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(source).items()}
    engine = find_engine(source)
    if engine is None:
        return _Changes(_of_plain(source, _checked_base(side, source, base)), set(), shapes, has_all=True)
    whole = {plain_name(name) for name in engine.dense_names}
    return _Changes(_of_engine(engine), whole, shapes, has_all=True)


def _of_engine(engine: Engine) -> dict[str, _Entries]:
    """A sparsified model has its base values beside it."""
    engine.refresh()
    entries = [entries_of(plain_name(tensor.name), tensor) for tensor in engine.tensors if tensor.count]
    return {item.name: _Entries(item.indices.cpu(), _difference(item.values, item.base_values)) for item in entries}


def _of_delta(side: str, delta: SparseDelta, base: nn.Module | None) -> dict[str, _Entries]:
    """A delta has differences, or trained values to take the base's from."""
    check_not_drawn(delta.tensors, "a correlation")
    stored = {name: tensor for name, tensor in delta.tensors.items() if tensor.kind == "replace"}
    targets = find_targets(stored, _checked_base(side, delta, base), ()) if stored else {}
    return {name: _of_tensor(name, tensor, targets) for name, tensor in delta.tensors.items()}


def _of_tensor(name: str, tensor: TensorDelta, targets: dict[str, Tensor]) -> _Entries:
    if tensor.kind == "add":
        return _Entries(tensor.indices, tensor.values.to(_wide(tensor.values)))
    edit = plan_entries(name, tensor, targets[name])  # checks shape, dtype and hash; nothing is written
    return _Entries(tensor.indices, _difference(edit.new, edit.old))


def _of_plain(model: nn.Module, base: nn.Module) -> dict[str, _Entries]:
    """A plain model differs from its base wherever a value does; buffers are not compared."""
    tuned = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    targets = find_targets(tuned, base, ())
    found = {}
    for name, parameter in tuned.items():
        if parameter.shape != targets[name].shape:
            raise BaseMismatchError(
                f"tensor `{name}` has shape {tuple(parameter.shape)} in the fine-tuned model, "
                f"{tuple(targets[name].shape)} in the base: pass the base that it was trained from."
            )
        changes = _difference(parameter, targets[name]).reshape(-1)
        indices = changes.nonzero().squeeze(1)
        found[name] = _Entries(indices, changes[indices])
    return found


def _checked_base(side: str, source: object, base: nn.Module | None) -> nn.Module:
    if base is None:
        raise SparsifyError(
            f"{side} is a {type(source).__name__}, which has trained values and not what they were before; pass the "
            "pretrained model as base=."
        )
    if not isinstance(base, nn.Module) or find_engine(base) is not None:
        what = f"a sparsified {type(base).__name__}" if isinstance(base, nn.Module) else f"a {type(base).__name__}"
        raise SparsifyError(f"base is {what}; expected the plain pretrained model, loaded afresh.")
    return base


def _check_shapes(a: _Changes, b: _Changes) -> None:
    """Raises where one side changed a tensor that the other does not have, or has in another shape."""
    for here, there, sides in ((a, b, "a, not in b"), (b, a, "b, not in a")):
        missing = [name for name in here.entries if there.has_all and name not in there.shapes]
        if missing:
            raise SparsifyError(
                f"tensor `{missing[0]}` is in {sides}; {len(missing):,} such in all. Compare fine-tunings of one "
                "architecture, with its tensors under the same names."
            )
    for name in a.entries.keys() & b.shapes.keys():
        if a.shapes[name] != b.shapes[name]:
            raise SparsifyError(
                f"tensor `{name}` has shape {a.shapes[name]} in a, {b.shapes[name]} in b: compare fine-tunings of one "
                "base."
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
    wide = _wide(trained)
    return trained.detach().to("cpu", wide) - base.detach().to("cpu", wide)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's coefficient of two samples (n,); nan where one of them is constant."""
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return math.nan
    return float(require("scipy.stats", extra="plot").spearmanr(x.numpy(), y.numpy()).statistic)
