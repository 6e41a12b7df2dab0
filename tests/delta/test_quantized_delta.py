"""Deltas of a quantized base: on that base, on it dequantized, and on the weights that it was made from."""

import copy
import pickle
import warnings
from functools import cache

import pytest
import torch
from models import build, train
from quantized_models import SCHEMES, dequantized, quantized_build
from safetensors.torch import load_file

from sparsify import BaseMismatchError, SparseDelta, SparsifyError, desparsify, overlap, sparsify
from sparsify.common.quantized import is_quantized
from sparsify.delta.quantized_delta import has_quantized_delta

BUDGET = 60
# applied, a delta adds to a layer's output what training added to its weight: the two differ in rounding only
ROUNDING = {"rtol": 1e-5, "atol": 1e-5}


@cache
def training(scheme, seed):
    base, batches = quantized_build("llama", scheme)
    model = sparsify(copy.deepcopy(base), BUDGET, "id3", steps=4, target_modules="all-linear")
    train(model, batches[4 * seed : 4 * seed + 4])
    return base, model, SparseDelta.from_model(model), batches[0]


def trained(scheme, seed=0):
    return copy.deepcopy(training(scheme, seed))


def logits(model, batch):
    """As in training mode: in evaluation bitsandbytes rounds scales (4-bit, some CPUs) or inputs (8-bit)."""
    with torch.no_grad():
        return model(**batch).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_differences_that_go_onto_the_quantized_base_and_off_again(scheme, tmp_path):
    base, model, delta, batch = trained(scheme)
    assert {part.kind for part in delta.tensors.values()} == {"add"}
    assert {part.values.dtype for part in delta.tensors.values()} == {torch.float32}
    library = "torchao" if scheme.startswith("torchao") else "bitsandbytes"
    assert all(part.quantization.startswith(library) for part in delta.tensors.values())
    assert delta.num_entries == BUDGET
    delta.save(tmp_path)
    assert SparseDelta.load(tmp_path) == delta
    before, names = logits(base, batch), list(base.state_dict())
    delta.apply(base)
    torch.testing.assert_close(logits(base, batch), logits(model, batch), **ROUNDING)
    assert list(base.state_dict()) == names
    assert sum(has_quantized_delta(module) for module in base.modules()) == len(delta.tensors)
    delta.revert(base)
    assert torch.equal(logits(base, batch), before)
    assert not any(has_quantized_delta(module) or module._forward_hooks for module in base.modules())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_goes_onto_the_dequantized_base_exactly_and_checked(scheme):
    base, model, delta, batch = trained(scheme)
    dense = dequantized(base)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not delta.check(dense).unchecked
        delta.apply(dense)
    assert torch.equal(logits(dense, batch), logits(desparsify(model, dequantize=True), batch))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_added_to_the_weights_from_before_with_a_warning(scheme, tmp_path):
    _, _, delta, _ = trained(scheme)
    plain, _ = build("llama")
    before = {name: parameter.detach().clone() for name, parameter in plain.named_parameters()}
    with pytest.warns(UserWarning, match="if all is well the weights from before they were quantized"):
        delta.apply(plain)
    for name, part in delta.tensors.items():
        now = plain.get_parameter(name).detach().take(part.indices)
        assert torch.equal(now, before[name].take(part.indices) + part.values)
    delta.revert(plain)
    assert all(torch.equal(parameter, before[name]) for name, parameter in plain.named_parameters())
    plain.save_pretrained(tmp_path / "base")
    with pytest.warns(UserWarning, match="the checkpoint holds other values"):
        report = delta.check(tmp_path / "base")
    with pytest.warns(UserWarning, match="the checkpoint holds other values"):
        delta.merge(tmp_path / "base", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, part in delta.tensors.items():
        assert torch.equal(merged[name].take(part.indices), before[name].take(part.indices) + part.values)
    assert report.unchecked == tuple(delta.tensors)
    assert "not quantized as then" in str(report)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_another_base_or_one_quantized_otherwise_is_refused_and_left_alone(scheme):
    _, _, delta, batch = trained(scheme)
    others = [quantized_build("llama", scheme, seed=1)[0]]
    if scheme == "nf4":
        others.append(quantized_build("llama", "fp4")[0])
    for other in others:
        before = logits(other, batch)
        with pytest.raises(BaseMismatchError, match="does not hold the values that the delta was trained on"):
            delta.apply(other)
        assert torch.equal(logits(other, batch), before)


@pytest.mark.parametrize("kind", ["replace", "add"])
def test_a_sum_of_deltas_meets_a_quantized_base(kind):
    base, first, one, batch = trained("nf4")
    _, _, two, _ = trained("nf4", seed=1)
    before = logits(base, batch)
    both = (one + two).on(base, kind)
    assert {part.quantization for part in both.tensors.values()} == {"bitsandbytes nf4"}
    with (one + two - two).applied(base):
        torch.testing.assert_close(logits(base, batch), logits(first, batch), **ROUNDING)
    with both.applied(base):
        together = logits(base, batch)
    dense = dequantized(base)
    with (one + two).applied(dense):
        torch.testing.assert_close(together, logits(dense, batch), **ROUNDING)
    assert torch.equal(logits(base, batch), before)
    assert str(overlap(one, two, base)) == str(overlap(one, two, dense))


def test_a_quantized_delta_is_copied_with_the_model_and_lets_gradients_through():
    base, model, delta, batch = trained("torchao-int8")
    delta.apply(base)
    twin = copy.deepcopy(base)
    assert torch.equal(logits(twin, batch), logits(base, batch))
    losses = []
    for one in (base, model):
        embeddings = one.model.embed_tokens(batch["input_ids"]).detach().requires_grad_(True)
        one(inputs_embeds=embeddings, labels=batch["labels"]).loss.backward()
        losses.append(embeddings.grad)
    torch.testing.assert_close(*losses, **ROUNDING)


def test_a_quantized_base_with_a_delta_on_it_is_pickled_with_the_delta():
    base, _, delta, batch = trained("nf4")
    delta.apply(base)
    assert torch.equal(logits(pickle.loads(pickle.dumps(base)), batch), logits(base, batch))


def test_a_base_with_a_delta_on_it_is_not_sparsified_and_it_comes_off_after_bitsandbytes_has_repacked_the_base():
    base, _, delta, _ = trained("nf4")
    delta.apply(base)
    with pytest.raises(SparsifyError, match=r"has a delta applied to it; revert it before sparsify\(\)"):
        sparsify(base, 5, "id3", steps=1, target_modules="all-linear")
    for module in base.modules():
        if is_quantized(module._parameters.get("weight")):
            module.weight.quant_state.packing_format_for_cpu = True
    delta.revert(base)
    with pytest.raises(BaseMismatchError, match=r"repacked by bitsandbytes.*dequantized, or was never quantized"):
        delta.apply(base)
