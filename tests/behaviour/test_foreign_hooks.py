"""Hooks and parametrizations that other libraries put on a model work, or are refused by name."""

import pytest
import torch
from models import build
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from twins import Twins, masks_of

from sparsify import D3, Increment, SparsifyError, Strategy, get_engine, sparsify

BUDGET, STEPS = 30, 3
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


def pair(prepare=lambda model: None):
    """The same model twice, and batches; no copies, which old-style reparametrized modules do not allow."""
    (one, batches), (other, _) = (build("mlp", dtype=torch.float64) for _ in range(2))
    for model in (one, other):
        torch.manual_seed(0)
        prepare(model)
    return one, other, batches


def forward_hooks(module, seen):
    module.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    module.register_forward_pre_hook(lambda module, args, kwargs: (args, kwargs), with_kwargs=True)
    module.register_forward_hook(lambda module, args, output: output + 1)
    module.register_forward_hook(lambda module, args, output: seen.append(output.detach()), always_call=True)


def backward_hooks(module, seen):
    module.register_full_backward_pre_hook(lambda module, grad_output: (3 * grad_output[0],))
    module.register_full_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0]))


def old_backward_hook(module, seen):
    module.register_backward_hook(lambda module, grad_input, grad_output: seen.append(grad_output[0]))


def hook_that_scales(module, seen):
    module.register_full_backward_hook(lambda module, grad_input, grad_output: (2 * grad_input[0],))
    seen.append(torch.zeros(1))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("place", [forward_hooks, backward_hooks, old_backward_hook, hook_that_scales])
@pytest.mark.parametrize("part", ["norm", "second"])
def test_hooks_see_and_change_what_they_did(part, place, when):
    sparse, dense, batches = pair()
    seen = [], []
    place(dense.get_submodule(part), seen[1])
    if when == "before":
        place(sparse.get_submodule(part), seen[0])
    sparsify(sparse, BUDGET, "pafi")
    if when == "after":
        place(sparse.get_submodule(part), seen[0])
    Twins(dense, sparse, BUDGET, STEPS, masks=masks_of(sparse)).train(batches[:1])
    assert seen[1]
    torch.testing.assert_close(seen[0], seen[1])


REPARAMETRIZATIONS = {
    "parametrizations.weight_norm": lambda model: parametrizations.weight_norm(model.second),
    "parametrizations.spectral_norm": lambda model: parametrizations.spectral_norm(model.second),
    "parametrizations.orthogonal": lambda model: parametrizations.orthogonal(model.second),
    "a parametrization": lambda model: parametrize.register_parametrization(model.norm, "weight", nn.Softplus()),
    "weight_norm": lambda model: nn.utils.weight_norm(model.second),
    "pruning": lambda model: prune.l1_unstructured(model.second, "weight", amount=0.3),
}


@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_a_reparametrized_model_is_the_oracle(name):
    sparse, dense, batches = pair(REPARAMETRIZATIONS[name])
    sparsify(sparse, BUDGET, "id3", steps=STEPS)
    Twins(dense, sparse, BUDGET, STEPS).train(batches[:STEPS])


@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_a_model_reparametrized_after_it_was_sparsified_is_refused_by_name(name):
    model, _, _ = pair()
    sparsify(model, BUDGET, "id3", steps=STEPS)
    with pytest.raises(SparsifyError, match=r"`(second|norm)\.weight` was taken from its module .*before sparsify\(\)"):
        REPARAMETRIZATIONS[name](model)


@pytest.mark.parametrize("name", REPARAMETRIZATIONS)
def test_a_method_other_than_the_roots_call_has_the_same_gradient(name):
    model, _, batches = pair(REPARAMETRIZATIONS[name])
    sparsify(model, sum(own.numel() for own in model.parameters()) - 6, Strategy(D3(exp=0), Increment()), steps=1)
    gradients = []
    for call in (model, model.forward):
        torch.manual_seed(0)
        model.zero_grad()
        call(**batches[0]).backward()
        gradients.append({t.name: model.sparse_values.grad[t.slots].sort().values for t in get_engine(model).tensors})
    torch.testing.assert_close(*gradients)
