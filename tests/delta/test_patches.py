"""Checks of a delta against a base, and patches in a checkpoint's coordinates: they make the model that apply makes."""

import copy

import pytest
import torch
from checkpoints import MODELS, bert, dinov2, files, gpt2, make_delta, mixtral, patched, save
from deltas import bits
from requirements import fuses_at_load

from sparsify.delta.entries import InitializerRecipe, TensorDelta
from sparsify.delta.merge import CheckReport, WeightPatch
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError


@pytest.mark.parametrize("architecture", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patched_checkpoint_loads_as_the_model_that_apply_makes(tmp_path, architecture, dtype):
    model = MODELS[architecture]().to(dtype)
    delta = make_delta(model)
    save(model, tmp_path)
    patches = list(delta.patches(tmp_path))
    assert sum(patch.values.numel() for patch in patches) == delta.num_entries
    loaded = type(model).from_pretrained(patched(tmp_path, patches), dtype=dtype)
    assert bits(loaded) == bits(delta.apply(model))


def test_the_fields_are_those_of_vllm():
    """CheckpointWeightPatch(name, shape, dtype, values, indices=None); positions are int64, values one-dimensional."""
    assert WeightPatch._fields == ("name", "shape", "dtype", "values", "indices")
    assert WeightPatch._field_defaults == {"indices": None}
    model = bert()
    delta = make_delta(model)
    delta.whole["bert.pooler.dense.weight"] = torch.ones(16, 16)
    del delta.tensors["bert.pooler.dense.weight"]
    patches = list(delta.patches())
    for patch in patches:
        assert patch.values.dtype == patch.dtype
        assert patch.values.dim() == 1
        assert patch.indices is None or patch.indices.dtype == torch.int64
    dense = [patch.indices is None for patch in patches]
    assert dense == sorted(dense), "the sparse ones first, since an engine takes them in calls of their own"
    assert sum(dense) == 1


@fuses_at_load
def test_tensors_stored_whole_are_patched_whole(tmp_path):
    model = mixtral()
    whole = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 48, 16),
        "model.norm.weight": torch.randn(16),
        "score.weight": torch.randn(2, 16),
    }
    delta = SparseDelta({}, whole)
    patches = list(delta.patches(save(model, tmp_path)))
    parts = {f"{expert}.{part}.weight" for expert in range(3) for part in ("w1", "w3")}
    names = {patch.name for patch in patches if patch.shape == (24, 16)}
    assert names == {f"model.layers.0.block_sparse_moe.experts.{part}" for part in parts}
    assert patches[-1].name == "score.weight"
    loaded = type(model).from_pretrained(patched(tmp_path, patches))
    del delta.whole["score.weight"]
    assert bits(loaded) == bits(delta.apply(model))


@fuses_at_load
def test_a_part_of_a_stored_tensor_is_patched_at_its_entries(tmp_path):
    model = dinov2()
    name = next(key for key in model.state_dict() if key.endswith("mlp.up_proj.weight"))
    delta = SparseDelta({}, {name: torch.randn_like(model.state_dict()[name])})
    (patch,) = delta.patches(save(model, tmp_path))
    assert patch.indices.numel() == delta.whole[name].numel() < torch.Size(patch.shape).numel()
    assert bits(type(model).from_pretrained(patched(tmp_path, [patch]))) == bits(delta.apply(model))


def test_differences_need_the_base(tmp_path):
    model = bert()
    delta = (0.5 * make_delta(model)).on(model, kind="add")
    with pytest.raises(SparsifyError, match=r"is stored as differences, .* give the base's checkpoint, `patches\("):
        delta.patches()
    patches = delta.patches(save(model, tmp_path))
    assert bits(type(model).from_pretrained(patched(tmp_path, patches))) == bits(delta.apply(model))


@pytest.mark.parametrize("verb", ["merge", "patches"])
def test_a_drawn_tensor_is_no_change_of_the_bases_files(tmp_path, verb):
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    drawn = TensorDelta(*nothing, (2,), torch.float32, "replace", "0" * 64, InitializerRecipe("constant", 0.0))
    arguments = {"merge": [save(bert(), tmp_path / "base"), tmp_path / "out"], "patches": []}
    with pytest.raises(SparsifyError, match="is about changes of a base, and tensor `lora_A`"):
        getattr(SparseDelta({"lora_A": drawn}), verb)(*arguments[verb])


@pytest.mark.parametrize("architecture", MODELS)
def test_the_base_fits_in_memory_and_on_disk(tmp_path, architecture):
    model = MODELS[architecture]()
    delta = make_delta(model)
    save(model, tmp_path)
    before = bits(model), files(tmp_path)
    expected = CheckReport(len(delta.tensors), delta.num_entries)
    assert delta.check(model) == delta.check(tmp_path) == delta.check(str(tmp_path)) == expected
    assert (bits(model), files(tmp_path)) == before


def test_another_dtype_cannot_be_checked_and_the_report_says_so(tmp_path):
    model = bert()
    delta = make_delta(model)
    half = copy.deepcopy(model).bfloat16()
    for base in (half, save(half, tmp_path)):
        report = delta.check(base)
        assert report.unchecked == tuple(delta.tensors)
        assert str(report) == (
            f"{delta.num_entries:,} entries in 41 tensors: names and shapes fit; the base has 41 tensors "
            "(`bert.embeddings.word_embeddings.weight`) in another dtype than the delta was trained on, or not "
            "quantized as then, so the values there cannot be checked."
        )


def test_a_head_that_a_checkpoint_lacks_is_reported(tmp_path):
    model = bert()
    delta = make_delta(model.bert)
    delta.whole["classifier.weight"] = torch.zeros(3, 16)
    report = delta.check(save(model.bert, tmp_path))
    assert report.missing == ("classifier.weight",)
    assert str(report).endswith("trained on. 1 tensor stored whole, 1 of them not in the base.")


def test_two_tensors_that_a_checkpoint_ties_are_refused(tmp_path):
    model = gpt2()
    delta = make_delta(model)
    delta.tensors["lm_head.weight"] = delta.tensors["transformer.wte.weight"]
    with pytest.raises(BaseMismatchError, match=r"wte.weight` and `lm_head.weight` are one tensor in this checkpoint"):
        delta.check(save(model, tmp_path))
