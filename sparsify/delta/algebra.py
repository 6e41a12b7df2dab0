"""Task arithmetic: deltas put together, as expressions that are evaluated on their base.

    0.5 * a + b - c, first.then(second), merge_deltas([a, b])  --on(base)-->  a delta like any other

On a base, each term becomes a change, trained minus pretrained; changes are added over the union of the entries. Deltas
that interfere are merged by TIES (Yadav et al. 2023) and DARE (Yu et al. 2024):

    trim      keep a share of each delta's entries in each tensor: the largest changes, or (DARE) any, scaled up
    elect     a sign for each entry: that of the sum of the changes, or that of most of them
    merge     the mean of the weighted changes that have this sign; dare_linear: the sum of all

For dense changes the results are those of PEFT's ``add_weighted_adapter``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.core.devices import put
from sparsify.delta import patch_plan
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.delta.entries import KINDS, Base, NamedTensors, StrPath, TensorDelta, check, one_of
from sparsify.delta.format import ADAPTERS_KEY, ENTRIES_IN_WHOLE_KEY, PEFT_KEY
from sparsify.delta.patch_plan import Applicable, PatchPlan, new_values, plan_entries
from sparsify.delta.quantized_delta import QuantizedDelta
from sparsify.errors import BaseMismatchError, SparsifyError

METHODS, SIGN_METHODS = ("ties", "dare_ties", "dare_linear"), ("total", "frequency")
_OF_ONE_TRAINING = {"budget", "schedule", "steps", "steps_done", "diff", "sum", ENTRIES_IN_WHOLE_KEY}
_OF_WHOLE = ("architecture", "model_config", PEFT_KEY, ADAPTERS_KEY)  # keys for whoever builds what is stored whole
Terms: TypeAlias = tuple[tuple[float, Any], ...]  # coefficients and SparseDeltas
# of one tensor: coefficients, entries, and the entries' places (k,) among those of all terms
Parts: TypeAlias = list[tuple[float, TensorDelta, Tensor]]


class Summable(Applicable):
    """The operators ``+``, ``-``, ``*`` and ``/`` of deltas and of sums of them."""

    def _terms(self) -> Terms:
        return ((1.0, self),)

    def then(self, second: Any) -> DeltaSequence:
        """The delta of two stages of training: ``second`` was trained on the base with this delta in it.

        Returns:
            An expression, as a sum of deltas is one: ``apply`` it, or ``save(path, base=base)``.
        """
        stages = self.terms if isinstance(self, DeltaSequence) else self._terms()
        is_sum = not isinstance(self, DeltaSequence) and [factor for factor, _ in stages] != [1]
        if is_sum or isinstance(second, DeltaSum) or not isinstance(second, Summable):
            raise SparsifyError("a stage is a single SparseDelta: evaluate a sum first, `total.on(base).then(second)`.")
        return DeltaSequence((*stages, (1.0, second)))

    def __add__(self, other: object) -> DeltaSum:
        return DeltaSum((*self._terms(), *other._terms())) if isinstance(other, Summable) else NotImplemented

    def __radd__(self, other: object) -> DeltaSum:
        # `sum` starts with 0
        return DeltaSum(self._terms()) if isinstance(other, int) and other == 0 else NotImplemented

    def __sub__(self, other: object) -> DeltaSum:
        return self + -1 * other if isinstance(other, Summable) else NotImplemented

    def __neg__(self) -> DeltaSum:
        return -1 * self

    def __mul__(self, factor: object) -> DeltaSum:
        if isinstance(factor, Summable):
            return NotImplemented
        number = finite(factor, "multiplied")
        return DeltaSum(tuple((number * own, delta) for own, delta in self._terms()))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> DeltaSum:
        if isinstance(divisor, Summable):
            return NotImplemented
        if (number := finite(divisor, "divided")) == 0:
            raise SparsifyError("a delta cannot be divided by 0.")
        return self * (1 / number)


class DeltaSum(Summable):
    """A sum of multiples of deltas, all trained on one base, to be evaluated on it.

    Entries that one term alone changes, with coefficient 1, get exactly that term's values; entries that come out
    unchanged are left out. A tensor stored whole is taken unscaled from the terms with a positive coefficient, which
    have to agree on it.

    Example:
        >>> from sparsify import SparseDelta
        >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> half = 0.5 * SparseDelta.diff(base, tuned, progress=False)
        >>> half
        DeltaSum(0.5 * SparseDelta(3 entries in 2 tensors, 0 tensors stored whole))
        >>> middle = (base.weight + tuned.weight) / 2
        >>> with half.applied(base):
        ...     print(torch.allclose(base.weight, middle))
        True
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms

    def entries_only(self) -> DeltaSum:
        """The sum without the tensors that its terms store whole; see :meth:`SparseDelta.entries_only`."""
        only = copy(self)
        only.terms = tuple((factor, delta.entries_only()) for factor, delta in self.terms)
        return only

    def on(self, base: Base, kind: str = "replace") -> Any:
        """Evaluates the expression on its base; returns a :class:`sparsify.SparseDelta`.

        Args:
            base: the plain model, or the path of its checkpoint, which is read a tensor at a time.
            kind: what the result stores: ``"replace"``: the new values, in the base's dtype; ``"add"``: the
                differences, in float32 at least, which a base in another dtype takes, too.

        Raises:
            SparsifyError: when the base is not that of the terms, or they do not fit together.
        """
        check(kind in KINDS, "kind is", kind, one_of(KINDS))
        names = dict.fromkeys(name for _, delta in self.terms for name in delta.tensors)
        dense = self._dense(names)
        names = dict.fromkeys(name for name in names if name not in dense)
        bases = find_base(names, base)
        tensors: dict[str, TensorDelta] = {}
        dtypes = []
        for name in names:
            target = bases[name]
            own = [(factor, delta.tensors[name]) for factor, delta in self.terms if name in delta.tensors]
            for _, part in own:
                patch_plan.check_fits(name, part, target.shape, target.dtype)
                dtypes.append((name, part.dtype, target.dtype))
            indices = torch.cat([part.indices for _, part in own]).unique()
            parts = [(factor, part, torch.searchsorted(indices, part.indices)) for factor, part in own]
            old = patch_plan.take(target, indices)
            total, new = self._change(name, parts, old, target)
            if (kept := _kept(name, indices, old, new if kind == "replace" else total, target, kind)) is not None:
                tensors[name] = kept
        patch_plan.warn_of_casts(dtypes, "the base", stacklevel=3)
        return type(self.terms[0][1])(tensors, dense, self._config())

    def plan(self, model: nn.Module) -> tuple[PatchPlan, NamedTensors]:
        return self.on(model).plan(model)

    def save(self, path: StrPath, *, base: Base, kind: str = "replace") -> None:
        """Evaluates the expression as :meth:`on` does and saves the result, see :meth:`SparseDelta.save`."""
        self.on(base, kind).save(path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({' + '.join(f'{factor:g} * {delta!r}' for factor, delta in self.terms)})"

    def _terms(self) -> Terms:
        if type(self) is not DeltaSum:
            raise SparsifyError(f"a {type(self).__name__} is no plain sum: evaluate it first, `.on(base)`.")
        return self.terms

    def _change(self, name: str, parts: Parts, base: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """The change (count,) float64 of one tensor's entries, and the new values in the dtype of ``base`` (count,)."""
        try:
            changes = [factor * change(name, part, target) for factor, part, _ in parts]
        except BaseMismatchError:
            with suppress(BaseMismatchError):  # the terms may be stages, each trained on the ones before it
                if all(factor == 1 for factor, *_ in parts):
                    return self._stages(name, parts, base, target)
            raise
        total = torch.zeros_like(base, dtype=torch.float64)
        terms = torch.cat([at for *_, at in parts]).bincount()
        for own, (_, _, at) in zip(changes, parts, strict=True):
            total[at] += own
        new = (base.double() + total).to(base.dtype)
        for factor, part, at in parts:
            if factor == 1 and part.kind == "replace":  # no arithmetic where none is asked for
                alone = terms[at] == 1
                new[at[alone]] = part.values[alone].to(base.dtype)
        return total, new

    def _stages(self, name: str, parts: Parts, base: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        """As :meth:`_change`, by stages of training."""
        new = base.clone()
        for _, part, at in parts:
            new[at] = new_values(name, part, new[at], is_quantized=isinstance(target, QuantizedDelta))
        return new.double() - base.double(), new

    def _dense(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        dense: dict[str, Tensor] = {}
        for factor, delta in self.terms:
            for name, tensor in delta.whole.items():
                if name in names:
                    problem = "changed at entries by one delta and stored whole by another: these two cannot be summed."
                    raise SparsifyError(f"tensor `{name}` is {problem}")
                if factor > 0 and not same_values(dense.setdefault(name, tensor), tensor):
                    problem = f"tensor `{name}` is stored whole by several deltas and differs in them"
                    remedy = "sum the entries alone: `(a + b).entries_only()`, `--entries-only` on the command line."
                    raise SparsifyError(f"{problem}; {remedy}")
        return dense

    def _config(self) -> dict[str, Any]:
        """The parts of the terms' configs that are equal in all and hold of the sum, too, and the list of terms."""
        common = _equal([delta.config for _, delta in self.terms])
        of_heads = _equal([delta.config for _, delta in self.terms if delta.whole])
        common |= {key: of_heads[key] for key in _OF_WHOLE if key in of_heads}
        return {**common, "sum": [{"coefficient": factor, "entries": d.num_entries} for factor, d in self.terms]}


class DeltaSequence(DeltaSum):
    """Two stages of training, the second of which began on the base with the first's delta in it.

    Where both change an entry, or store a tensor whole, the second's value counts.

    Example:
        >>> from sparsify import SparseDelta
        >>> base, tuned, preferred = nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)
        >>> first = SparseDelta.diff(base, tuned, progress=False)
        >>> both = first.then(SparseDelta.diff(tuned, preferred, progress=False))
        >>> both.apply(base).weight.equal(preferred.weight)
        True
    """

    _change = DeltaSum._stages

    def _dense(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        dense: dict[str, Tensor] = {}
        for _, delta in self.terms:
            for name in dense.keys() & delta.tensors.keys():
                write = plan_entries(name, delta.tensors[name], dense[name])
                dense[name] = put(dense[name].clone(), delta.tensors[name].indices, write.new)
            dense |= delta.whole
        return dense

    def _config(self) -> dict[str, Any]:
        """Each setting of the last stage that has it, the base's of the first, and the stages' numbers of entries."""
        configs = [{key: value for key, value in delta.config.items() if value} for _, delta in self.terms]
        config = {key: own[key] for own in configs for key in own if key not in _OF_ONE_TRAINING}
        config |= {key: value for key, value in configs[0].items() if key.startswith("base_")}
        return {**config, "stages": [delta.num_entries for _, delta in self.terms]}


def find_base(names: Iterable[str], base: Base) -> Mapping[str, Tensor]:
    return patch_plan.find_targets(names, base) if isinstance(base, nn.Module) else Checkpoint(base)


def _equal(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings that have one value in all configs, without those of a single training."""
    first = configs[0] if configs else {}
    shared = [key for key in first if all(config.get(key) == first[key] for config in configs)]
    return {key: first[key] for key in shared if key not in _OF_ONE_TRAINING}


def finite(number: Any, verb: str) -> float:
    with suppress(OverflowError):  # of an int
        if isinstance(number, Real) and math.isfinite(number):
            return float(number)
    raise SparsifyError(f"a delta cannot be {verb} by {number!r:.60}; expected a finite number.")


def change(name: str, part: TensorDelta, target: Tensor) -> Tensor:
    """Trained minus pretrained values, (count,) float64, of a tensor's entries; raises where it is not their base."""
    base, values = plan_entries(name, part, target).old, part.values.double()
    return values - base.double() if part.kind == "replace" else values


def _kept(name: str, indices: Tensor, base: Tensor, values: Tensor, target: Tensor, kind: str) -> TensorDelta | None:
    """The delta of those of a tensor's entries (count,) that end up changed, by new values or by differences."""
    values = values.to(torch.promote_types(target.dtype, torch.float32)) if kind == "add" else values
    kept = as_bits(values) != as_bits(base) if kind == "replace" else values != 0
    if not bool(kept.any()):
        return None
    try:
        sha, shape = digest(base[kept]), tuple(target.shape)
        quantization = target.scheme if isinstance(target, QuantizedDelta) else None
        return TensorDelta(indices[kept], values[kept], shape, target.dtype, kind, sha, quantization=quantization)
    except SparsifyError as error:
        raise SparsifyError(f"tensor `{name}`: the sum cannot be a delta: {error}") from error


class DeltaMerge(DeltaSum):
    """The result of :func:`merge_deltas`."""

    method, density, sign_method, seed = "ties", 1.0, "total", 0

    def _change(self, name: str, parts: Parts, base: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        changes = base.new_zeros(len(parts), base.numel(), dtype=torch.float64)
        for number, (_, part, at) in enumerate(parts):
            changes[number, at] = self._trimmed(change(name, part, target), f"{self.seed} {name} {number}")
        weighted = changes * changes.new_tensor([factor for factor, *_ in parts])[:, None]
        if self.method != "dare_linear":
            votes = changes if self.sign_method == "total" else changes.sign()
            agree = changes.sign() == torch.where(votes.sum(0) >= 0, 1, -1)
            weighted = weighted * agree / agree.sum(0).clamp(min=1)
        return weighted.sum(0), (base.double() + weighted.sum(0)).to(base.dtype)

    def _trimmed(self, changes: Tensor, seed: str) -> Tensor:
        """Changes (k,) of which a share is kept and the others are zero."""
        if self.method == "ties":
            kept = changes.abs().topk(max(1, int(self.density * changes.numel()))).indices
            return torch.zeros_like(changes).index_copy_(0, kept, changes[kept])
        generator = torch.Generator().manual_seed(int(hashlib.sha256(seed.encode()).hexdigest()[:15], 16))
        drawn = torch.rand(changes.shape, generator=generator, dtype=torch.float32, device="cpu")
        return changes * (drawn < self.density) / self.density


def merge_deltas(
    deltas: Iterable[Any], weights: Sequence[float] | None = None, method: str = "ties", *, density: float = 1.0,
    majority_sign_method: str = "total", seed: int = 0,
) -> DeltaMerge:  # fmt: skip
    """Merges deltas of one base by TIES or DARE; arguments as of PEFT's ``add_weighted_adapter``.

    Args:
        deltas: the :class:`sparsify.SparseDelta` of each task.
        weights: a factor for each; 1 by default.
        method: ``"ties"``, ``"dare_ties"`` or ``"dare_linear"``.
        density: the share of each delta's entries that is kept in each tensor: of those changed, not of the tensor.
        majority_sign_method: ``"total"``: the sign of the sum of the changes; ``"frequency"``: that of most of them.
        seed: of DARE's random choice.

    Returns:
        An expression, as a sum of deltas is one: ``apply`` it, or ``save(path, base=base)``.

    Raises:
        SparsifyError: when an argument is none of these.
    """
    deltas = list(deltas)
    check(all(hasattr(delta, "tensors") for delta in deltas), "deltas are", deltas, "deltas; save sums of them first")
    factors = [finite(weight, "multiplied") for weight in (weights if weights is not None else [1.0] * len(deltas))]
    check(method in METHODS, "method is", method, one_of(METHODS))
    check(majority_sign_method in SIGN_METHODS, "majority_sign_method is", majority_sign_method, one_of(SIGN_METHODS))
    check(0 < finite(density, "thinned out") <= 1, "density is", density, "a share, above 0 and at most 1")
    check(len(factors) == len(deltas) > 0, "there are weights", factors, f"a weight for each of {len(deltas)} deltas")
    merged = DeltaMerge(tuple(zip(factors, deltas, strict=True)))
    merged.method, merged.density, merged.sign_method, merged.seed = method, density, majority_sign_method, seed
    return merged
