"""A delta from two models: exact, or the most changed entries, from memory or from disk."""

import copy

import pytest
import safetensors.torch
import torch
import transformers
from checkpoints import gpt2, mixtral, save, tuned
from deltas import bits, fine_tuned, make_base
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from requirements import fuses_at_load
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, XLMRobertaConfig, XLMRobertaForMaskedLM

from sparsify import sparsify, trained_state
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError

PROPERTY = settings(max_examples=40)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def diff(base, tuned, budget=None):
    return SparseDelta.diff(base, tuned, budget, progress=False)


def on_disk(model, folder):
    folder.mkdir()
    safetensors.torch.save_file(model.state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_difference_applied_to_the_base_is_the_tuned_model(dtype):
    base = make_base(dtype)
    tuned = fine_tuned(base, 1)
    tuned[1].running_mean += 1
    tuned[1].num_batches_tracked += 3
    delta = diff(base, tuned)
    assert set(delta.whole) == {"1.num_batches_tracked"}
    with delta.applied(base):
        assert bits(base) == bits(tuned)
    assert delta.config["diff"] == {"changed": delta.num_entries, "kept": delta.num_entries, "squared_share": 1.0}


@PROPERTY
@given(st.integers(1, 60), st.integers(0, 10))
def test_a_budget_keeps_the_largest_changes_of_the_whole_model(budget, seed):
    base = make_base(torch.float64)
    tuned = fine_tuned(base, seed, share=0.8)
    delta = diff(base, tuned, budget)
    start = nn.utils.parameters_to_vector(base.parameters()).detach()
    flat = nn.utils.parameters_to_vector(tuned.parameters()).detach() - start
    largest = flat.abs().sort(descending=True).values[:budget]
    with delta.applied(base):
        kept = nn.utils.parameters_to_vector(base.parameters()).detach() - start
    assert torch.equal(kept.abs()[kept != 0].sort(descending=True).values, largest[largest > 0])
    assert delta.config["diff"]["squared_share"] == pytest.approx(float(largest.square().sum() / flat.square().sum()))


def test_ties_never_exceed_the_budget():
    base = nn.Linear(10, 10)
    tuned = copy.deepcopy(base)
    base.weight.data.zero_()
    tuned.weight.data.fill_(1)
    assert diff(base, tuned, 7).num_entries == 7


@pytest.mark.parametrize("which", ["base", "tuned", "both"])
@pytest.mark.parametrize("budget", [None, 5])
def test_checkpoints_are_as_good_as_models(tmp_path, which, budget):
    base = make_base()
    tuned = fine_tuned(base, 1)
    models = {"base": base, "tuned": tuned}
    pair = [on_disk(model, tmp_path / name) if which in (name, "both") else model for name, model in models.items()]
    assert diff(*pair, budget) == diff(base, tuned, budget)


def test_what_only_the_tuned_model_has_is_stored_whole_and_what_only_the_base_has_is_left_out(tmp_path):
    base = nn.ModuleDict({"body": nn.Linear(3, 3), "old_head": nn.Linear(3, 1)})
    tuned = nn.ModuleDict({"body": nn.Linear(3, 3), "new_head": nn.Linear(3, 2)})
    delta = diff(base, tuned)
    assert set(delta.whole) == {"new_head.weight", "new_head.bias"}
    assert set(delta.tensors) == {"body.weight", "body.bias"}
    with pytest.raises(BaseMismatchError, match=r"the base has none of the tuned model's tensors \(`x.0.weight`\)"):
        diff(on_disk(make_base(), tmp_path / "base"), nn.ModuleDict({"x": make_base()}))


def tied():
    model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    model["head"].weight = model["embed"].weight
    return model


def untied(model):
    model = copy.deepcopy(model)
    model["head"].weight = nn.Parameter(model["embed"].weight.detach().clone())
    return model


def test_a_tied_tensor_is_stored_once_and_one_that_is_tied_in_one_of_the_models_only_is_refused():
    base = tied()
    assert set(diff(base, fine_tuned(base, 1)).tensors) == {"embed.weight"}
    with pytest.raises(BaseMismatchError, match=r"`embed.weight` and `head.weight` are one tensor in the base and two"):
        diff(base, fine_tuned(untied(base), 1))
    for part in ("embed", "head"):  # one of the two alone has changed
        loose = untied(base)
        loose[part].weight.data += 1
        with pytest.raises(BaseMismatchError, match=r"are one tensor in the base and two in the tuned model"):
            diff(base, loose)
    other = untied(base)
    other["head"].weight.data += 1
    with pytest.raises(BaseMismatchError, match=r"`embed.weight` and `head.weight` are one tensor in the tuned model"):
        diff(other, fine_tuned(base, 1))
    loose = untied(base)
    with diff(loose, fine_tuned(loose, 1)).applied(loose):  # untied in both: two tensors
        assert not torch.equal(loose["head"].weight, loose["embed"].weight)


def llama_with_a_head(is_tied):
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**config, vocab_size=40, tie_word_embeddings=is_tied))


