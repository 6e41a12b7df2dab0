"""Bottleneck adapters: where they are, what they compute, what of them is trained, and how they are kept."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
import transformers as hf
from architectures import WIDTH, build
from deltas import bits
from oracle import unmasked_sets
from requirements import needs_transformers_5
from torch import nn
from twins import Twins

from sparsify import MaskedLinear, SparsifyError, desparsify, sparsify
from sparsify.adapters import Adapter, AdapterConfig, add_adapters, load_adapters, remove_adapters, save_adapters

KINDS = ["pfeiffer", "houlsby"]
FACTOR, BUDGET, STEPS = 4, 60, 3
BERTS = ["bert", "roberta", "deberta-v2", "electra"]
LLAMAS = ["llama", "mistral", "qwen2", "qwen3", "gemma", "qwen2-moe", "gpt-oss"]
LLAMAS.append(pytest.param("mixtral", marks=needs_transformers_5("4 calls the experts of a layer something else")))
SHAPES = {
    "adapter_down.0.weight": (WIDTH // FACTOR, WIDTH),
    "adapter_down.0.bias": (WIDTH // FACTOR,),
    "adapter_up.weight": (WIDTH, WIDTH // FACTOR),
    "adapter_up.bias": (WIDTH,),
}
HEADS = {"bert": ["classifier"], "roberta": ["classifier.dense", "classifier.out_proj"], "t5": [], "llama": []}
HEADS["deberta-v2"] = ["pooler.dense", "classifier"]
every_kind = pytest.mark.parametrize("kind", KINDS)
every_architecture = pytest.mark.parametrize("name", ["bert", "t5", "llama"])  # whose layers are unlike each other
every_layout = pytest.mark.parametrize("name", [*BERTS, "t5", *LLAMAS])


def with_adapters(name, kind="pfeiffer", dtype=torch.float64, **options):
    """An architecture with adapters that are large enough to matter, and its batches."""
    model, batches = build(name, dtype)
    add_adapters(model, kind, FACTOR, **options)
    torch.manual_seed(1)
    with torch.no_grad():
        for adapter in adapters_of(model):
            for parameter in adapter.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model, batches


def adapters_of(model):
    return [module for module in model.modules() if isinstance(module, Adapter)]


def logits(model, batch):
    with torch.no_grad():
        return model.eval()(**batch).logits


def shapes(model):
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def hooks(model):
    return [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()]


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def places(name, kind):
    """The names of AdapterHub's adapters."""
    both = kind == "houlsby"
    if name == "t5":
        blocks = [(stack, i, last) for stack, last in (("encoder", 1), ("decoder", 2)) for i in range(2)]
        return [f"{stack}.block.{i}.layer.{j}.adapters" for stack, i, last in blocks for j in {0, last} if j or both]
    layers, parts = "model.layers", ["attention_adapters.adapters", "output_adapters.adapters"]
    if name in BERTS:
        layers, parts = f"{name.partition('-')[0]}.encoder.layer", ["attention.output.adapters", "output.adapters"]
    return [f"{layers}.{i}.{part}" for i in range(2) for part in parts[not both :]]


@every_kind
@every_layout
def test_adapters_have_adapterhubs_names_and_shapes_and_leave_nothing_behind_when_removed(name, kind):
    model, batches = build(name)
    before, modules = shapes(model), [key for key, _ in model.named_modules()]
    expected = logits(model, batches[0])
    own_hooks = hooks(model)  # transformers adds some in the first forward
    assert add_adapters(model, kind, FACTOR) is model
    added = {f"{place}.default.{key}": SHAPES[key] for place in places(name, kind) for key in SHAPES}
    assert shapes(model) == before | added
    assert not torch.equal(logits(model, batches[0]), expected)
    with torch.no_grad():
        for adapter in adapters_of(model):
            adapter.adapter_up.weight.zero_()
    assert torch.equal(logits(model, batches[0]), expected)
    assert remove_adapters(model) is model
    assert list(shapes(model)) == list(before)
    assert [key for key, _ in model.named_modules()] == modules
    assert torch.equal(logits(model, batches[0]), expected)
    assert hooks(model) == own_hooks
    assert len(adapters_of(add_adapters(model, kind, FACTOR))) == len(places(name, kind))


@pytest.mark.parametrize(("factor", "bottleneck"), [(16, 48), (7, 109), (0.5, 1536), (2.5, 307), (10_000, 1)])
def test_a_bottleneck_is_rounded_down_and_never_empty(factor, bottleneck):
    assert Adapter(768, AdapterConfig("houlsby", factor)).adapter_up.in_features == bottleneck


