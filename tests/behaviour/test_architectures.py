"""Architectures that people fine-tune: trained as the dense oracle trains them, saved, and put on a fresh base."""

import copy
import re
import warnings

import pytest
import torch
from architectures import ARCHITECTURES, GROUPED, build
from oracle import model_gradients, padding_rows, sparsify_fully, unmasked_sets
from requirements import needs_transformers_5
from twins import Twins

from sparsify import SparseDelta, sparsify

BUDGET, STEPS = 97, 3
NOT_TRAINED = re.compile(r"(\d+) of \d+ tensors got no gradient in the first step and were not trained in it: ")

# what fails in transformers 4 without us
BROKEN_IN_4 = {
    "deberta-v2-masked-lm": needs_transformers_5("4 cannot run this head"),
    "clip": needs_transformers_5("4 makes the mask for float32 only"),
}
NAMES = [pytest.param(name, marks=BROKEN_IN_4.get(name, ())) for name in ARCHITECTURES]
every_architecture = pytest.mark.parametrize("name", NAMES)


@torch.no_grad()
def outputs(model, batch):
    return [value for value in model.eval()(**batch).values() if isinstance(value, torch.Tensor)]


def equal(left, right):
    return all(map(torch.equal, left, right))


@every_architecture
def test_id3_is_the_oracle_and_its_delta_makes_the_same_model_of_a_fresh_base(name, tmp_path):
    base, batches = build(name)
    dense, sparse = copy.deepcopy(base), copy.deepcopy(base)
    sparsify(sparse, BUDGET, "id3", steps=STEPS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Twins(dense, sparse, BUDGET, STEPS).train(batches)
    assert sum(map(len, unmasked_sets(sparse).values())) == BUDGET
    unused = sum(parameter.requires_grad and parameter.grad is None for parameter in dense.parameters())
    reported = [int(match[1]) for match in (NOT_TRAINED.match(str(warning.message)) for warning in caught) if match]
    assert reported == [unused] * (unused > 0)

    base.requires_grad_(False)  # attention picks its kernel by what requires grad, and kernels round differently
    untouched, trained = outputs(base, batches[0]), outputs(sparse, batches[0])
    SparseDelta.from_model(sparse).save(tmp_path)
    SparseDelta.load(tmp_path).apply(base)
    assert equal(outputs(base, batches[0]), trained)
    assert not equal(trained, untouched)


def assert_every_gradient_is_the_plain_models(plain, batch, tolerance):
    sparse = sparsify_fully(copy.deepcopy(plain))
    for model in (plain, sparse):
        model(**batch)["loss"].backward()
    gradients, no_candidates = model_gradients(sparse), padding_rows(plain)
    for name, parameter in plain.named_parameters():
        if parameter.requires_grad:
            expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if name in no_candidates:
                expected[no_candidates[name]] = 0
            error = (gradients[name] - expected).abs().max()
            assert error <= tolerance * expected.abs().max() + tolerance**2, (name, error, expected.abs().max())


@every_architecture
def test_every_gradient_is_the_plain_models_where_possible_with_activation_checkpointing(name):
    model, batches = build(name)
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert_every_gradient_is_the_plain_models(model, batches[0], tolerance=1e-6)


@needs_transformers_5("4 has no kernel for groups")
@pytest.mark.parametrize("name", GROUPED)
def test_experts_that_are_multiplied_in_groups_get_the_plain_models_gradients(name):
    model, batches = build(name, torch.float32)  # the kernel knows no float64
    model.set_experts_implementation("grouped_mm")
    assert_every_gradient_is_the_plain_models(model, batches[0], tolerance=1e-4)
