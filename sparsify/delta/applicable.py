"""What goes onto a base model and off again, bit for bit: a delta, or a sum of deltas.

base model --apply--> the trained model --swap--> another one --revert--> the base
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.delta.patch_plan import PatchPlan, undo_plan, write_plan
from sparsify.errors import SparsifyError


class Applicable(ABC):
    """Writes its values into models, in place, and puts back what it replaced: values that it kept."""

    @cached_property
    def _applied(self) -> WeakKeyDictionary[nn.Module, PatchPlan]:
        """What is written into models, which this does not keep alive."""
        return WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out of copies and pickles the models that the delta is applied to."""
        return {key: value for key, value in vars(self).items() if key != "_applied"}

    @abstractmethod
    def plan(self, model: nn.Module) -> PatchPlan:
        """Plans and checks the writes of :meth:`apply`; nothing is written."""

    def apply(self, model: nn.Module) -> nn.Module:
        """Writes the delta's values into a base model, in place, after all checks; returns the model.

        A base in another dtype than the delta was trained on cannot be checked: one warning says so, and the values
        are cast.

        Over a quantized weight nothing is written: the trained entries' part of its layer's output is added to it, and
        no state dict holds them. A delta that was trained on a quantized weight also goes onto the weight from before
        it was quantized, which cannot be checked either.

        Args:
            model: the base that the delta was trained on, wrapped or not, on any device.

        Raises:
            BaseMismatchError: when the model lacks a tensor, or has another shape or other values at the entries.
            SparsifyError: when the model is being trained sparsely, lies on the meta device, or has this delta already.
        """
        if model in self._applied:
            raise SparsifyError(
                "this delta is already applied to this model, and applying it again would lose the original values: "
                "call `revert(model)` first."
            )
        self._write(self.plan(model), model)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Puts back, bit for bit, what :meth:`apply` replaced; returns the model, which may have moved or been cast.

        Args:
            model: a model that this delta is applied to.

        Raises:
            SparsifyError: when the delta is not applied to the model, or the entries do not hold its values any more.
        """
        self._undo(model)
        return model

    def swap(self, model: nn.Module, other: Applicable) -> nn.Module:
        """Reverts this delta, applies another one and returns the model; only the two deltas' entries are written.

        Args:
            model: a model that this delta is applied to.
            other: a delta trained on the same base.

        Raises:
            SparsifyError: as :meth:`revert` and :meth:`apply`; the model then holds this delta, as before.
        """
        with uninterrupted():
            plan = self._undo(model)
            try:
                return other.apply(model)
            except BaseException:
                self._write(plan, model)
                raise

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[nn.Module]:
        """Applies the delta for the length of a ``with`` block, and reverts it however the block ends."""
        self.apply(model)
        try:
            yield model
        finally:
            self.revert(model)

    def _write(self, plan: PatchPlan, model: nn.Module) -> None:
        """Writes a plan and records it, both or neither."""
        with uninterrupted():
            write_plan(plan, model)
            self._applied[model] = plan

    def _undo(self, model: nn.Module) -> PatchPlan:
        """Undoes the model's plan and returns it; raises if there is none, or the model does not hold its values."""
        if model not in self._applied:
            raise SparsifyError(
                "this delta is not applied to this model, so there is nothing to revert: pass the object that `apply` "
                "got, not a copy or a wrapper of it."
            )
        with uninterrupted():
            undo_plan(self._applied[model], model)
            return self._applied.pop(model)
