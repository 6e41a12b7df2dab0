"""Sections of code that Ctrl-C, or a notebook's stop button, does not cut in two."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class Uninterrupted:
    """Defers SIGINT to the end of a ``with`` block, so that the block runs whole or not at all.

    For short blocks that change a model and its books together. Python runs signal handlers in the main thread only,
    so in any other thread there is nothing to do.

    Example:
        >>> with Uninterrupted():
        ...     changed = True
    """

    def __enter__(self) -> None:
        self._pending: tuple[int, FrameType | None] | None = None
        self._handler: Any = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):  # neither ignored, nor the system's own, nor one that Python cannot see
                # from the next line on no KeyboardInterrupt is raised here: nothing can part it from the with block
                self._handler = handler
                signal.signal(signal.SIGINT, self._defer)

    def _defer(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        signal.signal(signal.SIGINT, self._handler)
        if self._pending is not None:
            self._handler(*self._pending)
