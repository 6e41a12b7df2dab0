"""A lock that any number of readers hold together, or one writer alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from sparsify.errors import SparsifyError

_POLL_SECONDS = 0.001


class ReadWriteLock:
    """Readers and writers take turns: a writer waits for the readings in progress, later readings wait for the writer.

    A thread may read within its own reading, also while a writer waits. Readings may overlap in one thread, and end in
    another one, as asyncio's tasks and generators do. Writers poll: Ctrl-C could leave a condition variable locked.
    """

    def __init__(self) -> None:
        self._readings: dict[object, threading.Thread] = {}  # in progress, with the threads that began them
        self._door = threading.Lock()  # readers pass through, and a writer holds it

    def __reduce__(self) -> tuple[type[ReadWriteLock], tuple[()]]:
        return ReadWriteLock, ()  # a copy's threads are others

    def check_not_reading(self) -> None:
        """Raises where a reading that this thread began is in progress, for which a writer would wait."""
        if self._is_reading():
            raise SparsifyError("an update inside a block that reads the model would wait for itself: leave it first.")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps writers out for the length of a ``with`` block."""
        reading, thread = object(), threading.current_thread()
        try:
            with nullcontext() if self._is_reading() else self._door:
                self._readings[reading] = thread
            yield
        finally:
            self._readings.pop(reading, None)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps everybody else out for the length of a ``with`` block; raises inside a reading of the same thread."""
        self.check_not_reading()
        with self._door:
            while self._readings:
                time.sleep(_POLL_SECONDS)
            yield

    def _is_reading(self) -> bool:
        return threading.current_thread() in tuple(self._readings.values())