def test_cross_attention_of_a_bert_decoder_has_an_adapter_of_its_own():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
    config = hf.BertConfig(vocab_size=8, **sizes, is_decoder=True, add_cross_attention=True)
    model = add_adapters(hf.BertModel(config), "houlsby", FACTOR)
    assert hasattr(model.encoder.layer[0].crossattention.output, "adapters")
    assert len(adapters_of(model)) == 3


def test_weights_start_small_and_biases_at_zero():
    adapter = Adapter(768, AdapterConfig("pfeiffer", 2))
    for projection in (adapter.adapter_down[0], adapter.adapter_up):
        assert projection.weight.std().item() == pytest.approx(0.02, rel=0.02)
        assert projection.bias.count_nonzero() == 0


def bottleneck(adapter, x, activation):
    down, up = adapter.adapter_down[0], adapter.adapter_up
    return nn.functional.linear(activation(nn.functional.linear(x, down.weight, down.bias)), up.weight, up.bias)


def test_pfeiffer_in_bert_sees_the_normalised_sum_and_is_added_before_the_norm():
    model, _ = with_adapters("bert", "pfeiffer")
    part = model.bert.encoder.layer[0].output
    x, residual = torch.randn(2, 20, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)
    plain_norm = copy.deepcopy(part.LayerNorm)
    plain_norm._forward_pre_hooks.clear()
    total = part.dense(x) + residual
    expected = plain_norm(total + bottleneck(part.adapters.default, plain_norm(total), torch.relu))
    torch.testing.assert_close(part(x, residual), expected)


def test_houlsby_in_bert_sees_the_sublayers_output_and_is_added_before_the_residual():
    model, _ = with_adapters("bert", "houlsby")
    layers = model.bert.encoder.layer
    for part, width in [(layers[0].attention.output, WIDTH), (layers[1].output, 20)]:
        x, residual = torch.randn(2, width, dtype=torch.float64), torch.randn(2, WIDTH, dtype=torch.float64)
        hidden = part.dense(x)
        change = bottleneck(part.adapters.default, hidden, nn.functional.silu)
        torch.testing.assert_close(part(x, residual), part.LayerNorm(hidden + change + residual))


@every_kind
def test_pfeiffer_in_t5_sees_the_sum_and_houlsby_the_sublayers_output(kind):
    x = torch.randn(2, 3, WIDTH, dtype=torch.float64)
    model, _ = with_adapters("t5", kind)
    part = model.encoder.block[0].layer[1]
    hidden = part.DenseReluDense(part.layer_norm(x))
    seen, activation = (hidden + x, torch.relu) if kind == "pfeiffer" else (hidden, nn.functional.silu)
    torch.testing.assert_close(part(x), x + hidden + bottleneck(part.adapters.default, seen, activation))


@every_kind
def test_pfeiffer_in_llama_sees_the_sum_and_houlsby_the_sublayers_output(kind):
    model, batches = with_adapters("llama", kind)
    layer, seen = model.model.layers[0], {}
    norm = layer.post_attention_layernorm
    norm.register_forward_hook(lambda _, args, output: seen.update(residual=args[0], normed=output))
    layer.register_forward_hook(lambda *call: seen.update(output=call[2]))
    model(**batches[0])
    gate = layer.mlp.act_fn(layer.mlp.gate_proj(seen["normed"])) * layer.mlp.up_proj(seen["normed"])
    hidden, residual = layer.mlp.down_proj(gate), seen["residual"]
    given, activation = (hidden + residual, torch.relu) if kind == "pfeiffer" else (hidden, nn.functional.silu)
    expected = residual + hidden + bottleneck(layer.output_adapters.adapters.default, given, activation)
    torch.testing.assert_close(seen["output"], expected)


@needs_transformers_5("4 records what a layer's forward gives, before its hooks")
def test_recorded_hidden_states_are_the_adapted_ones():
    model, batches = build("llama")
    inputs = {"input_ids": batches[0]["input_ids"], "output_hidden_states": True}
    model(**inputs)  # transformers' hooks that record are made here
    add_adapters(model, "pfeiffer", FACTOR)
    recorded, seen = model(**inputs).hidden_states[1], []
    model.model.layers[1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**inputs)
    assert torch.equal(recorded, seen[0])


