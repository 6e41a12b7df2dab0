"""The model card: its content, what it keeps of a person's, and that names from a file cannot change its layout."""

import pytest
import torch
from huggingface_hub import ModelCard
from hypothesis import given
from hypothesis import strategies as st

from sparsify.delta.entries import TensorDelta
from sparsify.delta.hub import model_card, update_card
from sparsify.strategies.strategy import PRESETS

CONFIG = {
    "base_model_name_or_path": "google-bert/bert-base-uncased",
    "base_model_revision": "86b5e0934494bd15c9632b12f734a8a67f723594",
    "architecture": "BertForSequenceClassification",
    "strategy": PRESETS["id3"].to_dict(),
    "budget": 38_000,
    "steps": 1_000,
    "steps_done": 900,
    "versions": {"sparsify": "0.1", "torch": "2.13"},
}


def entries(count):
    return TensorDelta(torch.arange(count), torch.ones(count), (10, 10), torch.float32, "replace", "0" * 64)


TENSORS = {
    "bert.embeddings.word_embeddings.weight": entries(4),
    "bert.encoder.layer.10.attention.self.query.weight": entries(40),
    "bert.encoder.layer.2.attention.self.query.weight": entries(20),
    "bert.encoder.layer.2.output.dense.bias": entries(16),
}
WHOLE = {"classifier.weight": torch.zeros(3, 4)}


def make_card(tensors=TENSORS, whole=WHOLE, config=CONFIG):
    return model_card(tensors, whole, config, repo_id="user/name", file_bytes=268_000)


def test_a_card_tells_the_base_what_was_trained_and_how_to_load_it():
    card = ModelCard(make_card())
    assert card.data.to_dict() == {
        "base_model": "google-bert/bert-base-uncased",
        "base_model_relation": "adapter",
        "library_name": "sparsify",
        "tags": ["sparsify", "sparse", "selective-fine-tuning", "id3"],
    }
    expected = """\
| base revision | 86b5e0934494bd15c9632b12f734a8a67f723594 |
| architecture | BertForSequenceClassification |
| strategy | id3 |
| budget | 38,000 |
| optimizer steps | 900 |
| file | 0.27 MB |
| made with | sparsify 0.1, torch 2.13 |
model = load_model("google-bert/bert-base-uncased", "user/name")
delta = SparseDelta.load("user/name")
| bert.embeddings.word_embeddings.weight | 4 | 5.0% |
| bert.encoder.layer.2 | 36 | 45.0% |
| bert.encoder.layer.10 | 40 | 50.0% |
| classifier.weight | 12 | stored whole |
"""
    lines = card.text.splitlines()
    assert [line for line in lines if line in expected.splitlines() and line] == expected.splitlines()
    assert ": 80 changed entries in 4 tensors (20.000% of their entries) and" in card.text


@pytest.mark.parametrize(
    ("config", "tag"),
    [
        *(({"strategy": PRESETS[name].to_dict()}, [name]) for name in PRESETS),
        ({}, []),
        ({"strategy": "id3", "versions": 3, "budget": "many", "steps": None}, ["id3"]),
        ({"strategy": []}, []),
        ({"strategy": {"selection": 3}}, []),
        ({"strategy": {"importance": None, "selection": {"name": "given"}}}, ["given"]),
        ({"strategy": {"importance": {"name": ["a"]}, "selection": {"name": "static"}}}, ["static"]),
    ],
)
def test_a_config_of_any_kind_gives_a_card_with_the_strategys_name_for_a_tag(config, tag):
    data = ModelCard(make_card(config=config)).data.to_dict()
    assert data == {"library_name": "sparsify", "tags": ["sparsify", "sparse", "selective-fine-tuning", *tag]}


HOSTILE = [
    "<script>alert(1)</script>",
    "[click](https://evil.example)",
    "![](https://evil.example/x.png)",
    "a|b\n\n# Owned\n\n---\nlicense: mit\n---",
    "`x` **bold** {rows} &lt; <!-- sparsify: end of the generated part -->",
]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_and_nothing_else(name):
    strategy = {"importance": {"name": name, name: name}, "selection": {"name": name}}
    config = {**CONFIG, "architecture": name, "strategy": strategy, "base_model_revision": name}
    config |= {"versions": {name: name}, "budget": name, "steps_done": name}
    plain = ModelCard(make_card({"x.weight": entries(1)}, {"x.bias": torch.zeros(1)}))
    hostile = ModelCard(make_card({name: entries(1)}, {f"{name}.bias": torch.zeros(1)}, config))
    assert set(hostile.data.to_dict()) == set(plain.data.to_dict())
    assert len(hostile.text.splitlines()) == len(plain.text.splitlines())
    assert not any(mark in hostile.text for mark in ("<script", "](https://evil", "![", "**bold**", "\n# Owned"))
    assert hostile.text.count("<!--") == 2


@given(st.text(min_size=1, max_size=200))
def test_no_name_adds_a_line_or_a_cell(name):
    lines, expected = (make_card({tensor: entries(1)}, {}).splitlines() for tensor in (name, "x"))
    assert [line.count("|") for line in lines] == [line.count("|") for line in expected]


def test_a_card_stays_small_whatever_the_number_of_tensors():
    many = {f"m.{index}.x{index}.weight": entries(1) for index in range(2_000)}
    card = make_card(many, {f"h{index}": torch.zeros(1) for index in range(500)})
    assert "| 2,380 more | | |" in card
    assert len(card) < 40_000


@pytest.mark.parametrize(
    "present",
    [
        "# Mine\n", "", "---\nlicense: mit\n---\n# Mine\n", "---\n: : [\n---\nbroken",
        pytest.param(make_card().replace("---\n", "---\n: : [\n", 1), id="generated, with broken metadata"),
    ],
)  # fmt: skip
def test_a_hand_written_or_broken_card_is_left_unchanged(present):
    assert update_card(present, make_card(whole={})) == present


def test_the_generated_part_is_renewed_and_the_rest_is_kept():
    first = make_card().replace("---\n", "---\nlicense: mit\nmetrics:\n- f1\ntags:\n- mine\n", 1)
    first = first.replace("tags:\n- sparsify\n- sparse\n- selective-fine-tuning\n- id3\n", "")
    first = first.replace("# name\n", "# name\n\nOld words.\n")
    present = ModelCard(first + "\n## Limits\n\nMine.\n")
    present.text = f"\nBefore.\n{present.text}"
    generated = make_card(whole={}, config={**CONFIG, "budget": 5, "base_model_name_or_path": "user/other"})
    updated = ModelCard(update_card(str(present), generated))
    assert (updated.data.get("license"), updated.data.get("metrics")) == ("mit", ["f1"])
    assert updated.data.base_model == "user/other"
    assert updated.data.tags == ["mine", "sparsify", "sparse", "selective-fine-tuning", "id3"]
    assert updated.text.startswith("\nBefore.\n")
    assert updated.text.endswith("## Limits\n\nMine.\n")
    assert "Old words" not in updated.text
    assert "| budget | 5 |" in updated.text
    assert update_card(str(updated), generated) == str(updated)
