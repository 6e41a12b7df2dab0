"""A checkpoint's tensors are mapped from its files; one that is broken says what is wrong."""

import json

import pytest
import torch
from checkpoints import bert, save
from safetensors.torch import save_file

from sparsify.delta.checkpoint.conversion import Layout
from sparsify.delta.checkpoint.reader import Checkpoint, open_base
from sparsify.errors import SparsifyError


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(2, 3), ()])
def test_entries_of_any_dtype_are_taken_from_a_single_file(tmp_path, dtype, shape):
    values = torch.arange(6).to(dtype) if shape else torch.tensor([7]).to(dtype)
    file = tmp_path / "weights.safetensors"
    save_file({"other": torch.ones(3, dtype=torch.uint8), "a": values.view(shape)}, file)
    checkpoint = Checkpoint(file)
    indices = torch.tensor([0, values.numel() - 1]).unique()
    assert torch.equal(checkpoint.take(checkpoint.layout("a"), indices), values[indices])


def test_pieces_in_several_dtypes_are_an_error(tmp_path):
    tensors = {"a": torch.ones(2), "b": torch.ones(2, dtype=torch.float16)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    layout = torch.stack([Layout.stored("a", (2,)), Layout.stored("b", (2,))])
    with pytest.raises(SparsifyError, match=r"`a` and 1 more tensors of .* are stored in several dtypes: save"):
        checkpoint.dtype(layout)


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(SparsifyError, match=r"holds no checkpoint: expected a folder with `model.safetensors`"):
        open_base(tmp_path)
    with pytest.raises(SparsifyError, match=r"`user/base` does not exist.*`hf download user/base` does"):
        open_base("user/base")
    next(save(bert(), tmp_path / "base").glob("model-00002*")).unlink()
    with pytest.raises(SparsifyError, match=r"the shard 'model-00002-of-.*' that .* names is missing"):
        Checkpoint(tmp_path / "base")


BROKEN_INDEXES = {
    "": "is no JSON that can be used",
    '{"weight_map": ' * 100_000: "is no JSON that can be used",
    "[]": "holds a list, expected a JSON object",
    "{}": "is no index of a checkpoint",
    '{"weight_map": {}}': "is no index of a checkpoint",
    '{"weight_map": {"a": {"b": "c.safetensors"}}}': r"names the shard \{'b': 'c.safetensors'\}, expected the name",
    '{"weight_map": {"a": "../b.safetensors"}}': "expected the name of a file next to it",
    '{"weight_map": {"a": "model.safetensors.index.json"}}': "is no safetensors file",
    '{"weight_map": {"a": ".."}}': "is missing: download",
    '{"weight_map": {"a": "\\u0000"}}': r"the shard '\\x00' that .* is missing",
    '{"weight_map": {"a": "%s"}}' % ("x" * 5_000): "the shard 'x{99} that .* is missing",
}


@pytest.mark.parametrize(("text", "message"), BROKEN_INDEXES.items(), ids=range(len(BROKEN_INDEXES)))
def test_a_broken_index_is_an_error(tmp_path, text, message):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(SparsifyError, match=message):
        Checkpoint(tmp_path)


def test_files_of_something_else_and_a_tensor_in_two_shards_are_errors(tmp_path):
    for data in (b"", b"\x00" * 40, b"\xff" * 8, b"\x02" + b"\x00" * 7 + b"[]"):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(SparsifyError, match="is no safetensors file"):
            Checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in index["weight_map"].values():
        save_file({"a": torch.ones(1)}, tmp_path / name)
    with pytest.raises(SparsifyError, match=r"`a` is both in `1.safetensors` and in `2.safetensors`"):
        Checkpoint(tmp_path)
