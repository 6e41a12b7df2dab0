"""The snippets of the README and of Training, which are no programs, run, and CI runs the README's commands."""

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import sparsify
from sparsify import SparseDelta, desparsify, get_engine

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "tutorials" / "training.md"]
README = PAGES[0].read_text(encoding="utf-8")
SNIPPETS = [
    snippet
    for page in PAGES
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value, self.classifier = nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 2)

    def forward(self, x, labels=None):
        logits = self.classifier(self.query(x) + self.value(x))
        return logits if labels is None else SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


def bert():
    config = BertConfig(vocab_size=9, hidden_size=64, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    return BertForSequenceClassification(config)


def test_the_first_snippet_trains_saves_and_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, base_model = Model(), Model()
    base_model.load_state_dict(model.state_dict())
    train, load = SNIPPETS[0].split("SparseDelta.from_model")
    names = {"model": model, "base_model": base_model}
    exec(train, names)
    assert get_engine(model).budget == 38_000
    assert model.classifier.weight.requires_grad
    x = torch.randn(4, 300)
    model(x).square().sum().backward()
    names["optimizer"].step()
    exec("SparseDelta.from_model" + load, {**names, "SparseDelta": SparseDelta})
    assert torch.equal(base_model(x), model(x))


def test_the_delta_snippet_leaves_the_base_as_it_was(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (snippet,) = [snippet for snippet in SNIPPETS if "DeltaSwitch" in snippet]
    base, tuned = Model(), [Model() for _ in range(3)]
    deltas = [SparseDelta.diff(base, model, budget=100, progress=False) for model in tuned]
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    exec(snippet, {"base": base, "tuned": tuned[0], **dict(zip(("delta", "mrpc", "cola"), deltas, strict=True))})
    assert all(torch.equal(before[name], tensor) for name, tensor in base.state_dict().items())
    assert "Jaccard" in capsys.readouterr().out
    assert SparseDelta.load("both").config["sum"][1]["coefficient"] == 0.5


def test_the_trainer_snippet_trains_and_leaves_checkpoints_of_the_trained_state(tmp_path):
    (snippet,) = [snippet for snippet in SNIPPETS if "SparsifyCallback" in snippet]
    names = {
        "model": bert(),
        "sparsify": sparsify.sparsify,
        "arguments": TrainingArguments(tmp_path, max_steps=2, save_steps=1, report_to=[], use_cpu=True),
        "train_data": [{"input_ids": [1, 2, 3], "labels": 0}, {"input_ids": [4, 5, 6], "labels": 1}],
    }
    exec(snippet, names)
    assert get_engine(names["model"]).steps == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()


OTHERS = [snippet for snippet in SNIPPETS[1:] if "DeltaSwitch" not in snippet and "SparsifyCallback" not in snippet]


@pytest.mark.parametrize("snippet", OTHERS)
def test_the_other_snippets_run(snippet, tmp_path, monkeypatch):
    batch = {"x": torch.randn(4, 300), "labels": torch.tensor([0, 1, 1, 0])}
    monkeypatch.chdir(tmp_path)
    names = {"model": Model(), "bert": bert(), "sparsify": sparsify.sparsify, "train_loader": [batch]}
    for statement in ast.parse(snippet).body:
        exec(ast.unparse(statement), names)
        if ast.unparse(statement).startswith("sparsify("):
            assert get_engine(names["model"]).budget == 38_000
            desparsify(names["model"])


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("extra", ["demo", "test"])
def test_the_two_commands_are_what_ci_runs(extra):
    command = f"pip install -c constraints.txt -e '.[{extra}]' && "
    assert command in README
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert f"-e '.[{extra}]'" in ci


def test_every_package_is_on_the_map():
    text = (ROOT / "tutorials" / "how_it_works.md").read_text(encoding="utf-8")
    for path in (ROOT / "sparsify").glob("*/__init__.py"):
        assert f"{path.parent.name}/" in text, f"{path.parent.name} is missing from the map"
