"""Small models, fine-tunings of them, and what a model holds to the bit: shared by the tests of deltas."""

import copy
from contextlib import contextmanager

import torch
from torch import nn

from sparsify.common.names import plain_name
from sparsify.common.raw_bits import digest
from sparsify.delta.entries import InitializerRecipe
from sparsify.delta.sparse_delta import SparseDelta, TensorDelta


def make_base(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).to(dtype)


def fine_tuned(base, seed, share=0.3):
    generator = torch.Generator().manual_seed(seed)
    tuned = copy.deepcopy(base)
    for parameter in tuned.parameters():
        chosen = torch.rand(parameter.shape, generator=generator) < share
        change = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        parameter.data[chosen] += change[chosen]
    return tuned


def task(base, seed, share=0.3):
    return SparseDelta.diff(base, fine_tuned(base, seed, share), progress=False)


def set_initial(model, recipes):
    """Sets new parameters to what their recipes draw, by plain name, as versions before 0.1 did."""
    for name, parameter in model.named_parameters():
        if recipe := recipes.get(plain_name(name)):
            parameter.data.copy_(recipe.values(plain_name(name), tuple(parameter.shape), parameter.dtype))
    return model


def with_recipes(delta, recipes):
    """The delta with recipes in place of initial values, of the tensors that it stores whole."""
    drawn = {}
    for name, recipe in recipes.items():
        whole = delta.whole[name]
        initial = recipe.values(name, tuple(whole.shape), whole.dtype)
        indices = (whole != initial).flatten().nonzero().flatten()
        parts = indices, whole.take(indices), tuple(whole.shape), whole.dtype, "replace", digest(initial), recipe
        drawn[name] = TensorDelta(*parts)
    whole = {name: tensor for name, tensor in delta.whole.items() if name not in drawn}
    return SparseDelta(delta.tensors | drawn, whole, delta.config)


def lora_recipes(model):
    lora = {plain_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name}
    recipes = {name: InitializerRecipe("uniform", p.shape[1] ** -0.5, 4) for name, p in lora.items()}
    return recipes | {name: InitializerRecipe("constant", 0.0, 4) for name in lora if "lora_A" not in name}


def bits(model):
    return {name: (tensor.dtype, tensor.shape, digest(tensor)) for name, tensor in model.state_dict().items()}


@contextmanager
def unchanged(model):
    """Fails unless the model is, at the end, bit for bit what it was."""
    before = bits(model)
    yield
    assert bits(model) == before


def close(model, expected, tolerance):
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=tolerance, atol=tolerance)
