"""The examples: their scripts are imported by name, their experiments read the rows of a test's ``FILES``."""

import importlib
import json
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example():
    """Imports a script by name; afterwards all of them are forgotten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module
    for path in EXAMPLES.glob("*.py"):
        sys.modules.pop(path.stem, None)


@pytest.fixture(scope="module")
def data(request, tmp_path_factory):
    """A folder with the rows of the module's ``FILES`` by task and split, which SPARSIFY_DATA names."""
    folder = tmp_path_factory.mktemp("data")
    for task, splits in request.module.FILES.items():
        (folder / task).mkdir()
        for split, rows in splits.items():
            (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSIFY_DATA", str(folder))
        yield
