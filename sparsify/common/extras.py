"""Optional dependencies: imported here, with an error that names the extra to install where one is missing."""

import importlib.util
import sys
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from sparsify.errors import SparsifyError


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional dependency; a ``SparsifyError`` names the ``extra`` of sparsify that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # it is installed, and one of its own dependencies is not
        remedy = f"it comes with: pip install 'sparsify-ft[{extra}]'"
        raise SparsifyError(f"`{error.name}` is not installed; {remedy}") from None


def import_after(module: str, other: str) -> None:
    """Imports ``other`` right after ``module``: now, or as soon as that is; where it fails, its own users see why."""

    def import_other() -> None:
        with suppress(Exception):  # no reason for ``module`` not to be imported
            importlib.import_module(other)

    if module in sys.modules:
        import_other()
    elif (spec := importlib.util.find_spec(module)) is not None and spec.loader is not None:
        execute = spec.loader.exec_module

        def exec_module(new: ModuleType) -> None:
            execute(new)
            import_other()

        spec.loader.exec_module = exec_module  # type: ignore[assignment, method-assign]
        finder: Any = SimpleNamespace(find_spec=lambda name, path, target=None: spec if name == module else None)
        sys.meta_path.insert(0, finder)
