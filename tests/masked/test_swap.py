"""Swapping in place: identity, hooks, aliases and class stay or come back; what cannot work is refused by name."""

import pytest
import torch
from recorder import mask
from torch import nn
from transformers.pytorch_utils import Conv1D

from sparsify import (
    MaskedEmbedding,
    MaskedLinear,
    SparsifyError,
    desparsify,
    get_unmasker,
    optimizer_stepped,
    sparsify,
    summary,
)
from sparsify.masked.conv1d import MaskedConv1D
from sparsify.masked.generic import MaskedParameterList
from sparsify.masked.swap import check_maskable, frozen_row, unswap

DIM = 4


class OwnLinear(nn.Linear):
    pass


MODULES = {
    "Linear": (lambda: nn.Linear(DIM, 3), MaskedLinear),
    "Conv1D": (lambda: Conv1D(3, DIM), MaskedConv1D),
    "Embedding": (lambda: nn.Embedding(6, DIM), MaskedEmbedding),
    "Embedding by frequency": (lambda: nn.Embedding(6, DIM, scale_grad_by_freq=True), nn.Embedding),
    "LayerNorm": (lambda: nn.LayerNorm(DIM), nn.LayerNorm),
    "subclass": (lambda: OwnLinear(DIM, 3), OwnLinear),
}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(params=MODULES)
def case(request):
    make, masked_class = MODULES[request.param]
    return make(), masked_class


def an_input(module):
    return torch.tensor([1, 2]) if isinstance(module, nn.Embedding) else torch.randn(2, DIM)


def test_a_swapped_module_has_its_masked_class_and_is_still_what_it_was(case):
    module, masked_class = case
    plain_class, parameters = type(module), dict(module.named_parameters())
    mask(module)
    assert type(module) is masked_class
    assert isinstance(module, plain_class)
    assert all(module.get_parameter(name) is parameter for name, parameter in parameters.items())


def test_unswapping_gives_the_exact_class_back_and_leaves_nothing_behind(case):
    module, _ = case
    plain_class, attributes = type(module), set(module.__dict__)
    hooks = len(module._forward_pre_hooks), len(module._forward_hooks), len(module._forward_hooks_always_called)
    x = an_input(module)
    expected = module(x)
    mask(module)
    module(x)
    unswap(module)
    assert type(module) is plain_class
    assert set(module.__dict__) == attributes
    assert hooks == (
        len(module._forward_pre_hooks),
        len(module._forward_hooks),
        len(module._forward_hooks_always_called),
    )
    assert torch.equal(module(x), expected)


def test_unswapping_a_plain_module_changes_nothing(case):
    module, _ = case
    before = dict(module.__dict__)
    unswap(module)
    assert module.__dict__ == before


def test_hooks_still_run_and_see_what_they_saw(case):
    module, _ = case
    x = an_input(module)
    expected, calls = module(x).detach(), []
    module.register_forward_pre_hook(lambda m, args: calls.append(("before", m)))
    module.register_forward_hook(lambda m, args, output: calls.append(("after", output)))
    mask(module)
    module(x)
    (before, seen_module), (after, output) = calls
    assert (before, after) == ("before", "after")
    assert seen_module is module
    assert torch.equal(output, expected)


def test_identity_and_aliases_stay_in_a_whole_model():
    shared = nn.Linear(DIM, DIM)
    model = nn.ModuleDict({"a": shared, "b": shared, "norm": nn.LayerNorm(DIM), "table": nn.Embedding(5, DIM)})
    modules = dict(model.named_modules(remove_duplicate=False))
    sparsify(model, 5, steps=1)
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert model["a"] is model["b"]
    assert type(model["a"]) is MaskedLinear
    desparsify(model)
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert [type(module) for module in modules.values()] == [
        nn.ModuleDict,
        nn.Linear,
        nn.Linear,
        nn.LayerNorm,
        nn.Embedding,
    ]


def test_a_root_that_is_itself_a_layer_is_swapped_in_place():
    model = nn.Linear(DIM, 3)
    assert sparsify(model, 5, steps=1) is model
    assert type(model) is MaskedLinear
    assert type(desparsify(model)) is nn.Linear


