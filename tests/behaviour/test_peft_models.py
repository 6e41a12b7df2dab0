"""PEFT's tuners, sparsified: trained as the dense oracle trains them, to the last entry, or refused by name."""

import copy
import re

import peft
import pytest
import torch
from architectures import build
from peft import get_peft_model
from peft_twins import ADAPTERS, ATTENTION, LLAMA, RANK, AdapterTwins, lora, on

from sparsify import SparseDelta, SparsifyError, sparsify, summary

STEPS = 4


def prompt(base, config, **options):
    options = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3, **options}
    return base, lambda: getattr(peft, config)(**options)


# name -> the base model, and the tuner's config
TUNERS = {
    **ADAPTERS,
    # ---- LoRA and what changes its arithmetic
    "LoRA on all linear layers": ("llama", lambda: lora(target_modules="all-linear")),
    "LoRA and all biases": ("bert", lambda: lora(target_modules=ATTENTION, bias="all")),
    "LoRA of several ranks": ("llama", lambda: lora(target_modules=LLAMA, rank_pattern={"down_proj": 3})),
    "LoRA and a norm to save": ("llama", lambda: lora(target_modules=LLAMA, modules_to_save=["input_layernorm"])),
    "KaSA": ("bert", lambda: lora(target_modules=ATTENTION, kasa_config=peft.KasaConfig())),
    "VeLoRA": ("bert", lambda: lora(target_modules=ATTENTION, velora_config=peft.VeloraConfig(num_groups=2))),
    "MonteCLoRA": ("bert", lambda: lora(target_modules=ATTENTION, monteclora_config=peft.MontecloraConfig())),
    # ---- LoRA on other layers
    "LoRA on a tied embedding": ("gpt2", lambda: lora(target_modules=["wte", "c_attn"])),
    "LoRA on both ends of a tie": ("qwen2", lambda: lora(target_modules=["embed_tokens", "lm_head"])),
    "DoRA on a tied embedding": ("qwen2", lambda: lora(target_modules=["embed_tokens", "q_proj"], use_dora=True)),
    "LoRA and tokens": ("gpt2", lambda: lora(target_modules=["c_attn"], trainable_token_indices={"wte": [3, 9]})),
    "a tied embedding saved": (
        "qwen2", lambda: lora(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    ),
    "DoRA on Conv1D": ("gpt2", lambda: lora(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
    "LoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv2d", "conv3d"])),
    "DoRA on convolutions": ("shapes", lambda: lora(target_modules=["conv1d", "conv2d", "conv3d"], use_dora=True)),
    "LoRA on a parameter": ("bert", lambda: lora(target_modules=[], target_parameters=["query.weight"])),
    # ---- other tuners of layers
    "LoHa on convolutions": on("shapes", "LoHaConfig", r=RANK, target_modules=["conv2d"], use_effective_conv2d=True),
    "LoKr": on("bert", "LoKrConfig", r=RANK),
    "LoKr of two products": on("bert", "LoKrConfig", r=1, decompose_both=True, decompose_factor=4),
    "PVeRA": on("bert", "PveraConfig", r=4), "RandLora": on("bert", "RandLoraConfig", r=4),
    "VBLoRA": on("bert", "VBLoRAConfig", r=RANK, num_vectors=6, vector_length=4, topk=2),
    "TinyLoRA": on("bert", "TinyLoraConfig", r=RANK, u=4),
    "UniLoRA": on("bert", "UniLoraConfig", r=RANK, theta_d_length=20), "GraLoRA": on("bert", "GraloraConfig", r=4),
    "DeLoRA": on("bert", "DeloraConfig", r=RANK), "Lily": on("bert", "LilyConfig", r=RANK),
    "HiRA": on("bert", "HiraConfig", r=RANK), "GLoRA": on("bert", "GloraConfig", r=RANK),
    "MiSS": on("bert", "MissConfig", r=RANK), "BEFT": on("bert", "BeftConfig"),
    "OFT": on("bert", "OFTConfig", oft_block_size=4), "BOFT": on("bert", "BOFTConfig", boft_block_size=4),
    "HRA": on("bert", "HRAConfig", r=RANK), "RoAd": on("bert", "RoadConfig", group_size=8),
    "PSOFT": on("bert", "PsoftConfig", r=4), "C3A": on("bert", "C3AConfig", block_size=4),
    "FourierFT": on("bert", "FourierFTConfig", n_frequency=20), "WaveFT": on("bert", "WaveFTConfig", n_frequency=20),
    "DEFT": on("bert", "DeftConfig", r=RANK), "PEANuT": on("bert", "PeanutConfig", r=RANK),
    "FRoD": on("bert", "FrodConfig"), "SHiRA": on("bert", "ShiraConfig", r=1),
    "Supertuning": on("bert", "SupertuningConfig", sparsity=0.9),
    "LN tuning": on("shapes", "LNTuningConfig", target_modules=["norm"]),
    "trainable tokens": on("gpt2", "TrainableTokensConfig", target_modules=["wte"], token_indices=[3, 9, 11]),
    "Poly": on("llama", "PolyConfig", r=RANK, n_tasks=2, n_skills=2, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    # ---- prompts
    "prompt tuning": prompt("gpt2", "PromptTuningConfig"),
    "prompt tuning of T5": prompt("t5", "PromptTuningConfig", task_type="SEQ_2_SEQ_LM"),
    "p-tuning": prompt("llama", "PromptEncoderConfig", encoder_hidden_size=8),
    "prefix tuning": prompt("llama", "PrefixTuningConfig"),
    "prefix with a projection": prompt("llama", "PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=8),
    "multitask prompt tuning": prompt("gpt2", "MultitaskPromptTuningConfig", num_tasks=2, num_ranks=2),
    "adaption": ("llama", lambda: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2)),
    "cartridge": prompt("llama", "CartridgeConfig"),
}  # fmt: skip

# what sparsify() refuses: the base model, the tuner's config, the parameter that is named, and the reason
REFUSED = {
    "AdaLoRA": (
        *on("bert", "AdaLoraConfig", init_r=4, target_r=2, total_step=10),
        r"query\.lora_A\.default` cannot be masked: .* AdaLoRA's, which allots its ranks by .* LoRA does neither",
    ),
    "AdaMSS that picks subspaces": (
        *on("bert", "AdamssConfig", r=4, num_subspaces=2, subspace_rank=1, use_asa=True, init_warmup=1, final_warmup=2),
        r"query\.adamss_A\.default\.0` cannot be masked: .* AdaMSS's, which picks .* with use_asa=False it does not",
    ),
    "constrained OFT": (
        *on("bert", "OFTConfig", oft_block_size=4, coft=True),
        r"query\.oft_R\.default\.weight` cannot be masked: .* projects its weight .* coft=False does not",
    ),
    "CPT": (
        *prompt("gpt2", "CPTConfig", cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1], cpt_tokens_type_mask=[1, 2, 3]),
        r"delta_embedding\.weight` cannot be masked: the module \(Embedding\) has a gradient hook on it",
    ),
    "p-tuning by an LSTM": (
        *prompt("gpt2", "PromptEncoderConfig", encoder_hidden_size=8, encoder_reparameterization_type="LSTM"),
        r"lstm_head\.weight_ih_l0` cannot be masked: the module \(LSTM\) reads its weights from a flat list",
    ),
    "LoRA that is tied itself": (
        "qwen2", lambda: lora(target_modules=["embed_tokens", "lm_head"], ensure_weight_tying=True),
        r"(embed_tokens|lm_head)\.lora_\S+` shares its memory with `\S+(embed_tokens|lm_head)\.lora_\S+`, .* untie them"
        ".*ensure_weight_tying=True",
    ),
}  # fmt: skip