@pytest.mark.parametrize("is_tied", [False, True])
def test_checkpoints_of_which_one_alone_is_tied_are_refused_as_models_are(tmp_path, is_tied):
    base, tuned = llama_with_a_head(is_tied), llama_with_a_head(not is_tied)
    with torch.no_grad():
        tuned.model.embed_tokens.weight[3, 3] += 1
        tuned.lm_head.weight[5, 5] += 1
    for model, name in ((base, "base"), (tuned, "tuned")):
        model.save_pretrained(tmp_path / name)
    for pair in ((base, tuned), (tmp_path / "base", tmp_path / "tuned")):
        with pytest.raises(BaseMismatchError, match=r"are one tensor in the .* and two in the"):
            diff(*pair)


def test_a_tied_table_of_a_checkpoint_has_the_first_of_its_names(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    base = XLMRobertaForMaskedLM(XLMRobertaConfig(**sizes, vocab_size=40))
    changed = copy.deepcopy(base)
    with torch.no_grad():
        changed.get_input_embeddings().weight[3, 3] += 1
    for model, name in ((base, "base"), (changed, "tuned")):
        model.save_pretrained(tmp_path / name)
    assert diff(tmp_path / "base", tmp_path / "tuned") == diff(base, changed)


def test_buffers_that_earlier_versions_stored_are_no_new_tensors(tmp_path):
    base, changed = llama_with_a_head(False), llama_with_a_head(False)
    with torch.no_grad():
        changed.lm_head.weight[3, 3] += 1
    base.save_pretrained(tmp_path / "base")
    changed.save_pretrained(tmp_path / "tuned")
    file = tmp_path / "tuned" / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "a.new.head": torch.ones(2)}
    safetensors.torch.save_file(safetensors.torch.load_file(file) | old, file, metadata={"format": "pt"})
    delta = diff(tmp_path / "base", tmp_path / "tuned")
    assert (delta.num_entries, list(delta.whole)) == (1, ["a.new.head"])


def test_a_tied_tensor_that_a_checkpoint_stores_under_both_names_is_one(tmp_path):
    base = gpt2()
    changed = tuned(base)
    folder = save(changed, tmp_path / "tuned", shards=False)
    stored = safetensors.torch.load_file(folder / "model.safetensors")
    stored["lm_head.weight"] = stored["transformer.wte.weight"].clone()
    safetensors.torch.save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    delta = diff(base, folder)
    assert "lm_head.weight" not in delta.tensors
    assert bits(delta.apply(base)) == bits(changed)


def test_modules_of_sentence_transformers_are_not_left_out_of_a_comparison(tmp_path):
    base, tuned = (save(gpt2(), tmp_path / name) for name in ("base", "tuned"))
    (tuned / "2_Dense").mkdir()
    safetensors.torch.save_file({"linear.weight": torch.ones(2, 2)}, tuned / "2_Dense" / "model.safetensors")
    with pytest.raises(SparsifyError, match=r"2_Dense.*of a module of sentence-transformers, is not compared: give lo"):
        diff(base, tuned)


