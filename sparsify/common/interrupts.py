"""Sections of code that Ctrl-C, or a notebook's stop button, does not interrupt."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch


def uninterrupted() -> AbstractContextManager[None]:
    """Defers SIGINT to the end of a ``with`` block.

    For short blocks that change a model and its bookkeeping together. Python runs signal handlers in the main thread
    only; in other threads, and in a function that is being compiled, this does nothing.
    """
    if torch.compiler.is_dynamo_compiling() or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _Deferred()


class _Deferred(AbstractContextManager[None]):
    """Replaces the handler of SIGINT by one that only records the signal."""

    def __enter__(self) -> None:
        self._received: tuple[int, FrameType | None] | None = None
        self._handler: Any = signal.getsignal(signal.SIGINT)
        if callable(self._handler):  # neither ignored, nor the system's own, nor one that Python cannot see
            # once this call has returned, no KeyboardInterrupt can come between here and the block
            signal.signal(signal.SIGINT, self._record)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self._received = number, frame

    def __exit__(self, *error: object) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._received is not None:
                self._handler(*self._received)
