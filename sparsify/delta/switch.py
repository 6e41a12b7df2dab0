"""Switches a model between named deltas, to serve many tasks from one base.

Each delta is checked against the base once, when it is attached; a change then reads and writes two deltas' entries.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from os import PathLike

from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import near_names
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.patch_plan import PatchPlan, holds, undone, write_plan
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError


class DeltaSwitch:
    """Named deltas on one model, one of them or the sum of several active.

    The model must not be used during a change: a server takes turns (``examples/serve_many_tasks.py``).

    Attributes:
        model: the base that all deltas were trained on, with the active delta in it.

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
        self._attached: dict[str, tuple[SparseDelta, PatchPlan]] = {}
        self._names: tuple[str, ...] = ()  # of what is active
        self._written: PatchPlan = []

    @property
    def active(self) -> str | tuple[str, ...] | None:
        """The name of the active delta, or those of several; ``None`` while the model is the base itself."""
        return self._names if len(self._names) > 1 else next(iter(self._names), None)

    def attach(self, name: str, delta: SparseDelta | DeltaSum | str | PathLike[str]) -> None:
        """Checks a delta against the base and plans its writes; the active delta stays active.

        Args:
            name: the name to activate it by.
            delta: a delta, or a sum of deltas; or what :meth:`SparseDelta.load` takes.

        Raises:
            BaseMismatchError: when the model without the active delta is not the delta's base.
            SparsifyError: when the name is taken, or the delta cannot be loaded.
        """
        if name in self._attached:
            raise SparsifyError(f"a delta called {name!r} is attached already: `detach({name!r})` it, or take another.")
        delta = SparseDelta.load(delta) if isinstance(delta, (str, PathLike)) else delta
        if not isinstance(delta, (SparseDelta, DeltaSum)):
            expected = "expected a SparseDelta, a sum of them, or the path or hub id of one."
            raise SparsifyError(f"a {type(delta).__name__} cannot be attached; {expected}")
        with self.deactivated():
            evaluated = delta.on(self.model) if isinstance(delta, DeltaSum) else delta
            self._attached[name] = evaluated, evaluated.plan(self.model)[0]

    def detach(self, name: str) -> None:
        """Forgets a delta; the active one is deactivated first."""
        self._checked(name)
        if name in self._names:
            self.deactivate()
        del self._attached[name]

    def activate(self, name: str | Sequence[str]) -> None:
        """Applies a delta, or the sum of several (``["a", "b"]``), in place of what is active.

        Where the base's weights were loaded again since, what was active is in the model again, too.

        Raises:
            SparsifyError: when no delta has that name, or something else has changed the model at the entries.
        """
        self._switch(self._checked(name))

    def deactivate(self) -> None:
        """Reverts the active delta, if there is one: the model is the base again, bit for bit."""
        self._switch(())

    @contextmanager
    def activated(self, name: str | Sequence[str] | None) -> Iterator[nn.Module]:
        """Activates a delta, or none, for the length of a ``with`` block; then the one that was active before."""
        before = self._names
        self._switch(() if name is None else self._checked(name))
        try:
            yield self.model
        finally:
            self._switch(tuple(name for name in before if name in self._attached))

    def deactivated(self) -> AbstractContextManager[nn.Module]:
        """Makes the model the base for the length of a ``with`` block."""
        return self.activated(None)

    def __len__(self) -> int:
        return len(self._attached)

    def __iter__(self) -> Iterator[str]:
        """The names of the attached deltas."""
        return iter(self._attached)

    def __repr__(self) -> str:
        return f"DeltaSwitch({', '.join(f'*{name}' if name in self._names else name for name in self)})"

    def _switch(self, names: tuple[str, ...]) -> None:
        if names == self._names and holds(self.model, [patch.inverse() for patch in self._written]):
            return
        # nothing is undone where the base's weights were loaded again since
        before = [] if holds(self.model, self._written) else self._written
        with uninterrupted(), undone(before, self.model):
            plan = self._attached[names[0]][1] if len(names) == 1 else []
            if len(names) > 1:
                plan, _ = DeltaSum(tuple((1.0, self._attached[name][0]) for name in names)).plan(self.model)
            write_plan(plan, self.model)
            self._names, self._written = names, plan

    def _checked(self, given: str | Sequence[str]) -> tuple[str, ...]:
        names = (given,) if isinstance(given, str) else tuple(given or ())
        if not names or not all(isinstance(name, str) for name in names):
            raise SparsifyError(f"{given!r:.60} names no delta: give names; `deactivate()` makes the model the base.")
        for name in names:
            if name not in self._attached:
                near = near_names(str(name), map(str, self._attached))
                raise SparsifyError(f"no delta called {name!r} is attached{near}: `attach({name!r}, delta)` it first.")
        return tuple(dict.fromkeys(names))
