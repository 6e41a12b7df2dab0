"""The experiments of `examples` read the rows of a test's ``FILES``."""

import json

import pytest


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
