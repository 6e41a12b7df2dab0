"""A checkpoint's tensors are found in its files, as transformers would put them; a broken one says what is wrong."""

import json

import pytest
import torch
from architectures import build
from checkpoints import bert, save
from hypothesis import given, settings
from hypothesis import strategies as st
from requirements import fuses_at_load
from safetensors.torch import load_file, save_file

from sparsify.common.names import named_tensors
from sparsify.delta.checkpoint.conversion import Layout
from sparsify.delta.checkpoint.reader import Checkpoint, open_base
from sparsify.errors import BaseMismatchError, SparsifyError


@st.composite
def arrangements(draw):
    stored = {}

    def leaf(shape):
        key = f"t{len(stored)}"
        stored[key] = torch.arange(1000 * len(stored), 1000 * len(stored) + torch.Size(shape).numel()).view(shape)
        return Layout.stored(key, shape), stored[key]

    def fold(pairs, function, **options):
        return tuple(function([pair[side] for pair in pairs], **options) for side in (0, 1))

    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    number = draw(st.integers(1, 3))
    pair = fold([leaf(shape) for _ in range(number)], torch.stack, dim=draw(st.integers(0, len(shape))))
    for _ in range(draw(st.integers(0, 3))):
        shape = pair[1].shape
        dim = draw(st.integers(0, len(shape) - 1))
        match draw(st.sampled_from(["cat", "chunk", "transpose", "split"])):
            case "cat":
                pair = fold([pair, leaf(shape)], torch.cat, dim=dim)
            case "chunk":
                pair = tuple(torch.chunk(side, 2, dim=dim)[-1] for side in pair)
            case "split":
                first = draw(st.integers(1, shape[dim]))
                pair = tuple(torch.split(side, [first, shape[dim] - first], dim=dim)[0] for side in pair)
            case "transpose":
                pair = tuple(torch.transpose(side, dim, len(shape) - 1) for side in pair)
    return (*pair, stored)


@settings(max_examples=150)
@given(arrangements(), st.data())
def test_a_layout_says_where_each_entry_is_whatever_was_done_to_the_tensors(arrangement, data):
    layout, tensor, stored = arrangement
    assert layout.shape == tensor.shape
    assert torch.equal(layout.assemble(stored.__getitem__), tensor)
    chosen = sorted(data.draw(st.sets(st.integers(0, tensor.numel() - 1), min_size=1)))
    indices = torch.tensor(chosen)
    found = torch.full((len(chosen),), -1)
    for part in layout.locate(indices):
        assert bool((part.indices[1:] > part.indices[:-1]).all())
        found[part.entries] = stored[part.key].take(part.indices)
    assert torch.equal(found, tensor.take(indices))


@pytest.mark.parametrize(
    ("make", "legacy"),
    [
        (bert, {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),
        (
            lambda: build("wav2vec2", torch.float32)[0],
            {f"parametrizations.weight.original{i}": f"weight_{'gv'[i]}" for i in range(2)},
        ),
    ],
)
def test_legacy_names_are_found(tmp_path, make, legacy):
    model = make()
    save(model, tmp_path, shards=False)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for new, old in legacy.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint = Checkpoint(tmp_path)
    renamed = [name for name in named_tensors(model) if name not in checkpoint.stored]
    assert len(renamed) == sum(name.endswith(tuple(legacy.values())) for name in tensors) > 0
    assert all(torch.equal(checkpoint[name], named_tensors(model)[name]) for name in renamed)


def test_a_vision_language_model_is_found_in_its_old_order(tmp_path):
    model, _ = build("llava", torch.float32)
    checkpoint = Checkpoint(save(model, tmp_path))
    assert "lm_head.weight" not in checkpoint.stored
    assert all(torch.equal(checkpoint[name], tensor) for name, tensor in named_tensors(model).items())


@fuses_at_load
def test_a_conversion_that_moves_entries_about_is_an_error_by_name(tmp_path, monkeypatch):
    from transformers import conversion_mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    model = bert("Model")
    save(model, tmp_path, shards=False)
    converter = WeightConverter("intermediate.dense.weight", "intermediate.dense.weight", [Interleave(dim=0)])
    monkeypatch.setattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", {"bert": [converter], "legacy": []})
    checkpoint = Checkpoint(tmp_path)
    name = "bert.encoder.layer.0.intermediate.dense.weight"
    with pytest.raises(SparsifyError, match=rf"`{name}` at load in a way .* \(Interleave\).*`from_pretrained`, `ap"):
        checkpoint.layout(name)
    assert torch.equal(checkpoint["bert.pooler.dense.weight"], model.pooler.dense.weight)


OWN = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, r"has no `config.json`"),
        ({"model_type": "mine", "auto_map": OWN}, r"transformers cannot build the model of .*config.json"),
        ({"model_type": "bert", "hidden_size": -1}, r"transformers cannot build the model"),
    ],
)
def test_a_checkpoint_of_no_known_model_goes_by_its_own_names_and_its_code_is_not_run(tmp_path, config, reason):
    (tmp_path / "mine.py").write_text("raise SystemExit('this was run')")
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plain_names() == ["a.weight"]
    assert "a.weight" in checkpoint
    assert "weight" not in checkpoint
    with pytest.raises(BaseMismatchError, match=rf"no tensor `a.wieght` \(near: `a.weight`\).*not known, .*{reason}"):
        checkpoint.layout("a.wieght")


@pytest.mark.parametrize("values", [torch.arange(6.0).view(2, 3), torch.tensor(7.0), torch.tensor([True, False])])
def test_entries_are_taken_from_a_single_file(tmp_path, values):
    save_file({"other": torch.ones(3, dtype=torch.uint8), "a": values}, tmp_path / "weights.safetensors")
    checkpoint = Checkpoint(tmp_path / "weights.safetensors")
    indices = torch.tensor([0, values.numel() - 1]).unique()
    assert torch.equal(checkpoint.take(checkpoint.layout("a"), indices), values.take(indices))


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
