"""Optional dependencies: imported here, with an error that names the extra to install where one is missing."""

import importlib
from types import ModuleType


class MissingExtraError(ImportError):
    """A package that an optional part of sparsify needs is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional dependency; ``MissingExtraError`` names the ``extra`` of sparsify that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, and one of its own dependencies is not
        raise MissingExtraError(
            f"`{error.name}` is not installed; it comes with: pip install 'sparsify-ft[{extra}]'", name=error.name
        ) from None