AS_PEFT_MAKES_THEM = [(name, False) for name in ADAPTERS]


@pytest.mark.parametrize(("name", "random"), [*((name, True) for name in TUNERS), *AS_PEFT_MAKES_THEM])
def test_id3_on_a_tuner_is_the_oracle_to_the_last_entry(name, random):
    twins = AdapterTwins(TUNERS[name], steps=STEPS, random=random)
    if name in ("multitask prompt tuning", "Poly"):
        twins.batches = [{**batch, "task_ids": torch.tensor([0, 1, 1, 0])} for batch in twins.batches]
    twins.train(STEPS)
    assert not random or summary(twins.sparse).unmasked > 0


@pytest.mark.parametrize("name", REFUSED)
def test_a_tuner_that_cannot_be_masked_is_refused_by_name_before_anything_changes(name):
    base, config, reason = REFUSED[name]
    model = get_peft_model(build(base)[0].float(), config())
    before = {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()}
    required = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(SparsifyError, match=reason):
        sparsify(model, 3, "id3", steps=1)
    assert {name: (type(module), set(module.__dict__)) for name, module in model.named_modules()} == before
    assert [parameter.requires_grad for parameter in model.parameters()] == required


WRAPPINGS = {
    "LoRA": lambda m: get_peft_model(m, lora(target_modules=["q_proj", "embed_tokens"], task_type="CAUSAL_LM")),
    "two of them": lambda m: WRAPPINGS["LoRA"](get_peft_model(m, lora(target_modules=["v_proj"]), "other")),
    "trainable tokens": lambda m: get_peft_model(m, lora(trainable_token_indices={"embed_tokens": [1]})),
    "a mixed model": lambda m: get_peft_model(m, lora(target_modules=LLAMA), mixed=True),
    "transformers' own": lambda m: m.add_adapter(lora(target_modules=LLAMA)) or m,
    "a prompt": lambda m: get_peft_model(m, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)),
    "compiled": lambda m: torch.compile(WRAPPINGS["LoRA"](m)),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_delta_of_the_base_goes_under_an_adapter(wrapping):
    base, _ = build("llama")
    base.requires_grad_(False)
    tuned = copy.deepcopy(base)
    for parameter in tuned.parameters():
        parameter.flatten()[::7] += 0.5
    delta = SparseDelta.diff(base, tuned, progress=False)
    expected, before = (dict(model.named_parameters()) for model in (tuned, copy.deepcopy(base)))
    model = WRAPPINGS[wrapping](base)
    for put, values in ((delta.apply, expected), (delta.revert, before)):
        put(model)
        found = [p for name, p in model.named_parameters() if not re.search("lora_|prompt|_tokens_", name)]
        assert all(map(torch.equal, found, values.values()))
        assert len(found) == len(values)


def test_a_delta_does_not_go_under_a_module_that_peft_has_copied():
    base, _ = build("llama")
    delta = SparseDelta({}, {"lm_head.weight": base.lm_head.weight})
    model = get_peft_model(base, lora(target_modules=LLAMA, modules_to_save=["lm_head"]))
    with pytest.raises(SparsifyError, match=r"`lm_head` is in PEFT's modules_to_save, .* to the base first"):
        delta.apply(model)