def test_an_adapter_in_float32_works_within_a_base_in_bfloat16():
    model, batches = build("bert", torch.bfloat16)
    add_adapters(model, "houlsby", FACTOR)
    assert all(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    for adapter in adapters_of(model):
        adapter.float()
    assert logits(model, batches[0]).dtype == torch.bfloat16


@every_kind
@pytest.mark.parametrize("name", HEADS)
def test_adapters_and_a_tasks_head_get_gradients_and_nothing_else(name, kind):
    model, batches = with_adapters(name, kind)
    model(**batches[0]).loss.backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    heads = {f"{part}.{end}" for part in HEADS[name] for end in ("weight", "bias")}
    assert with_gradient == {f"{place}.default.{key}" for place in places(name, kind) for key in SHAPES} | heads
    assert all(parameter.grad.count_nonzero() for parameter in model.parameters() if parameter.grad is not None)


def test_a_head_of_the_users_own_stays_trainable_and_a_frozen_one_frozen():
    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = build("bert")[0].bert
            self.head, self.frozen = nn.Linear(WIDTH, 2), nn.Linear(2, 2).requires_grad_(False)

    model = add_adapters(Classifier(), "pfeiffer", FACTOR)
    assert [name for name in trainable(model) if "adapter" not in name] == ["head.weight", "head.bias"]


@every_kind
@every_architecture
def test_id3_on_adapters_is_the_oracle_to_the_last_entry(name, kind):
    base, batches = with_adapters(name, kind)
    dense, sparse = copy.deepcopy(base), copy.deepcopy(base)
    sparsify(sparse, BUDGET, "id3", steps=STEPS)
    projections = [layer for adapter in adapters_of(sparse) for layer in (adapter.adapter_down[0], adapter.adapter_up)]
    assert all(type(projection) is MaskedLinear for projection in projections)
    assert set(unmasked_sets(sparse)) == set(trainable(base))
    Twins(dense, sparse, BUDGET, STEPS).train(batches)
    assert sum(map(len, unmasked_sets(sparse).values())) == BUDGET


@every_kind
@every_architecture
def test_copies_and_saved_adapters_compute_the_same_with_weights_of_their_own(name, kind, tmp_path):
    model, batches = with_adapters(name, kind, adapter_name="mrpc")
    expected, (fresh, _) = logits(model, batches[0]), build(name)
    save_adapters(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"adapter_config.json", "adapter.safetensors"}
    assert load_adapters(fresh, tmp_path) is fresh
    assert trainable(fresh) == trainable(model)
    for twin in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(logits(twin, batches[0]), expected)
        with torch.no_grad():
            for adapter in adapters_of(twin):
                adapter.adapter_up.weight.add_(1)
        assert torch.equal(logits(model, batches[0]), expected)
        assert not torch.equal(logits(twin, batches[0]), expected)


def test_adapters_go_after_modules_that_the_user_names(tmp_path):
    model, batches = build("gpt2")
    expected = logits(model, batches[0])
    add_adapters(model, "houlsby", FACTOR, target_modules=r"transformer\.h\.\d\.mlp")
    assert len(adapters_of(model)) == 2
    assert trainable(model)[0] == "transformer.h.0.mlp.adapters.default.adapter_down.0.weight"
    adapted = logits(model, batches[0])
    assert not torch.equal(adapted, expected)
    save_adapters(model, tmp_path)
    assert torch.equal(logits(load_adapters(build("gpt2")[0], tmp_path), batches[0]), adapted)
    assert torch.equal(logits(remove_adapters(model), batches[0]), expected)


def test_a_model_of_the_users_own_takes_adapters_after_its_linear_layers():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    x, (first, _, last) = torch.randn(3, 4), model
    hidden = first(x)
    add_adapters(model, reduction_factor=2, target_modules=["0"])
    adapter = first.adapters.default
    torch.testing.assert_close(model(x), last(torch.relu(hidden + bottleneck(adapter, hidden, torch.relu))))
    assert trainable(model) == [f"0.adapters.default.{key}" for key in SHAPES]


def untouched(model, call, match):
    """Runs a call that has to fail, and to leave the model as it is."""

    def state():
        return bits(model), trainable(model), hooks(model)

    before = state()
    with pytest.raises(SparsifyError, match=match):
        call()
    assert state() == before


def odd_stack():
    model, _ = build("qwen3")
    model.model.layers[1].linear_attn = nn.Linear(2, 2)
    return model


def of_adapterhub():
    model, _ = build("bert")
    model.adapters_config = object()
    return model


BAD_ARGUMENTS = [
    ({"kind": "seq_bn"}, "kind='seq_bn' is no kind of adapter; expected houlsby or pfeiffer"),
    ({"reduction_factor": 0}, "reduction_factor=0; expected a number of at least 1/1024"),
    ({"reduction_factor": float("nan")}, "reduction_factor=nan; expected"),
    ({"reduction_factor": True}, "reduction_factor=True; expected"),
    ({"reduction_factor": np.int64(4)}, r"reduction_factor=np.int64\(4\); expected"),
    ({"adapter_name": "a.b"}, "adapter_name='a.b' cannot be part of a parameter's name"),
    ({"adapter_name": "keys"}, "adapter_name='keys' cannot be"),
    ({"target_modules": ["no_such"]}, "target_modules: 'no_such' matches no module of the model"),
]
KNOWN = r"no layer that adapters are known for: those of BERT \(.*\), T5 .* and Llama .*target_modules=\['mlp'\]"
FIRST = {"target_modules": ["0"]}


@pytest.mark.parametrize(
    ("make", "options", "match"),
    [
        *((lambda: build("bert")[0], *bad) for bad in BAD_ARGUMENTS),
        *((lambda name=name: build(name)[0], {}, KNOWN) for name in ("gpt2", "gemma2", "vit", "mamba")),
        (odd_stack, {}, r"1 of the 2 layers in 'model.layers' are of a kind .* number 1, a Qwen3DecoderLayer; "),
        (lambda: nn.Sequential(nn.Sequential(nn.ReLU())), FIRST, "'0' is an nn.Sequential, .* name its last module"),
        (lambda: nn.Sequential(nn.ReLU()), FIRST, "the size of what '0', a ReLU, gives is not known"),
        (lambda: with_adapters("llama")[0], {}, "LlamaForCausalLM has adapters already; call remove_adapters"),
        (of_adapterhub, {}, "was prepared by AdapterHub's `adapters`: call its model.add_adapter"),
    ],
)
def test_what_cannot_take_adapters_is_named_and_nothing_is_changed(make, options, match):
    model = make()
    untouched(model, lambda: add_adapters(model, **options), match)


def test_a_sparsified_model_keeps_its_modules():
    model, _ = with_adapters("bert")
    sparsify(model, BUDGET, "id3", steps=1)
    untouched(model, lambda: remove_adapters(model), "this model is sparsified: .*Call `desparsify")
    plain = sparsify(build("bert")[0], BUDGET, "id3", steps=1)
    untouched(plain, lambda: add_adapters(plain), "this model is sparsified: .*Call `desparsify")
    assert len(adapters_of(remove_adapters(desparsify(model)))) == 0


@pytest.mark.parametrize("call", [remove_adapters, lambda model: save_adapters(model, "nowhere")])
def test_a_model_without_adapters_has_none_to_give(call):
    model, _ = build("bert")
    untouched(model, lambda: call(model), "BertForSequenceClassification has no adapters; call add_adapters")


def edited(folder, change):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda c: c["config"].update(ln_before=True), "describes neither Houlsby nor Pfeiffer adapters"),
        (lambda c: c["config"].update(non_linearity="gelu"), "describes neither Houlsby nor Pfeiffer adapters"),
        (lambda c: c["config"].update(reduction_factor={"1": 8}), r"reduction_factor=\{'1': 8\}; expected a number"),
        (lambda c: c["config"].update(reduction_factor=2), r"has the shape \(4, 16\), .* needs \(8, 16\)"),
        (lambda c: c.update(name="other"), r"has no `bert.*\.other\.adapter_down\.0\.weight`, which .* needs \(near"),
        (lambda c: c.update(target_modules="mlp"), "target_modules='mlp'; expected a list of module names"),
        (lambda c: c.update(target_modules=["bert.poler"]), "has no module 'bert.poler' .near: `bert.pooler`"),
        (lambda c: c.clear(), "is no config of AdapterHub's bottleneck adapters"),
    ],
)
def test_a_folder_of_other_adapters_is_refused_before_the_model_is_changed(change, match, tmp_path):
    save_adapters(with_adapters("bert")[0], tmp_path)
    edited(tmp_path, change)
    model, _ = build("bert")
    untouched(model, lambda: load_adapters(model, tmp_path), match)


def test_weights_of_another_architecture_or_without_a_place_and_missing_files_are_refused(tmp_path):
    save_adapters(with_adapters("bert", "pfeiffer")[0], tmp_path)
    model, _ = build("llama")
    untouched(model, lambda: load_adapters(model, tmp_path), "which LlamaForCausalLM needs")
    untouched(model, lambda: load_adapters(model, tmp_path / "none"), "is no JSON .* .there is no such file")
    (tmp_path / "adapter.safetensors").write_bytes(b"no tensors")
    untouched(model, lambda: load_adapters(model, tmp_path), "cannot be read .*use_safetensors=True")
    save_adapters(with_adapters("bert", "houlsby")[0], tmp_path)
    edited(tmp_path, lambda c: c["config"].update(mh_adapter=False, original_ln_before=True, non_linearity="relu"))
    model, _ = build("bert")
    untouched(model, lambda: load_adapters(model, tmp_path), "has `bert.*attention.*`, for which .* has no place")
