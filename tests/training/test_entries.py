"""The flat delta's dtype beside the model's, and what is wrong with damaged entries of a state."""

import copy
import pickle

import pytest
import torch
from models import build
from torch import nn

from sparsify import SparsifyError, sparsify
from sparsify.training.entries import BUFFERS


def write_ids(state, *ids):
    state["sparse_ids"], state["sparse_base"] = torch.tensor(ids), torch.zeros(len(ids))
    state["sparse_position"][2:4] = torch.tensor([len(ids), sum(place * id**2 for place, id in enumerate(ids, 1))])


@pytest.mark.parametrize(
    ("write", "problem"),
    [
        (lambda state: state["sparse_ids"].copy_(torch.tensor([4, 9])), "not those that were saved"),
        (lambda state: state["sparse_position"].__setitem__(2, 3), "do not agree"),
        (lambda state: state.update(sparse_base=torch.zeros(3)), "do not agree"),
        (lambda state: state.update(sparse_ids=torch.zeros(2)), "whole numbers"),
        (lambda state: state.update(sparse_position=torch.zeros(3).long()), "whole numbers"),
        (lambda state: write_ids(state, 2, 2), "the same one twice.*load another one"),
        (lambda state: write_ids(state, 2, 15), "lie beyond this model's candidates"),
        (lambda state: write_ids(state, 0, 1, 2), "more than 2 unmasked entries"),
        *((lambda state, name=name: state.pop(name), f"lacks `{name}`") for name in BUFFERS),
    ],
)
def test_entries_that_make_no_sense_are_refused_and_the_model_stays_as_it_is(write, problem):
    model = sparsify(nn.Linear(4, 3), 2, strategy="pafi")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = copy.deepcopy(before)
    write(state)
    state["weight"] += 1
    with pytest.raises(SparsifyError, match=problem):
        model.load_state_dict(state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    model.load_state_dict(before)


@pytest.mark.parametrize("part", ["", "bert.encoder"])
def test_a_short_models_dtype_is_that_of_its_own_parameters_and_not_of_the_flat_delta(part):
    model, batches = build("bert", dtype=torch.bfloat16)
    sparsify(model.get_submodule(part), 20, "id3", steps=2)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        each(**batches[0]).loss.backward()
        values = each.get_submodule(part).sparse_values
        assert values.grad.any()
        assert (each.dtype, values.dtype) == (torch.bfloat16, torch.float32)
    model.float().to(torch.float16)
    assert (model.dtype, model.get_submodule(part).sparse_values.dtype) == (torch.float16, torch.float32)
