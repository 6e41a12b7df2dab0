"""Sections of code that Ctrl-C, or a notebook's stop button, does not interrupt."""

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


def uninterrupted() -> AbstractContextManager[None]:
    """Defers SIGINT to the end of a short ``with`` block that changes a model and its bookkeeping together."""
    # Python runs signal handlers in the main thread only
    if torch.compiler.is_dynamo_compiling() or threading.current_thread() is not threading.main_thread():
        return nullcontext()
    handler = signal.getsignal(signal.SIGINT)
    # one that is not callable ignores it, is the system's own, or one that Python cannot see
    return _deferred(handler) if callable(handler) else nullcontext()


@contextmanager
def _deferred(handler: Any) -> Iterator[None]:
    received = list[Any]()
    signal.signal(signal.SIGINT, lambda *arguments: received.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if received:
            handler(*received[-1])
