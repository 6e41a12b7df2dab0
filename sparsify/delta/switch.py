"""Switches a model between named deltas, to serve many tasks from one base.

Each delta is checked against the base once, when it is attached; a change then reads and writes two deltas' entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from os import PathLike

from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import near_names
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.patch_plan import PatchPlan, undone, write_plan
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError


class DeltaSwitch:
    """Named deltas on one model, at most one of them active.

    The model must not be used during a change: a server takes turns (``examples/serve_many_tasks.py``).

    Attributes:
        model: the base that all deltas were trained on, with the active delta in it.
        active: the name of the active delta; ``None`` while the model is the base itself.

    Example:
        >>> base, tuned = nn.Linear(2, 1), nn.Linear(2, 1)
        >>> before = base.weight.detach().clone()
        >>> switch = DeltaSwitch(base)
        >>> switch.attach("tuned", SparseDelta.diff(base, tuned, progress=False))
        >>> switch.activate("tuned")
        >>> base.weight.equal(tuned.weight)
        True
        >>> switch.deactivate()
        >>> base.weight.equal(before)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active: str | None = None
        self._plans: dict[str, PatchPlan] = {}

    def attach(self, name: str, delta: SparseDelta | DeltaSum | str | PathLike[str]) -> None:
        """Checks a delta against the base and plans its writes; the active delta stays active.

        Args:
            name: the name to activate it by.
            delta: a delta, or a sum of deltas; or what :meth:`SparseDelta.load` takes.

        Raises:
            BaseMismatchError: when the model without the active delta is not the delta's base.
            SparsifyError: when the name is taken, or the delta cannot be loaded.
        """
        if name in self._plans:
            raise SparsifyError(f"a delta called {name!r} is attached already: `detach({name!r})` it, or take another.")
        if isinstance(delta, (str, PathLike)):
            delta = SparseDelta.load(delta)
        if not isinstance(delta, (SparseDelta, DeltaSum)):
            expected = "expected a SparseDelta, a sum of them, or the path or hub id of one."
            raise SparsifyError(f"a {type(delta).__name__} cannot be attached; {expected}")
        with self.deactivated():
            self._plans[name] = delta.plan(self.model)

    def detach(self, name: str) -> None:
        """Forgets a delta; the active one is deactivated first."""
        self._check_name(name)
        if name == self.active:
            self.deactivate()
        del self._plans[name]

    def activate(self, name: str) -> None:
        """Applies a delta in place of the active one.

        Raises:
            SparsifyError: when no delta has that name, or something else has changed the model at the entries.
        """
        self._check_name(name)
        self._switch(name)

    def deactivate(self) -> None:
        """Reverts the active delta, if there is one: the model is the base again, bit for bit."""
        self._switch(None)

    @contextmanager
    def activated(self, name: str | None) -> Iterator[nn.Module]:
        """Activates a delta, or none, for the length of a ``with`` block; then the one that was active before."""
        before = self.active
        if name is not None:
            self._check_name(name)
        self._switch(name)
        try:
            yield self.model
        finally:
            self._switch(before)

    def deactivated(self) -> AbstractContextManager[nn.Module]:
        """Makes the model the base for the length of a ``with`` block."""
        return self.activated(None)

    def __len__(self) -> int:
        return len(self._plans)

    def __iter__(self) -> Iterator[str]:
        """The names of the attached deltas."""
        return iter(self._plans)

    def __repr__(self) -> str:
        return f"DeltaSwitch({', '.join(f'*{name}' if name == self.active else name for name in self._plans)})"

    def _switch(self, name: str | None) -> None:
        if name != self.active:
            before, after = ([] if key is None else self._plans[key] for key in (self.active, name))
            with uninterrupted(), undone(before, self.model):
                write_plan(after, self.model)
                self.active = name

    def _check_name(self, name: str) -> None:
        if name not in self._plans:
            near = near_names(str(name), map(str, self._plans))
            raise SparsifyError(f"no delta called {name!r} is attached{near}: `attach({name!r}, delta)` it first.")
