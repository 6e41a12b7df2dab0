"""What a benchmark makes once: filled buffers and rows of text, kept in files that are checked."""

import gzip
import json
from itertools import product
from pathlib import Path

import pytest
import torch

from sparsify.bench import cache
from sparsify.bench.filling import load_state, state_path
from sparsify.bench.run import fill_buffers
from sparsify.bench.settings import Settings
from sparsify.bench.tokens import Batches, find_texts, make_rows
from sparsify.errors import SparsifyError

TENSORS = {"a": torch.arange(6).view(2, 3), "b": torch.tensor(1.5), "empty": torch.empty(0)}


class Words:
    """A tokenizer that gives each word its length."""

    cls_token_id, sep_token_id = 101, 102

    def __call__(self, texts, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [[len(word) for word in text.split()] for text in texts]}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def path():
    path = cache.path_of("state", budget=1)
    cache.save(path, TENSORS)
    return path


def test_what_was_saved_comes_back(path, tmp_path):
    assert path.parent == tmp_path / "cache" / "sparsify" / "bench"
    loaded = cache.load(path)
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_without_the_variable_it_is_in_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "sparsify" / "bench"


def test_a_file_that_is_not_there_is_none():
    assert cache.load(cache.path_of("state", budget=2)) is None


def test_a_damaged_file_is_none(path):
    data = path.read_bytes()
    for broken in (data[:-1], b"", data[:-3] + bytes([data[-3] ^ 1]) + data[-2:]):
        path.write_bytes(broken)
        assert cache.load(path) is None
    path.write_bytes(data)
    assert cache.load(path) is not None


def test_a_copy_under_another_name_is_none(path):
    other = cache.path_of("state", budget=2)
    other.write_bytes(path.read_bytes())
    assert cache.load(other) is None


@pytest.mark.parametrize(
    "other",
    [
        {"budget": 301}, {"fill": 0.25}, {"batch": 2}, {"length": 9}, {"dtype": "bfloat16"}, {"seed": 1},
        {"shape": "bert-base"}, {"layers": 1}, {"tokens": "tokens-1.safetensors"}, {"device": "cuda"},
    ],
)  # fmt: skip
def test_other_settings_have_another_state(other):
    usual = {"shape": "tiny", "budget": 300, "batch": 1, "length": 8}
    assert state_path(Settings("id3", **usual)) != state_path(Settings("id3", **{**usual, **other}))


def test_all_methods_that_let_id3_choose_share_a_state():
    paths = {
        state_path(Settings(method, threads=threads, heap=heap))
        for method, threads, heap in product(("id3", "dense-id3"), (0, 1), ("keep", "system"))
    }
    assert len(paths) == 1


@pytest.mark.slow
def test_buffers_are_filled_once_and_again_where_the_file_is_damaged():
    settings, seen = Settings("id3", shape="tiny", budget=300, batch=1, length=8, threads=1), []
    for _ in range(2):
        fill_buffers([settings], seen.append)
    assert len(seen) == 1
    first = load_state(settings)
    state_path(settings).write_bytes(b"damaged")
    fill_buffers([settings], seen.append)
    assert len(seen) == 2
    assert all(torch.equal(first[name], tensor) for name, tensor in load_state(settings).items()), "and the same again"


def test_rows_are_whole_and_of_one_label():
    texts = [("a bb ccc", 0), ("dddd eeeee", 1), ("ffffff g", 0), ("hh", 1)]
    rows = make_rows(texts, Words(), length=4)
    found = sorted(zip(rows["tokens"].tolist(), rows["labels"].tolist(), strict=True))
    assert found == [([101, 1, 2, 102], 0), ([101, 3, 6, 102], 0), ([101, 4, 5, 102], 1)], (
        "what is left over is not used"
    )


def test_too_little_text_says_so():
    with pytest.raises(SparsifyError, match=r"100 tokens a sequence; .* change --seq"):
        make_rows([("a b", 0)], Words(), length=100)
    with pytest.raises(SparsifyError, match="2 tokens a sequence"):
        make_rows([("a b", 0)], Words(), length=2)


@pytest.mark.parametrize("name", ["train.jsonl", "train.jsonl.gz"])
def test_mrpc_is_read_from_a_folder(tmp_path, name):
    (tmp_path / "mrpc").mkdir()
    row = json.dumps({"sentence1": "One.", "sentence2": "Two.", "label": 1}) + "\n"
    with (
        gzip.open(tmp_path / "mrpc" / name, "wt")
        if name.endswith("gz")
        else open(tmp_path / "mrpc" / name, "w") as file
    ):
        file.write(row * 2)
    assert find_texts(tmp_path) == ("mrpc", [("One. Two.", 1)] * 2)


def test_batches_are_the_same_for_all_methods_and_of_real_text_where_there_is_some(path):
    cache.save(path, {"tokens": torch.arange(20).view(5, 4), "labels": torch.arange(5)})
    model = torch.nn.Module()
    model.config = type("Config", (), {"vocab_size": 9})
    for tokens in ("", str(path)):
        settings = Settings("id3", shape="tiny", batch=3, length=4, tokens=tokens)
        first, second = (Batches(settings, model, seed=1).next() for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert first["input_ids"].shape == (3, 4)
    assert torch.equal(first["input_ids"][:, 0], 4 * first["labels"])


def test_a_missing_folder_is_named():
    with pytest.raises(SparsifyError, match=r"`nowhere` has no mrpc/train\.jsonl"):
        find_texts(Path("nowhere"))
