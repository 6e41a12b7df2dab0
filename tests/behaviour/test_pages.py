"""The pages of the documentation: their programs and tutorials run and print what they show, and no link is broken.

A page is one program: its Python blocks run from top to bottom, as a user copies them. A ``text`` block after a Python
block is what that block prints, warns of or raises; ``...`` stands for anything, and line breaks do not count.
"""

import importlib
import io
import os
import re
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from sparsify import SparsifyError

ROOT = Path(__file__).parents[2]
FRAGMENTS = [ROOT / "README.md", ROOT / "tutorials" / "training.md"]  # are no programs: test_readme.py runs them
PAGES = [path for path in sorted((ROOT / "tutorials").rglob("*.md")) if path not in FRAGMENTS]
PROGRAMS = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]
ALL = [*FRAGMENTS, *PAGES, ROOT / "sparsify" / "delta" / "format.md", *sorted((ROOT / "examples").rglob("README.md"))]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n+```text\n(?P<shown>.*?)```)?", flags=re.DOTALL)
NEEDS = {  # of the extra `test`, by the page's name
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "trl": ["trl"],
    "quantized": ["bitsandbytes"],
}
SLOW = {"lora", "quantized"}


def name(page):
    return str(page.relative_to(ROOT))


def outcome(code, names):
    """What a block prints, then its warnings, then the library's error that it ends in."""
    printed, failures = io.StringIO(), []
    with redirect_stdout(printed), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            exec(code, names)
        except SparsifyError as error:
            failures = [error]
    said = [*(each.message for each in caught if each.category is UserWarning), *failures]
    return printed.getvalue(), [f"{type(each).__name__}: {each}" for each in said]


def words(text):
    return " ".join(text.split())


def program(page):
    return pytest.param(page, id=name(page), marks=[pytest.mark.slow] if page.stem in SLOW else [])


@pytest.mark.parametrize("page", map(program, PROGRAMS))
def test_a_page_runs_and_prints_what_it_shows(page, tmp_path, monkeypatch):
    for package in NEEDS.get(page.stem, []):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in BLOCK.finditer(page.read_text(encoding="utf-8")):
        shown, (printed, said) = words(block["shown"] or ""), outcome(block["code"], names)
        if "UserWarning: " not in shown:  # those of other libraries, which a page may leave out
            said = [each for each in said if not each.startswith("UserWarning: ")]
        found, pattern = words("\n".join([printed, *said])), ".*".join(map(re.escape, shown.split("...")))
        assert re.fullmatch(pattern, found), f"{block['code']}\nshows\n{shown}\nand gives\n{found}"


def test_every_public_name_is_in_the_reference():
    entries = [entry for page in PAGES for entry in re.findall(r"(?m)^::: (\S+)$", page.read_text(encoding="utf-8"))]
    assert {entry for entry in entries if entry in sys.modules} == set(), "a function's module would be shown instead"
    documented = {id(find(entry)) for entry in entries}
    for module in ("sparsify", "sparsify.analysis", "sparsify.adapters"):
        public = {f"{module}.{each}" for each in importlib.import_module(module).__all__} - {"sparsify.__version__"}
        assert {each for each in public if id(find(each)) not in documented} == set()


def find(entry):
    module, _, attribute = entry.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("page", ALL, ids=name)
def test_no_link_is_broken(page):
    text = page.read_text(encoding="utf-8")
    lines = [line.lstrip("# ").lower() for line in text.splitlines() if line[:1] == "#"]
    headings = {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in lines}
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
        assert (page.parent / target).exists(), target
        assert target or anchor in headings, anchor


TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
assert TUTORIALS
tutorials = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


@pytest.mark.slow
@tutorials
def test_a_tutorial_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]


@tutorials
def test_a_tutorial_holds_the_outputs_of_one_run_and_no_path_of_a_machine(path):
    assert not re.search(r"/(root|home|tmp|opt|work|Users)/", path.read_text())
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream"), "no warnings"
