"""Task arithmetic: sums and multiples of deltas, as expressions that meet their base later.

    0.5 * a + b - c   ->   DeltaSum   --on(base)-->   a delta like any other

A replacement means nothing without the value that it replaces, so that an expression only remembers its terms. On a
base, each term becomes a change, trained minus pretrained, and the changes are added over the union of the entries.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from numbers import Real
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from sparsify.common.raw_bits import as_bits, digest, same_values
from sparsify.delta.checkpoint.reader import base_tensor, open_base
from sparsify.delta.entries import KINDS, TensorDelta
from sparsify.delta.metadata import ENTRIES_IN_WHOLE_KEY
from sparsify.delta.patch_plan import Edit, check_not_drawn, plan_entries, warn_of_casts
from sparsify.delta.quantized_delta import OverlaidWeight, overlaid
from sparsify.errors import SparsifyError


class Delta(Protocol):
    """What is summed."""

    tensors: dict[str, TensorDelta]
    whole: dict[str, Tensor]
    config: dict[str, Any]

    def plan(self, model: nn.Module) -> list[Edit]: ...
    def entries_only(self) -> Any: ...
    def apply(self, model: nn.Module) -> nn.Module: ...
    def revert(self, model: nn.Module) -> nn.Module: ...
    def save(self, path: str | os.PathLike[str]) -> None: ...


_OF_ONE_TRAINING = {"budget", "schedule", "steps", "steps_done", "diff", "sum", ENTRIES_IN_WHOLE_KEY}
Term = tuple[float, Any]  # a coefficient and a Delta
Parts = list[tuple[float, TensorDelta]]
Self = TypeVar("Self", bound="Summable")


class Summable:
    """What can be added, subtracted, and multiplied by a number."""

    def _terms(self) -> tuple[Term, ...]:
        return ((1.0, self),)

    def __add__(self, other: object) -> DeltaSum:
        return DeltaSum((*self._terms(), *other._terms())) if isinstance(other, Summable) else NotImplemented

    def __radd__(self, other: object) -> DeltaSum:
        starts = isinstance(other, int) and other == 0  # the 0 that `sum` starts with
        return DeltaSum(self._terms()) if starts else NotImplemented

    def __sub__(self, other: object) -> DeltaSum:
        return self + -1 * other if isinstance(other, Summable) else NotImplemented

    def __neg__(self) -> DeltaSum:
        return -1 * self

    def __mul__(self, factor: object) -> DeltaSum:
        if isinstance(factor, Summable):
            return NotImplemented
        number = _finite(factor, "multiplied")
        return DeltaSum(tuple((number * own, delta) for own, delta in self._terms()))

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> DeltaSum:
        if isinstance(divisor, Summable):
            return NotImplemented
        number = _finite(divisor, "divided")
        if number == 0:
            raise SparsifyError("a delta cannot be divided by 0.")
        return self * (1 / number)


class DeltaSum(Summable):
    """A sum of multiples of deltas, all trained on one base, that waits for it.

    Entries that one term alone changes, with coefficient 1, get exactly that term's values; entries that come out
    unchanged are left out. A tensor stored whole is no change of anything: it is taken as it is from the terms with a
    positive coefficient, which must not disagree.

    Args:
        terms: pairs of a coefficient and a delta.

    Example:
        >>> from sparsify import SparseDelta
        >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> _ = tuned.load_state_dict({"weight": base.weight + 2, "bias": base.bias})
        >>> delta = SparseDelta.diff(base, tuned)
        >>> half = 0.5 * delta
        >>> half
        DeltaSum(0.5 * SparseDelta(2 entries in 1 tensor, 0 tensors stored whole))
        >>> with half.applied(base):
        ...     print(torch.allclose(base.weight + 1, tuned.weight))
        True
    """

    def __init__(self, terms: tuple[Term, ...]) -> None:
        if not terms:
            raise SparsifyError("a sum of deltas has to have a term: give at least one pair of a number and a delta.")
        self.terms = terms
        self._applied: WeakKeyDictionary[nn.Module, Delta] = WeakKeyDictionary()

    def entries_only(self) -> DeltaSum:
        """The sum without the tensors that its terms store whole; as :meth:`SparseDelta.entries_only`.

        Tasks that were trained with a head each can be summed so: ``(a + 0.5 * b).entries_only()``.
        """
        return DeltaSum(tuple((factor, delta.entries_only()) for factor, delta in self.terms))

    def on(self, base: nn.Module | str | os.PathLike[str], kind: str = "replace") -> Any:
        """The expression's value on its base: a delta.

        Args:
            base: the plain model, or the path of its checkpoint, which is not loaded as a whole.
            kind: ``"replace"``: the delta stores the new values in the base's dtype, and loads without arithmetic;
                ``"add"``: it stores the differences, in float32 at least, which go onto a base in another dtype, too.

        Returns:
            A :class:`sparsify.SparseDelta`.

        Raises:
            BaseMismatchError: when the base is not the one that the terms were trained on.
            SparsifyError: when the terms do not fit together, or the result cannot be a delta.
        """
        if kind not in KINDS:
            raise SparsifyError(f"kind={kind!r}; expected one of {', '.join(KINDS)}.")
        for _, delta in self.terms:
            check_not_drawn(delta.tensors, "a sum")
        available = open_base(base)
        names = dict.fromkeys(name for _, delta in self.terms for name in delta.tensors)
        whole = self._whole(names)
        tensors: dict[str, TensorDelta] = {}
        casts: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        for name in names:
            parts = [(factor, delta.tensors[name]) for factor, delta in self.terms if name in delta.tensors]
            target = base_tensor(name, available)
            if isinstance(base, nn.Module):
                target = overlaid({name: target}, base)[name]
            if others := [part.dtype for _, part in parts if part.dtype != target.dtype]:
                casts[name] = (others[0], target.dtype)
            combined = _combine(name, parts, target, kind)
            if combined is not None:
                tensors[name] = combined
        warn_of_casts(casts, "the base", stacklevel=3)
        return type(self.terms[0][1])(tensors, whole, self._config())

    def plan(self, model: nn.Module) -> list[Edit]:
        """The edits that :meth:`apply` would write into a model; as :meth:`SparseDelta.plan`."""
        delta: Delta = self.on(model)
        return delta.plan(model)

    def apply(self, model: nn.Module) -> nn.Module:
        """Puts the expression's value into a base model, in place; as :meth:`SparseDelta.apply`."""
        if model in self._applied:
            raise SparsifyError("this sum of deltas is already applied to this model: call `revert(model)` first.")
        delta = self.on(model)
        delta.apply(model)
        self._applied[model] = delta
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts back, bit for bit, what :meth:`apply` replaced; as :meth:`SparseDelta.revert`."""
        if model not in self._applied:
            raise SparsifyError("this sum of deltas is not applied to this model, so there is nothing to revert.")
        self._applied[model].revert(model)
        del self._applied[model]
        return model

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Applies the sum for the length of a ``with`` block, and reverts it however the block ends."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)

    def save(
        self, path: str | os.PathLike[str], *, base: nn.Module | str | os.PathLike[str], kind: str = "replace"
    ) -> None:
        """Writes the expression's value on its base, as :meth:`SparseDelta.save` does; arguments as in :meth:`on`."""
        self.on(base, kind).save(path)

    def __repr__(self) -> str:
        return f"DeltaSum({' + '.join(f'{factor:g} * {delta!r}' for factor, delta in self.terms)})"

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave behind which models the sum is applied to."""
        return {"terms": self.terms}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _terms(self) -> tuple[Term, ...]:
        return self.terms

    def _whole(self, names: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors stored whole, on which the terms agree."""
        whole: dict[str, Tensor] = {}
        for factor, delta in self.terms:
            for name, tensor in delta.whole.items():
                if name in names:
                    raise SparsifyError(
                        f"tensor `{name}` is changed at entries by one delta and stored whole by another: these two "
                        "cannot be summed."
                    )
                if factor > 0 and not same_values(whole.setdefault(name, tensor), tensor):
                    raise SparsifyError(
                        f"tensor `{name}` is stored whole by several deltas and differs between them; there is no base "
                        "to sum it on: sum the entries alone (`(a + b).entries_only()`; `--entries-only` on the "
                        "command line), and keep a head for each task."
                    )
        return whole

    def _config(self) -> dict[str, Any]:
        """What all terms' configs have in common and the sum has, too, and where the sum comes from."""
        first = self.terms[0][1].config
        shared = [key for key in first if all(delta.config.get(key) == first[key] for _, delta in self.terms)]
        common = {key: first[key] for key in shared if key not in _OF_ONE_TRAINING}
        return {**common, "sum": [{"coefficient": factor, "entries": d.num_entries} for factor, d in self.terms]}


