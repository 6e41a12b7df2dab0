"""Plain names, and the tensors of a model under all of theirs."""

import pytest
import torch
from torch import nn

from sparsify.common.names import named_tensors, plain_name
from sparsify.errors import SparsifyError


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("encoder.0.weight", "encoder.0.weight"),
        ("module.encoder.weight", "encoder.weight"),
        ("base_model.model.model.layers.0.weight", "model.layers.0.weight"),
        ("module._orig_mod.base_model.model.weight", "weight"),
        ("encoder._orig_mod.0._orig_mod.weight", "encoder.0.weight"),
        ("module.0.auto_model.encoder.weight", "encoder.weight"),
        ("0.model.base_model.model.encoder.weight", "encoder.weight"),
        # not whole components, not in front, or the tensor's own name
        ("module_list.weight", "module_list.weight"),
        ("encoder.module.weight", "encoder.module.weight"),
        ("1.model.weight", "1.model.weight"),
        ("module", "module"),
        ("my_orig_mod.weight", "my_orig_mod.weight"),
    ],
)
def test_wrappers_prefixes_are_stripped_and_nothing_else(name, plain):
    assert plain_name(name) == plain
    assert plain_name(plain) == plain


def test_parameters_and_persistent_buffers_are_listed_and_what_is_shared_under_every_name():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.register_buffer("scratch", torch.zeros(1), persistent=False)
    model.register_buffer("absent", None)
    tensors = named_tensors(model)
    assert set(tensors) == set(model.state_dict())
    assert tensors["0.weight"] is model[0].weight
    assert tensors["1.running_mean"] is model[1].running_mean
    norm = nn.BatchNorm1d(2)
    tensors = named_tensors(nn.ModuleDict({"a": norm, "b": norm}))
    assert tensors["a.weight"] is tensors["b.weight"]
    assert tensors["a.running_var"] is tensors["b.running_var"]


def test_two_tensors_with_one_plain_name_are_an_error():
    model = nn.ModuleDict({"module": nn.Linear(2, 2)})
    model.register_parameter("weight", nn.Parameter(torch.zeros(1)))
    with pytest.raises(SparsifyError, match=r"`weight` and `module.weight` are different .* both are `weight`"):
        named_tensors(model)
