"""Optional dependencies: imported here, with an error that names the extra to install where one is missing."""

import importlib
import sys
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any


class MissingExtraError(ImportError):
    """A package that an optional part of sparsify needs is not installed."""


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional dependency; ``MissingExtraError`` names the ``extra`` of sparsify that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, and one of its own dependencies is not
        remedy = f"it comes with: pip install 'sparsify-ft[{extra}]'"
        raise MissingExtraError(f"`{error.name}` is not installed; {remedy}", name=error.name) from None


def import_after(module: str, other: str) -> None:
    """Imports ``other`` right after ``module``: now, or as soon as that is; where it fails, its own users see why."""

    def find_spec(name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != module:
            return None
        others = [each for each in sys.meta_path if each is not finder and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(name, path, target) for each in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(new: ModuleType) -> None:
                execute(new)
                import_after(module, other)

            spec.loader.exec_module = exec_module  # type: ignore[assignment, method-assign]
        return spec

    finder: Any = SimpleNamespace(find_spec=find_spec)
    if module not in sys.modules:
        sys.meta_path.insert(0, finder)
    else:
        with suppress(Exception):  # no reason for ``module`` not to be imported
            importlib.import_module(other)