def _finite(number: object, verb: str) -> float:
    """A number that a delta is multiplied or divided by."""
    value = math.nan
    if isinstance(number, Real):
        with suppress(OverflowError):  # a very large integer
            value = float(number)
    if not math.isfinite(value):
        what = f"{number!r:.60}" if isinstance(number, (Real, str)) else f"a {type(number).__name__}"
        raise SparsifyError(f"a delta cannot be {verb} by {what}; expected a finite number.")
    return value


def change(part: TensorDelta, base: Tensor) -> Tensor:
    """What a tensor's entries change by.

    Args:
        part: the entries.
        base: (count,) the base's values there.

    Returns:
        (count,) float64: trained minus pretrained.
    """
    return part.values.double() - base.double() if part.kind == "replace" else part.values.double()


def _combine(name: str, parts: Parts, target: Tensor, kind: str) -> TensorDelta | None:
    """The weighted sum of one tensor's changes, over the union of their entries that end up changed."""
    edits = [plan_entries(name, part, target) for _, part in parts]  # for its checks, and the base's values
    indices = torch.cat([part.indices for _, part in parts]).unique()
    base = torch.empty_like(indices, dtype=target.dtype)
    total = torch.zeros_like(indices, dtype=torch.float64)
    touched = torch.zeros_like(indices)
    places = [torch.searchsorted(indices, part.indices) for _, part in parts]
    for (factor, part), edit, at in zip(parts, edits, places, strict=True):
        base[at] = edit.old
        total[at] += factor * change(part, edit.old)
        touched[at] += 1
    new = (base.double() + total).to(target.dtype)
    for (factor, part), at in zip(parts, places, strict=True):
        if factor == 1 and part.kind == "replace":  # no arithmetic where none is asked for
            alone = touched[at] == 1
            new[at[alone]] = part.values[alone].to(target.dtype)
    values = new if kind == "replace" else total.to(torch.promote_types(target.dtype, torch.float32))
    kept = as_bits(values) != as_bits(base) if kind == "replace" else values != 0
    if not bool(kept.any()):
        return None
    try:
        sha, shape = digest(base[kept]), parts[0][1].shape
        quantization = target.scheme if isinstance(target, OverlaidWeight) else None
        return TensorDelta(indices[kept], values[kept], shape, target.dtype, kind, sha, quantization=quantization)
    except SparsifyError as error:
        raise SparsifyError(f"tensor `{name}`: the sum cannot be a delta: {error}") from error
