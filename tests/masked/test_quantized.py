"""Linear layers over quantized weights: the oracle on the dequantized weights, and a base that is never written."""

import copy

import pytest
import torch
from models import build, loss_of, train
from oracle import unmasked_sets
from quantized_models import SCHEMES, dequantized, quantize, quantized_build
from twins import Twins, sgd

from sparsify import SparseDelta, SparsifyError, base_weights, get_engine, sparsify, summary
from sparsify.core.importance import D3
from sparsify.strategies.importance import Random
from sparsify.strategies.strategy import Increment, Prune, Strategy
from sparsify.training.summary import num_parameters

STEPS, BUDGET = 10, 97
KINDS = ["nf4-double", "int8", "torchao-int4"]  # the layers and tensors that differ for the library
ALL = ".*"  # every module's parameters, so that the oracle's candidates and ours are the same
TOLERANCE = 1e-5  # of losses and weights in float32, where the oracle's steps differ in rounding only

pytestmark = pytest.mark.filterwarnings("ignore:.*gemm_4bit.*")


def packed(model):
    """Every weight of a state dict, with its scales, as ordinary tensors."""
    return {
        key: value.clone() if type(value) is torch.Tensor else value.dequantize()
        for key, value in model.state_dict().items()
        if "sparse" not in key
    }


def sparse_llama(scheme, steps=4, trained=0):
    """A sparsified quantized model after some steps, and its batches."""
    model, batches = quantized_build("llama", scheme)
    sparsify(model, 60, "id3", steps=steps, target_modules="all-linear")
    return train(model, batches[:trained]), batches


def masked_quantized(model):
    return [tensor for tensor in get_engine(model).tensors if tensor.is_quantized]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)


@pytest.mark.parametrize(("scheme", "name", "make_optimizer"), [
    *((scheme, "llama", adamw) for scheme in SCHEMES), *((scheme, "mlp", sgd) for scheme in KINDS)
])  # fmt: skip
def test_a_quantized_base_trains_as_the_dense_oracle_does_on_the_dequantized_weights(scheme, name, make_optimizer):
    sparse, batches = quantized_build(name, scheme)
    dense = dequantized(sparse)
    sparsify(sparse, BUDGET, Strategy(D3(exp=1), Increment()), steps=STEPS, target_modules=ALL)
    twins = Twins(dense, sparse, BUDGET, STEPS, make_optimizer, tolerance=TOLERANCE, exp=1)
    twins.train(batches[:STEPS])  # which compares losses and weights, too
    assert unmasked_sets(sparse) == twins.oracle.unmasked_sets()
    assert get_engine(sparse).unmasked == BUDGET