def test_a_list_of_parameters_is_swapped_in_place():
    model = nn.Sequential(nn.ParameterList([torch.randn(DIM), torch.randn(DIM)]))
    parameters = list(model.parameters())
    sparsify(model, 5, "random")
    assert type(model[0]) is MaskedParameterList
    assert [id(parameter) for parameter in model[0][:]] == [id(parameter) for parameter in parameters]
    model[0].append(torch.zeros(DIM))
    assert type(model[0][2]) is nn.Parameter
    desparsify(model)
    assert type(model[0]) is nn.ParameterList


def test_a_parameter_that_the_model_gives_up_is_plain_if_it_comes_back():
    model = nn.Sequential(nn.ParameterDict({"a": torch.randn(DIM), "b": torch.randn(DIM)}))
    sparsify(model, 2 * DIM, "random")
    given_up = model[0]["a"]
    del model[0]["a"]
    model[0]["a"] = torch.ones(DIM)
    model.sparse_values.data += 1
    optimizer_stepped(model)
    assert torch.equal(model[0]["a"], torch.ones(DIM))
    assert [tensor.parameter for tensor in get_unmasker(model).tensors] == [given_up, model[0]["b"]]
    assert summary(model, verify=True).verification.unmasked == 2 * DIM


def test_only_an_embeddings_padding_row_is_frozen():
    assert frozen_row(nn.Embedding(5, DIM, padding_idx=3)) == 3
    assert frozen_row(nn.Embedding(5, DIM, padding_idx=-1)) == 4
    assert frozen_row(nn.Embedding(5, DIM)) is None
    assert frozen_row(nn.Linear(5, DIM)) is None


def with_hook(kind):
    layer = nn.Linear(DIM, 3)
    register = layer.bias.register_hook if kind == "gradient" else layer.bias.register_post_accumulate_grad_hook
    register(lambda gradient: None)
    return layer


REFUSED = {
    "LSTM": (lambda: nn.LSTM(DIM, 3), r"`part\.weight_ih_l0` cannot be masked: the module \(LSTM\) reads its weights"),
    "GRU": (lambda: nn.GRU(DIM, 3), r"`part\.weight_ih_l0` cannot be masked: the module \(GRU\) reads its weights"),
    "gradient hook": (
        lambda: with_hook("gradient"),
        r"`part\.bias` .*\(Linear\) has a gradient hook on it, which would never run: .*freeze it first",
    ),
    "accumulation hook": (lambda: with_hook("accumulation"), r"`part\.bias` .*\(Linear\) has a gradient hook on it"),
    "renormalised table": (
        lambda: nn.Embedding(5, DIM, max_norm=0.5),
        r"`part\.weight` .*\(Embedding\) renormalises its table in forward \(max_norm=0\.5\)",
    ),
    "renormalised bag": (
        lambda: nn.EmbeddingBag(5, DIM, max_norm=0.5),
        r"`part\.weight` .*\(EmbeddingBag\) renormalises its table in forward \(max_norm=0\.5\)",
    ),
    "meta device": (
        lambda: nn.Linear(DIM, 3, device="meta"),
        r"`part\.weight` .*on the meta device .*load its weights onto a device before",
    ),
}


def snapshot(model):
    """All that the modules hold, one level deep: parameters, buffers, hooks, attributes."""
    return {
        name: (type(module), {k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()})
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_silently_go_wrong_is_refused_by_name_before_anything_changes(name):
    make, text = REFUSED[name]
    model = nn.ModuleDict({"first": nn.Linear(DIM, DIM), "part": make()})
    before = snapshot(model)
    with pytest.raises(SparsifyError, match=text):
        sparsify(model, 4, steps=1)
    assert snapshot(model) == before
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("name", ["LSTM", "gradient hook"])
def test_the_remedy_that_the_error_names_works(name):
    model = nn.ModuleDict({"first": nn.Linear(DIM, DIM), "part": REFUSED[name][0]()})
    sparsify(model, 4, steps=1, exclude_modules=["part"])


def test_freezing_first_works_too():
    model = nn.ModuleDict({"first": nn.Linear(DIM, DIM), "part": nn.LSTM(DIM, 3).requires_grad_(False)})
    sparsify(model, 4, steps=1)


def test_the_root_has_a_name_in_errors_too():
    with pytest.raises(SparsifyError, match=r"`\(root\)\.weight` cannot be masked"):
        check_maskable("", nn.Embedding(5, DIM, max_norm=0.5), "weight")
