"""A lock that any number of readers hold together, or one writer alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sparsify.errors import SparsifyError


class Turns:
    """Readers and writers take turns: a writer waits for the readers in progress, later readers wait for the writer.

    A thread may read within its own reading, also while a writer waits.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._writers = 0  # that write or wait to
        self._writing = False
        self._mine = threading.local()  # .depth: how many readings of this thread are in progress

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps writers out for the length of a ``with`` block."""
        depth = getattr(self._mine, "depth", 0)
        with self._changed:
            while self._writers and not depth:
                self._changed.wait()
            self._readers += 1
        self._mine.depth = depth + 1
        try:
            yield
        finally:
            self._mine.depth = depth
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps everybody else out for the length of a ``with`` block; raises inside a reading of the same thread."""
        if getattr(self._mine, "depth", 0):
            raise SparsifyError("an update inside a block that reads the model would wait for itself: leave it first.")
        with self._changed:
            self._writers += 1
            try:
                while self._readers or self._writing:
                    self._changed.wait()
            except BaseException:
                self._writers -= 1
                self._changed.notify_all()
                raise
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._writers -= 1
                self._changed.notify_all()
