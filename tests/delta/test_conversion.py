"""Names and layouts at run time are found in a checkpoint's files, as transformers itself would put them."""

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
from sparsify.delta.checkpoint.reader import Checkpoint
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


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (None, r"has no `config.json`"),
        ({"model_type": "unheard_of"}, r"transformers cannot build the model of .*config.json"),
        ({"model_type": "bert", "hidden_size": -1}, r"transformers cannot build the model"),
    ],
)
def test_a_checkpoint_of_no_known_model_goes_by_its_own_names(tmp_path, config, reason):
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plain_names() == ["a.weight"]
    assert "a.weight" in checkpoint
    assert "weight" not in checkpoint
    with pytest.raises(BaseMismatchError, match=rf"no tensor `a.wieght` \(near: `a.weight`\).*not known, .*{reason}"):
        checkpoint.layout("a.wieght")


def test_code_that_comes_with_a_checkpoint_is_not_run(tmp_path):
    save_file({"a.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    auto_map = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": auto_map}))
    (tmp_path / "mine.py").write_text("raise SystemExit('this was run')")
    assert "b.weight" not in Checkpoint(tmp_path)
