"""Batches of the benchmark: whole rows of real text, or random tokens, the same for all methods."""

import gzip
import json

import pytest
import torch
from safetensors.torch import save_file
from sparsify.bench.settings import Settings
from sparsify.bench.tokens import find_texts, make_batches, make_rows
from sparsify.cli.demo.docstrings import Example

from sparsify.errors import SparsifyError


class Words:
    """A tokenizer that gives each word its length."""

    cls_token_id, sep_token_id = 101, 102

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


def test_rows_are_whole_and_of_one_label():
    texts = [("a bb ccc", 0), ("dddd eeeee", 1), ("ffffff g", 0), ("hh", 1)]
    rows = make_rows(texts, Words(), length=4)
    found = sorted(zip(rows["tokens"].tolist(), rows["labels"].tolist(), strict=True))
    assert found == [([101, 1, 2, 102], 0), ([101, 3, 6, 102], 0), ([101, 4, 5, 102], 1)], "a rest is not used"


@pytest.mark.parametrize("length", [2, 100])
def test_too_little_text_says_so(length):
    with pytest.raises(SparsifyError, match=rf"{length} tokens a sequence; .* change --seq"):
        make_rows([("a b", 0)], Words(), length)


def test_without_a_folder_of_data_the_texts_are_docstrings(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSIFY_DATA", str(tmp_path))
    examples = [Example("A text.", 1, "a.py")], [Example("Another.", 0, "b.py")]
    monkeypatch.setattr("sparsify.cli.demo.docstrings.load_examples", lambda: examples)
    assert find_texts() == ("docstrings", [("A text.", 1), ("Another.", 0)])


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_mrpc_is_read_from_the_folder_in_the_environment(tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPARSIFY_DATA", str(tmp_path))
    (tmp_path / "mrpc").mkdir()
    row = json.dumps({"sentence1": "One.", "sentence2": "Two.", "label": 1}) + "\n"
    with (gzip.open if name.endswith("gz") else open)(tmp_path / "mrpc" / name, "wt") as file:
        file.write(row * 2)
    assert find_texts() == ("mrpc", [("One. Two.", 1)] * 2)


def test_batches_are_the_same_for_all_methods_and_of_real_text_where_there_is_some(tmp_path):
    save_file({"tokens": torch.arange(20).view(5, 4), "labels": torch.arange(5)}, tmp_path / "tokens.safetensors")
    for tokens in ("", "mrpc"):
        settings = Settings("id3", shape="tiny", batch=3, length=4, tokens=tokens, folder=str(tmp_path))
        first, second = (next(make_batches(settings, 9, seed=1)) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert first["input_ids"].shape == (3, 4)
    assert torch.equal(first["input_ids"][:, 0], 4 * first["labels"])