@pytest.mark.parametrize("scheme", KINDS)
def test_the_packed_base_is_never_written_and_base_weights_runs_it_and_nothing_of_the_change(scheme):
    plain, (model, batches) = quantized_build("llama", scheme)[0], sparse_llama(scheme, trained=4)
    model.eval()
    with torch.no_grad():
        trained = model(**batches[0]).logits
        with base_weights(model):
            base = model(**batches[0]).logits
        assert torch.equal(model(**batches[0]).logits, trained)
        torch.testing.assert_close(base, dequantized(plain)(**batches[0]).logits, rtol=1e-6, atol=1e-6)
    assert not torch.equal(base, trained)
    before, after = packed(plain), packed(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    assert summary(model, verify=True).verification.ok
    assert all(not p.requires_grad and p.grad is None for p in model.parameters() if p is not model.sparse_values)


@pytest.mark.parametrize("scheme", ["nf4", "torchao-int8"])
def test_verify_notices_a_base_that_was_changed(scheme):
    model, _ = sparse_llama(scheme, trained=4)
    weight = masked_quantized(model)[0].parameter
    scales = weight.quant_state.absmax if scheme == "nf4" else weight.scale
    scales.mul_(2)
    assert summary(model, verify=True).verification.changed == (masked_quantized(model)[0].name,)


def test_scales_of_another_base_are_refused_at_load():
    model, _ = quantized_build("llama", "nf4")
    other, _ = quantized_build("llama", "nf4", seed=1)
    for one in (model, other):
        sparsify(one, 60, "id3", steps=8, target_modules="all-linear")
    with pytest.raises(RuntimeError, match="scales of a quantized base are not loaded"):
        model.load_state_dict(other.state_dict())


@pytest.mark.parametrize("scheme", KINDS)
def test_a_copy_computes_the_same_and_trains_apart(scheme):
    model, batches = sparse_llama(scheme, steps=6, trained=3)
    twin, before = copy.deepcopy(model), model(**batches[0]).logits
    assert torch.equal(twin(**batches[0]).logits, before)
    train(twin, batches[3:6])
    assert torch.equal(model(**batches[0]).logits, before)
    assert not torch.equal(twin(**batches[0]).logits, before)


def test_a_quantized_weight_is_a_candidate_only_where_it_is_named():
    model, _ = quantized_build("llama", "nf4")
    with pytest.warns(UserWarning, match=r"14 quantized weights cannot require grad.*all-linear"):
        sparsify(model, 20, "random")
    assert not masked_quantized(model)
    model, _ = quantized_build("llama", "nf4")
    sparsify(model, 20, "random", target_modules=["q_proj"])
    assert [tensor.name.split(".")[-2] for tensor in get_engine(model).tensors] == ["q_proj", "q_proj"]
    model, _ = quantized_build("llama", "nf4")
    model.requires_grad_(False)
    with pytest.raises(SparsifyError, match="Quantized weights cannot; name the layers"):
        sparsify(model, 20, "random")
    sparsify(model, 20, "random", target_modules="all-linear", exclude_modules=["mlp"])
    assert len(masked_quantized(model)) == 8


def test_shapes_and_counts_are_those_of_the_weight_that_is_meant():
    (model, _), (plain, _) = quantized_build("llama", "nf4"), build("llama")
    sparsify(model, 20, "pafi", target_modules="all-linear")
    assert all(tensor.shape == plain.get_parameter(tensor.name).shape for tensor in masked_quantized(model))
    result = summary(model)
    assert num_parameters(model) == sum(p.numel() for p in plain.parameters())
    assert result.num_candidates == sum(tensor.numel for tensor in masked_quantized(model))


def test_values_are_rounded_to_the_dtype_that_the_base_dequantizes_to():
    model, batches = build("llama", dtype=torch.bfloat16)
    quantize(model, "nf4", compute_dtype=torch.bfloat16)
    train(sparsify(model, 60, "id3", steps=4, target_modules="all-linear"), batches[:4], lr=0.1)
    tensor = max(masked_quantized(model), key=lambda tensor: tensor.count)
    assert tensor.base.dtype == tensor.weight.dtype == torch.bfloat16
    assert tensor.delta.dtype == torch.float32
    expected = (tensor.base.float() + tensor.delta).bfloat16()
    assert torch.equal(tensor.weight.take(tensor.indices), expected)


@pytest.mark.parametrize("scheme", ["nf4", "int8"])
def test_the_output_has_the_plain_layers_dtype_under_autocast(scheme):
    model, batches = quantized_build("llama", scheme)
    masked = sparsify(copy.deepcopy(model), 60, "id3", steps=4, target_modules="all-linear")
    x = torch.randn(2, 16)
    layer, plain = (m.model.layers[0].mlp.up_proj for m in (masked, model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype == (torch.float32 if scheme == "nf4" else torch.bfloat16)
        loss_of(masked, batches[0]).backward()
    assert masked.sparse_values.grad.isfinite().all()
    torch.testing.assert_close(layer(x), plain(x), rtol=1e-5, atol=1e-5)


def test_gradient_checkpointing_changes_nothing():
    expected, (model, batches) = sparse_llama("nf4", trained=4)[0], sparse_llama("nf4")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    train(model, batches[:4])
    assert unmasked_sets(model) == unmasked_sets(expected)
    assert torch.equal(model.sparse_values, expected.sparse_values)


def test_a_graph_from_before_some_steps_runs_backward_over_the_weights_that_it_was_built_with():
    model, batches = sparse_llama("nf4", steps=8, trained=3)
    tensors = [tensor for tensor in masked_quantized(model) if tensor.count]
    makers, expected = [tensor.dequantizer() for tensor in tensors], [tensor.weight for tensor in tensors]
    train(model, batches[3:8])  # unmasks more entries, which moves those of other tensors in the entries
    assert all(torch.equal(make(), weight) for make, weight in zip(makers, expected, strict=True))


def test_a_cast_that_would_round_base_values_is_refused():
    model, batches = sparse_llama("torchao-int8", trained=2)
    model.to(torch.bfloat16)
    with pytest.raises(SparsifyError, match=r"cast to torch.bfloat16 after .*\(\).*cast a quantized model before"):
        train(model, batches[2:4])
    with pytest.raises(SparsifyError, match="rounded the base values"):
        SparseDelta.from_model(model)


def test_entries_unmasked_in_a_step_that_is_skipped_run_with_their_base_values():
    model, batches = sparse_llama("nf4")
    plain = model(**batches[0]).logits
    loss_of(model, batches[0]).backward()  # unmasks, as before a step that GradScaler skips
    assert get_engine(model).unmasked == 15
    assert torch.equal(model(**batches[0]).logits, plain)


@pytest.mark.parametrize(
    ("budget", "strategy", "options", "match"),
    [
        (None, "full", {}, "is quantized and cannot be trained whole"),
        (20, "random", {"modules_to_save": ["o_proj"]}, r"o_proj` is in modules_to_save, but is quantized.*skip_mod"),
        (100, Strategy(Random(), Prune()), {}, "cannot be pruned; take another strategy"),
        (10, "fish", {"calibration": [{}]}, r"is quantized \(bitsandbytes nf4\).*calibrate by"),
    ],
)
def test_what_a_quantized_weight_cannot_do_is_refused_before_anything_changes(budget, strategy, options, match):
    model, _ = quantized_build("llama", "nf4")
    keys = list(model.state_dict())
    with pytest.raises(SparsifyError, match=match):
        sparsify(model, budget, strategy, target_modules="all-linear", **options)
    assert list(model.state_dict()) == keys


def _from_bitsandbytes(layer, **options):
    def spoil(model):
        model.first = getattr(pytest.importorskip("bitsandbytes").nn, layer)(6, 10, **options)

    return spoil


def _dynamic(model):
    quantization = pytest.importorskip("torchao.quantization")
    config = quantization.Int8DynamicActivationInt8WeightConfig()
    quantization.quantize_(model, config, lambda module, name: name == "first")


SPOILED = {
    "repacked by bits": ("nf4", lambda model: setattr(model.first.weight.quant_state, "packing_format_for_cpu", True)),
    "forward of its own.*on one device": ("nf4", lambda model: setattr(model.first, "forward", model.first.forward)),
    r"not quantized yet.*model\.to\(device\)": (None, _from_bitsandbytes("Linear4bit")),
    "has_fp16_weights=False": (None, _from_bitsandbytes("Linear8bitLt", has_fp16_weights=True)),
    "quantizes its input as well.*exclude_modules": (None, _dynamic),
}


@pytest.mark.parametrize("match", SPOILED)
def test_what_cannot_be_masked_is_refused_by_name(match):
    scheme, spoil = SPOILED[match]
    model = build("mlp")[0] if scheme is None else quantized_build("mlp", scheme)[0]
    spoil(model)
    with pytest.raises(SparsifyError, match=rf"(?s)`first\.weight` cannot be masked: the module .*{match}"):
        sparsify(model, 5, "id3", steps=1, target_modules=["first"])
