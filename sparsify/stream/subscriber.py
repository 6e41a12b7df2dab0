"""The receiving end of a stream: keeps a plain model at the last version of a model in training."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import check_plain
from sparsify.delta.patch_plan import undo_plan, write_plan
from sparsify.errors import MissingUpdateError, StaleUpdateError
from sparsify.stream.lock import ReadWriteLock
from sparsify.stream.messages import Message, read_message
from sparsify.stream.plan import Held, plan_snapshot, plan_update
from sparsify.stream.publisher import DeltaUpdate

_REMEDY = "load the base afresh, make a new DeltaSubscriber of it, and apply `snapshot()`"


class DeltaSubscriber:
    """Keeps a plain model at the last version of a model in training.

    A message is checked, as are the values that it replaces (all or, where an update has all trained values, a sample),
    and written completely or not at all. Threads use the model within :meth:`reading`.

    Args:
        model: the base that the publisher's model was sparsified from, wrapped or not, on any device; it is changed in
            place.

    Attributes:
        model: the base with the version's values in it.
        chain: the id of the publisher that it follows; ``None`` before the first snapshot.
        version: the version that the model holds; ``None`` before the first snapshot.

    Raises:
        SparsifyError: when the model is being trained sparsely.
    """

    def __init__(self, model: nn.Module) -> None:
        check_plain(model)
        self.model = model
        self.chain: str | None = None
        self.version: int | None = None
        self._held = Held({}, {}, {})
        self._left: set[str] = set()  # chains that were followed before
        self._lock, self._applying = ReadWriteLock(), threading.Lock()

    def apply(self, update: bytes | DeltaUpdate) -> int:
        """Brings the model to the version of a message, once no thread is :meth:`reading`; returns the version.

        Raises:
            DeltaFormatError: when the message is damaged: have it sent again.
            StaleUpdateError: when the model is past it already: drop it.
            MissingUpdateError: when it does not follow the model's version, or is of another publisher: apply
                ``snapshot()`` first.
            BaseMismatchError: when the model is not the base that the publisher's model was sparsified from.
            SparsifyError: when something else has changed the model: make a new subscriber of a base that is loaded
                afresh. The model is as before after each of these.
        """
        self._lock.check_not_reading()
        with self._applying:
            message = read_message(bytes(update))
            self._check_order(message)
            if message.snapshot:
                self._restart(message)
            else:
                steps, held = plan_update(message.changes, self._held, self.model)
                with self._lock.writing(), uninterrupted():
                    write_plan(steps, self.model, f"the values of version {self.version}", _REMEDY)
                    self._held, self.version = held, message.version
        return message.version

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Keeps the model at one version, which is given, for the length of a ``with`` block.

        Work that the block starts on a GPU has to be on the stream that updates are applied on, usually the default.
        """
        with self._lock.reading():
            yield self.version

    def _check_order(self, message: Message) -> None:
        """Raises unless a message brings the model to a later version."""
        at = "no version yet" if self.version is None else f"version {self.version}"
        has_left = message.chain in self._left
        if has_left or (message.chain == self.chain and message.version <= (self.version or 0)):
            run, at = ("an earlier run", f"{at} of a later one") if has_left else ("this run", at)
            raise StaleUpdateError(f"this is version {message.version} of {run}, and the model holds {at}: drop it.")
        if not message.snapshot and (message.chain != self.chain or message.version - 1 != self.version):
            other = "" if message.chain == self.chain or self.chain is None else " of another run"
            raise MissingUpdateError(
                f"this update makes version {message.version} from version {message.version - 1}, and the model holds "
                f"{at}{other}: ask the publisher for `snapshot()`, and go on with the updates after it."
            )

    def _restart(self, message: Message) -> None:
        """Brings the model to a snapshot's version, from the base's values."""
        with self._lock.writing(), uninterrupted():
            before = self._held.plan
            undo_plan(before, self.model, _REMEDY)
            try:
                held = plan_snapshot(message.changes, self.model)
                write_plan(held.plan, self.model)
            except BaseException:
                write_plan(before, self.model)
                raise
            if self.chain is not None and self.chain != message.chain:
                self._left.add(self.chain)
            self._held, self.chain, self.version = held, message.chain, message.version
