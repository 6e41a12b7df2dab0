"""The pages of the documentation: their programs and tutorials run and print what they show, and no link is broken.

A page is one program: its Python blocks run from top to bottom, as a user copies them. A ``text`` block after a Python
block is what that block prints, warns of or raises; ``...`` stands for anything, and line breaks do not count.
"""

import ast
import copy
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
import torch
from deltas import bits
from nbclient import NotebookClient
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.modeling_outputs import SequenceClassifierOutput

from sparsify import SparseDelta, SparsifyError, desparsify, get_engine, sparsify

ROOT = Path(__file__).parents[2]
FRAGMENTS = [ROOT / "README.md", ROOT / "tutorials" / "training.md"]  # are no programs, but snippets
PAGES = [path for path in sorted((ROOT / "tutorials").rglob("*.md")) if path not in FRAGMENTS]
PROGRAMS = [page for page in PAGES if "```python\n" in page.read_text(encoding="utf-8")]
ALL = [*FRAGMENTS, *PAGES, ROOT / "sparsify" / "delta" / "format.md", *sorted((ROOT / "examples").rglob("README.md"))]
BLOCK = re.compile(r"```python\n(?P<code>.*?)```(?:\n+```text\n(?P<shown>.*?)```)?", flags=re.DOTALL)
NEEDS = {  # of the extra `test`, by the page's name
    "export": ["onnx", "onnxscript", "onnxruntime"],
    "trl": ["trl"],
    "quantized": ["bitsandbytes"],
    "sentence_transformers": ["sentence_transformers", "datasets"],
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


def headings(page):
    """The anchors of a page."""
    lines = [line.lstrip("# ").lower() for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return {re.sub(r"[^\w -]", "", line).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", ALL, ids=name)
def test_no_link_is_broken(page):
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", page.read_text(encoding="utf-8")):
        aim = page.parent / target if target else page
        assert aim.exists(), target
        assert not anchor or anchor in headings(aim), f"{target}#{anchor}"


TUTORIALS = sorted((ROOT / "tutorials").glob("*.ipynb"))
assert TUTORIALS
tutorials = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


SHORT = {  # steps of those that may be cut short: what more of them make of it is in the outputs
    "01_quickstart": 12, "02_strategies_and_budgets": 8, "03_loading_deltas": 8, "04_lora_and_adapters": 8,
}  # fmt: skip
SET_STEPS = re.compile(r"(?m)^(\w+, )*STEPS(, \w+)* = .*$")


def claims(notebook):
    """The lines that say that something holds, as ``same predictions: True``."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return [line for output in outputs for line in output.get("text", "").splitlines() if line.endswith(" True")]


@pytest.mark.slow
@tutorials
def test_a_tutorial_runs_and_what_it_claims_holds_again(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    notebook = nbformat.read(path, as_version=4)
    claimed = claims(notebook)
    for cell in notebook.cells if path.stem in SHORT else ():
        cell.source = SET_STEPS.sub(rf"\g<0>\nSTEPS = {SHORT[path.stem]}", cell.source)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert not [o for cell in notebook.cells for o in cell.get("outputs", []) if o.output_type == "error"]
    assert claims(notebook) == claimed


@tutorials
def test_a_tutorial_holds_the_outputs_of_one_run_and_no_path_of_a_machine(path):
    assert not re.search(r"/(root|home|tmp|opt|work|Users)/", path.read_text())
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream"), "no warnings"


SNIPPETS = [block["code"] for page in FRAGMENTS for block in BLOCK.finditer(page.read_text(encoding="utf-8"))]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.classifier = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2)

    def forward(self, x, labels):
        logits = self.classifier(self.query(x) + self.value(x))
        return SequenceClassifierOutput(loss=nn.functional.cross_entropy(logits, labels), logits=logits)


def bert():
    config = BertConfig(vocab_size=9, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    return BertForSequenceClassification(config)


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(snippet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, base = Model(), Model()
    base_model, before = copy.deepcopy(model), bits(base)
    batch = {"x": torch.randn(4, 300), "labels": torch.tensor([0, 1, 1, 0])}
    names = {
        "model": model, "base_model": base_model, "bert": bert(), "base": base, "tuned": Model(), "sparsify": sparsify,
        **{name: SparseDelta.diff(base, Model(), budget=9, progress=False) for name in ("delta", "mrpc", "cola")},
        "train_loader": [batch, {**batch, "x": -batch["x"]}], "train_data": [{"x": x, "labels": 1} for x in batch["x"]],
        "arguments": TrainingArguments(tmp_path, max_steps=2, save_steps=1, report_to=[], use_cpu=True),
    }  # fmt: skip
    for statement in map(ast.unparse, ast.parse(snippet).body):
        if statement == "...":  # a training loop
            model(**batch).loss.backward()
            names["optimizer"].step()
        exec(statement, names)
        if "sparsify(model, " in statement:
            assert get_engine(model).budget == 38_000
            assert model.classifier.weight.requires_grad == ("modules_to_save" in statement)
        if statement.startswith("sparsify("):  # the next one is instead of it
            desparsify(model)
    assert bits(base) == before
    if "base_model" in snippet:
        assert torch.equal(base_model(**batch).logits, model(**batch).logits)
    if "trainer.train()" in snippet:
        assert get_engine(model).steps == 2
        assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


def test_the_readme_is_short_its_commands_are_what_ci_runs_and_every_package_is_on_the_map():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 200
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for extra in ("demo", "test"):
        assert f"pip install -c constraints.txt -e '.[{extra}]' && " in readme
        assert f"-e '.[{extra}]'" in ci
    text = (ROOT / "tutorials" / "how_it_works.md").read_text(encoding="utf-8")
    for path in (ROOT / "sparsify").glob("*/__init__.py"):
        assert f"{path.parent.name}/" in text, f"{path.parent.name} is missing from the map"