def test_a_checkpoint_of_a_run_that_goes_on_is_not_compared(tmp_path):
    model = gpt2()
    base = save(model, tmp_path / "base")
    safetensors.torch.save_file(trained_state(sparsify(model, 5, "random")), tmp_path / "run.safetensors")
    for pair in ((base, tmp_path / "run.safetensors"), (tmp_path / "run.safetensors", base)):
        with pytest.raises(SparsifyError, match=r"run.safetensors` is of a sparsified model: .*from_checkpoint"):
            diff(*pair)


def test_adapters_that_are_not_merged_are_named():
    base = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    adapted = get_peft_model(copy.deepcopy(base), LoraConfig(target_modules=["0"]))
    with pytest.raises(BaseMismatchError, match=r"`0.base_layer.weight` is a layer .*`model.merge_and_unload\(\)`"):
        diff(base, adapted)
    nn.init.ones_(adapted.base_model.model[0].lora_B["default"].weight)
    assert set(diff(base, adapted.merge_and_unload()).tensors) == {"0.weight"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "0", nn.Linear(6, 4)), r"tensor `0.weight` has shape \(5, 6\) in the base, \(4, 6\) in"),
        (lambda m: m.half(), r"`0.weight` is torch.float32 in the base, torch.float16 in the tuned model: load both"),
        (lambda m: m[2].bias.data[1:2].fill_(torch.nan), r"tensor `2.bias`: 1 changes are not finite"),
        (lambda m: m.to("meta"), r"`0.weight` is on the meta device and has no values: it was offloaded"),
        (
            lambda m: setattr(m[0].weight, "to_local", None),
            r"`0.weight` is sharded over ranks .*apply the delta before",
        ),
        (lambda m: sparsify(m, 5, "id3", steps=2), "this model is sparsified"),
        (lambda m: None, "the two models do not differ"),
    ],
)
def test_models_that_have_no_difference_are_refused(change, message):
    base = make_base()
    tuned = copy.deepcopy(base)
    change(tuned)
    with pytest.raises(SparsifyError, match=message):
        diff(base, tuned)
    for budget in (0, -1, True, 2.5):
        with pytest.raises(SparsifyError, match="expected a number of entries, at least 1"):
            diff(base, make_base(seed=1), budget)


@fuses_at_load
def test_checkpoints_are_compared_under_the_names_of_the_model_at_run_time(tmp_path):
    """A mixture of experts is stored expert by expert, and is one tensor in the model."""
    base = mixtral()
    changed = tuned(base)
    delta = diff(save(base, tmp_path / "base"), save(changed, tmp_path / "tuned"))
    assert "model.layers.0.mlp.experts.gate_up_proj" in delta.tensors
    assert bits(delta.apply(base)) == bits(changed)


@fuses_at_load
def test_tensors_that_are_transposed_at_load_under_their_own_names_are_compared_as_the_model_has_them(tmp_path):
    config = transformers.Qwen3VLMoeConfig(
        text_config={"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "moe_intermediate_size": 12,
                     "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
                     "num_experts": 4, "num_experts_per_tok": 2},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
                       "deepstack_visual_indexes": [0]},
        image_token_id=1, video_token_id=2, vision_start_token_id=3, vision_end_token_id=4,
    )  # fmt: skip
    base = transformers.Qwen3VLMoeForConditionalGeneration(config)
    other = copy.deepcopy(base)
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    other.get_parameter(name).data[0, 0, :3] += 1
    for model, folder in ((base, "base"), (other, "other")):
        file = save(model, tmp_path / folder, shards=False) / "model.safetensors"
        stored = safetensors.torch.load_file(file)
        experts = {key: value.mT.contiguous() for key, value in stored.items() if ".experts." in key}
        safetensors.torch.save_file(stored | experts, file, {"format": "pt"})  # as the hub has them
    expected = diff(base, other)
    assert diff(tmp_path / "base", tmp_path / "other") == diff(base, tmp_path / "other") == expected
    assert bits((1.0 * expected).on(tmp_path / "base").apply(base)) == bits(other)
