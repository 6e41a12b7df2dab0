"""Sections of code that Ctrl-C, or a notebook's stop button, does not cut in two."""

from __future__ import annotations

import signal
import threading
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

import torch


def uninterrupted() -> AbstractContextManager[None]:
    """Defers SIGINT to the end of a ``with`` block, so that the block runs to its end once it has begun.

    For short blocks that change a model and its books together. Python runs signal handlers in the main thread only;
    in any other thread, and in a function that is being compiled, there is nothing to do.

    Example:
        >>> with uninterrupted():
        ...     changed = True
    """
    if torch.compiler.is_dynamo_compiling() or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return _Deferred()


class _Deferred(AbstractContextManager[None]):
    """The handler of SIGINT is another one in the block, which only takes a note."""

    def __enter__(self) -> None:
        self._noted: tuple[int, FrameType | None] | None = None
        self._handler: Any = signal.getsignal(signal.SIGINT)
        if callable(self._handler):  # neither ignored, nor the system's own, nor one that Python cannot see
            # once this has been called no KeyboardInterrupt can come between here and the block
            signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._noted is not None:
                self._handler(*self._noted)
