"""Several deltas at hand for one model, one of them on at a time: what serving many tasks from one base takes.

In: a base model and named deltas. Each is checked against the base once, when it is attached; from then on a change of
delta reads and writes the entries of the two concerned.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from os import PathLike

from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.patch_plan import Edit, redo_all, undo_all, write_all
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError


class DeltaSwitch:
    """Named deltas on one model, at most one of them active.

    The model must not be used while a delta is being changed: a server takes turns (``examples/serve_many_tasks.py``).

    Args:
        model: the base that all deltas were trained on; it is changed in place.

    Attributes:
        model: the base, with the active delta in it.
        active: the name of the active delta; ``None`` while the model is the base itself.

    Example:
        >>> import torch
        >>> from sparsify.delta.entries import TensorDelta, digest
        >>> base = nn.Linear(2, 1, bias=False)
        >>> entry = torch.tensor([1])
        >>> sha = digest(base.weight[0, 1])
        >>> def task(value):
        ...     return SparseDelta(
        ...         {"weight": TensorDelta(entry, torch.tensor([value]), (1, 2), torch.float32, "replace", sha)}
        ...     )
        >>> switch = DeltaSwitch(base)
        >>> switch.attach("five", task(5.0))
        >>> switch.attach("seven", task(7.0))
        >>> switch.activate("five")
        >>> switch.activate("seven")
        >>> base.weight[0, 1].item()
        7.0
        >>> switch.deactivate()
        >>> digest(base.weight[0, 1]) == sha
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.active: str | None = None
        self._edits: dict[str, list[Edit]] = {}

    def attach(self, name: str, delta: SparseDelta | DeltaSum | str | PathLike[str]) -> None:
        """Checks a delta against the base and keeps it at hand; what is active stays.

        Args:
            name: what to call it.
            delta: the delta, or a sum of deltas; or where to load one from, as :meth:`SparseDelta.load` does: a folder,
                a file, or the id of a repository on the hub.

        Raises:
            DeltaFormatError: when the file is broken, or no delta.
            BaseMismatchError: when the model without the active delta is not the delta's base.
            SparsifyError: when the name is taken, there is no delta at the path, or the active delta is no longer what
                the model holds.
        """
        if name in self._edits:
            raise SparsifyError(f"a delta called {name!r} is attached already: `detach({name!r})` it, or take another.")
        if isinstance(delta, (str, PathLike)):
            delta = SparseDelta.load(delta)
        if not isinstance(delta, (SparseDelta, DeltaSum)):
            raise SparsifyError(
                f"a {type(delta).__name__} cannot be attached; expected a SparseDelta, a sum of them, or the path or "
                "hub id of one."
            )
        with self.deactivated():
            self._edits[name] = delta.plan(self.model)

    def detach(self, name: str) -> None:
        """Lets go of a delta; the active one is taken off first.

        Raises:
            SparsifyError: when no delta has that name, or it cannot be taken off.
        """
        self._check_name(name)
        if name == self.active:
            self.deactivate()
        del self._edits[name]

    def activate(self, name: str) -> None:
        """Puts a delta on, in place of the active one.

        Raises:
            SparsifyError: when no delta has that name, or the model no longer holds what is to be replaced; what was
                active is active still.
        """
        self._check_name(name)
        if name == self.active:
            return
        before = self.active
        with uninterrupted():
            self.deactivate()
            try:
                redo_all(self._edits[name], self.model)
            except BaseException:
                if before is not None:
                    write_all(self._edits[before], self.model)
                    self.active = before
                raise
            self.active = name

    def deactivate(self) -> None:
        """Takes the active delta off, if there is one: the model is the base again, bit for bit.

        Raises:
            SparsifyError: when the model no longer holds the active delta's values.
        """
        with uninterrupted():
            if self.active is not None:
                undo_all(self._edits[self.active], self.model)
                self.active = None

    @contextmanager
    def activated(self, name: str) -> Iterator[nn.Module]:
        """Another delta for the length of a ``with`` block; afterwards what was active before."""
        before = self.active
        self.activate(name)
        try:
            yield self.model
        finally:
            self._back_to(before)

    @contextmanager
    def deactivated(self) -> Iterator[nn.Module]:
        """The base itself for the length of a ``with`` block; afterwards what was active before."""
        before = self.active
        self.deactivate()
        try:
            yield self.model
        finally:
            self._back_to(before)

    def __len__(self) -> int:
        return len(self._edits)

    def __iter__(self) -> Iterator[str]:
        """The names of the attached deltas."""
        return iter(self._edits)

    def __repr__(self) -> str:
        return f"DeltaSwitch({', '.join(f'*{name}' if name == self.active else name for name in self._edits)})"

    def _back_to(self, name: str | None) -> None:
        if name is None:
            self.deactivate()
        else:
            self.activate(name)

    def _check_name(self, name: str) -> None:
        if name not in self._edits:
            near = get_close_matches(str(name), map(str, self._edits), n=3) or list(self._edits)[:3]
            hint = f" (there are: {', '.join(map(repr, near))})" if near else ""
            raise SparsifyError(f"no delta called {name!r} is attached{hint}: `attach({name!r}, delta)` it first.")
