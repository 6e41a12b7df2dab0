"""The errors of the library: each says what was wrong, what was expected, and what to do.

They are also ``ValueError``s, so that callers who know nothing of this library can catch them.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any


class SparsifyError(ValueError):
    """A model, an argument or a call that sparsify cannot work with; what is not printable in its text is escaped."""

    def __str__(self) -> str:
        return printable(super().__str__())


class DeltaFormatError(SparsifyError):
    """A delta file that is broken, truncated, or not a delta at all."""


class BaseMismatchError(SparsifyError):
    """A delta that meets a model which is not the base it was trained on."""


class MissingUpdateError(SparsifyError):
    """An update that does not follow the version that a follower holds: it needs a snapshot first."""


class StaleUpdateError(SparsifyError):
    """A message of a version that a follower is past already: it can be dropped."""


def printable(text: object) -> str:
    """Untrusted text with everything escaped that could control a terminal or turn the direction of writing."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(text))


def brief(text: object, most: int = 300) -> str:
    """Untrusted text, or another library's error, for a message: on one line, printable and not long."""
    line = "".join(char if char.isprintable() else "?" for char in " ".join(str(text).split()))
    line = line.rstrip(".") if isinstance(text, BaseException) else line
    return line if len(line) <= most else f"{line[:most].rstrip()}..."


def did_you_mean(value: Any, names: Iterable[str]) -> str:
    """A sentence with the name nearest to a value, whatever its case; empty where none is near."""
    near = get_close_matches(str(value).lower().replace("_", "-"), names, n=1)
    return f" Did you mean {near[0]!r}?" if near else ""
