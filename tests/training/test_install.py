"""What a model is, by its class and dtype, while it is sparsified and afterwards."""

import copy
import pickle

import torch
from models import build

from sparsify import desparsify, sparsify


def test_a_short_models_dtype_is_that_of_its_own_parameters_and_not_of_the_flat_delta():
    plain, batches = build("bert", dtype=torch.bfloat16)
    kind = type(plain)
    model = sparsify(plain, 20, "id3", steps=2, modules_to_save=["classifier"])
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert (each.dtype, each.sparse_values.dtype) == (torch.bfloat16, torch.float32)
        assert isinstance(each, kind)
        assert (type(each).__module__, type(each).__qualname__) == (kind.__module__, kind.__qualname__)
        each(**batches[0]).loss.backward()
        assert each.sparse_values.grad.any()
    assert type(desparsify(model)) is kind
    assert type(sparsify(model.float(), 20, "id3", steps=2)) is kind, "whose dtype is right without"
