"""The errors of the library: each says what was wrong, what was expected, and what to do.

They are also ``ValueError``s, so that callers who know nothing of this library can catch them.
"""


class SparsifyError(ValueError):
    """A model, an argument or a call that sparsify cannot work with."""


class DeltaFormatError(SparsifyError):
    """A delta file that is broken, truncated, or not a delta at all."""


class BaseMismatchError(SparsifyError):
    """A delta that meets a model which is not the base it was trained on."""
