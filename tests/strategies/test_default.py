"""What ``sparsify(model, budget)`` does where no strategy is named."""

import math

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from quantized_models import quantize
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from sparsify import get_engine, sparsify
from sparsify.adapters import add_adapters
from sparsify.peft import SparseConfig
from sparsify.strategies.strategy import PRESETS, SCHEDULES

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 40}


def llama():
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


def bert():
    return BertForSequenceClassification(BertConfig(**SIZES))


def t5():
    return T5ForConditionalGeneration(T5Config(vocab_size=40, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def lora(model):
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def in_bfloat16():
    return llama().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (llama, "random"),
        (in_bfloat16, "random"),
        (bert, "id3"),
        (t5, "id3"),
        (lambda: lora(llama()), "id3"),
        (lambda: add_adapters(llama(), "pfeiffer", 2), "id3"),
        (lambda: nn.Sequential(nn.Conv1d(2, 90, 2)), "id3"),
    ],
    ids=["llama", "bfloat16", "bert", "t5", "lora", "adapters", "convolution"],
)
def test_a_language_model_gets_random_entries_and_all_others_id3_unmasked_early(make, strategy):
    engine = get_engine(sparsify(make(), budget=8, steps=10))
    assert engine.strategy == PRESETS[strategy]
    assert engine.policy.schedule == SCHEDULES["early"]


@pytest.mark.parametrize(("share", "strategy"), [(0.049, "id3"), (0.05, "random"), (0.12, "random")])
def test_of_a_twentieth_of_the_linear_layers_or_more_entries_are_random(share, strategy):
    linear = 4 * 16 * 17 + 16 * 33 + 32 * 17  # with biases, without the pooler and the head, which are saved
    for budget in (share, math.ceil(share * linear)):
        saved = ["pooler", "classifier"]
        engine = get_engine(sparsify(bert(), budget, steps=10, modules_to_save=saved))
        assert engine.strategy == PRESETS[strategy]
        assert engine.budget == pytest.approx(share * linear, abs=1)
    engine = get_engine(sparsify(lora(llama()), share, steps=10))
    assert engine.strategy == PRESETS["id3"], "new adapters have their own"


def test_the_share_of_a_quantized_model_counts_its_quantized_weights():
    model = sparsify(quantize(bert(), "nf4"), budget=20, steps=10, target_modules="all-linear")
    assert get_engine(model).strategy == PRESETS["id3"]


def test_candidates_are_the_linear_layers_that_train_but_for_the_head_of_a_language_model():
    model = llama()
    model.model.layers[0].mlp.requires_grad_(False)
    engine = get_engine(sparsify(model, budget=8))
    parts = {tensor.name.split(".")[-2] for tensor in engine.tensors}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj"}


@pytest.mark.parametrize("saved", [None, ["2"]])
def test_a_model_that_is_not_made_of_linear_layers_has_all_its_parameters_as_candidates(saved):
    model = nn.Sequential(nn.Conv1d(2, 9, 9), nn.BatchNorm1d(9), nn.Linear(2, 2))
    engine = get_engine(sparsify(model, budget=4, steps=4, modules_to_save=saved))
    assert len(engine.tensors) == (4 if saved else 6)


def test_experts_are_candidates_as_linear_layers_are_and_routers_and_kernels_are_not():
    sizes = {**SIZES, "head_dim": 8, "num_key_value_heads": 1, "num_experts": 4, "moe_intermediate_size": 16}
    names = [t.name for t in get_engine(sparsify(Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)), 8)).tensors]
    assert {name.removeprefix("model.layers.0.").split(".")[0] for name in names} == {"self_attn", "mlp"}
    assert [name for name in names if ".mlp." in name] == [
        "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj",
    ]  # fmt: skip
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv1d(2, 9, 3))
    model = nn.Sequential(convolution, nn.Conv1d(9, 9, 3), nn.Linear(9, 90))
    assert [tensor.name for tensor in get_engine(sparsify(model, 8, steps=2)).tensors] == ["2.weight", "2.bias"]


def test_a_prompt_beside_a_head_is_a_candidate():
    config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=3)
    engine = get_engine(sparsify(get_peft_model(bert(), config), budget=4, steps=4))
    assert [tensor.name for tensor in engine.tensors] == ["prompt_encoder.default.embedding.weight"]


def test_what_is_given_stays():
    given = {"schedule": "cubic", "target_modules": ["query"], "modules_to_save": ["classifier"]}
    engine = get_engine(sparsify(bert(), budget=8, steps=10, **given))
    assert engine.policy.schedule == SCHEDULES["cubic"]
    assert {tensor.name.split(".")[-2] for tensor in engine.tensors} == {"query"}
    assert engine.dense_names == ("classifier.weight", "classifier.bias")


def test_the_papers_setting_is_id3_by_name_over_all_parameters_until_the_last_step():
    model = bert()
    names = [name for name, _ in model.named_parameters()]
    engine = get_engine(sparsify(model, budget=8, strategy="id3", steps=10))
    assert engine.policy.schedule == SCHEDULES["uniform"]
    assert [tensor.name for tensor in engine.tensors] == names


@pytest.mark.parametrize(
    "settings", [{}, {"modules_to_save": ["lm_head"]}, {"layers_to_transform": [0]}, {"budget_pattern": {"q_proj": 5}}]
)
def test_an_adapter_of_peft_has_the_same_default(settings):
    model = get_peft_model(llama(), SparseConfig(budget=8, task_type="CAUSAL_LM", **settings))
    engine = get_engine(model)
    assert engine.strategy.importance == PRESETS["random"].importance
    assert not any("norm" in tensor.name or "embed" in tensor.name for tensor in engine.tensors)


def test_an_adapter_with_a_lora_of_its_own_trains_id3s_entries_beside_it():
    config = SparseConfig(budget=8, steps=10, lora=LoraConfig(r=2, target_modules=["q_proj"]), task_type="CAUSAL_LM")
    engine = get_engine(get_peft_model(llama(), config))
    assert engine.strategy == PRESETS["id3"]
    assert not any("lora" in tensor.name or "norm" in tensor.name for tensor in engine.tensors)
