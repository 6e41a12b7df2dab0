"""The process's resident memory: its peak so far, and what a piece of code adds to it at most."""

from __future__ import annotations

import ctypes
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass
class Added:
    """How much a block's peak lay above what was resident before it."""

    bytes: int = 0


def peak_bytes() -> int:
    """The largest resident set that this process has had."""
    if _STATUS.exists():  # Linux counts what the parent had before the exec into ru_maxrss
        return _status("VmHWM")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def added_bytes() -> Iterator[Added]:
    """Measures the largest resident set within a block, beyond the one before it; 0 where the system cannot tell."""
    added = Added()
    if not _CLEAR.exists():
        yield added
        return
    _trim()
    _CLEAR.write_text("5")  # the peak starts anew, proc(5)
    before = _status("VmRSS")
    yield added
    added.bytes = max(0, _status("VmHWM") - before)


def _trim() -> None:
    # The C library keeps freed memory resident: what a block takes from there would not be seen.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(field: str) -> int:
    (kilobytes,) = re.findall(rf"{field}:\s+(\d+) kB", _STATUS.read_text())
    return int(kilobytes) * 1024
