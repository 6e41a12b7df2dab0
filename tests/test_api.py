"""Bad input: the named error, before anything has been changed."""

import copy

import numpy as np
import pytest
import torch
from models import MLP, sparsified
from torch import nn

from sparsify import D3, SparsifyError, base_weights, desparsify, get_engine, sparsify, summary
from sparsify.api import trained_state
from sparsify.common.raw_bits import digest
from sparsify.strategies.strategy import Repeat, Strategy

ENTRIES = sum(parameter.numel() for parameter in MLP().parameters())
BATCHES = [{"x": torch.ones(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}]


def state_of(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (
        {name: (type(module), dict(vars(module)).keys()) for name, module in model.named_modules()},
        {name: (id(tensor), tensor.requires_grad, digest(tensor)) for name, tensor in tensors},
        {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
    )


# the texts about targets, schedules and strategies are in the tests of those
BAD_CALLS = [
    ({"budget": 0}, r"budget=0 entries; expected 1 to \d+"),
    ({"budget": ENTRIES + 1}, rf"budget={ENTRIES + 1} entries; expected 1 to {ENTRIES}"),
    ({"budget": 1.0}, r"budget=1\.0 is a float and so a share.*\(0, 1\)"),
    ({"budget": "320k"}, r"budget='320k' with D3.*; expected a number of entries"),
    ({"budget": None}, r"budget=None with D3.*Only bitfit and full"),
    ({"budget": None, "strategy": "full", "loss_fn": len}, r"loss_fn= are not used by 'full'"),
    ({"budget": 10, "strategy": "full"}, r"budget=10 with a strategy that trains every candidate"),
    ({"schedule": 3}, r"schedule=3; expected a name"),
    ({"seed": "x"}, r"seed='x'; expected an int"),
    ({"modules_to_save": ["hed"]}, r"modules_to_save: 'hed' matches no module"),
    ({"strategy": "fish"}, r"needs gradients before training; pass calibration="),
    ({"calibration": BATCHES}, r"calibration= and loss_fn= are not used by Strategy\(importance=D3"),
    ({"strategy": "fish", "calibration": lambda model: None}, r"the calibration gave no candidate a gradient"),
    ({"strategy": "d3-repeat", "steps": None}, r"pass steps=, or Repeat\(capacity=\.\.\.\)"),
    ({"strategy": "d3-repeat", "schedule": "cubic"}, r"takes no schedule"),
    ({"strategy": Strategy(D3(), Repeat(capacity=5))}, r"less room than the budget of 20 entries"),
    ({"strategy": {"first.weight": torch.tensor([0, 1])}}, r"budget=20 with a given set of 2 entries; pass"),
    ({"strategy": {"first.wait": torch.tensor([0])}}, r"`first\.wait`, which is no candidate .*`first\.weight`"),
    ({"strategy": {"first.weight": torch.tensor([60])}}, r"indices of `first\.weight` outside its 60 entries"),
    ({"strategy": {"first.weight": torch.tensor([0.5])}}, r"torch\.float32 for `first\.weight`; expected a bool"),
    ({"strategy": {"first.weight": torch.ones(6, 10) > 0}}, r"shape \(6, 10\), expected \(10, 6\)"),
    ({"strategy": {}}, r"the given set is empty"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_a_bad_call_says_what_is_wrong_and_changes_nothing(arguments, message):
    model = MLP()
    before = state_of(model)
    with pytest.raises(SparsifyError, match=message):
        sparsify(model, **{"budget": 20, "strategy": "id3", "steps": 5, **arguments})
    assert state_of(model) == before
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # nothing of the failed call listens to it


def test_a_model_is_sparsified_once():
    model = sparsify(MLP(), 10, "id3", steps=5)
    before = state_of(model)
    for again in (model, nn.ModuleDict({"inner": model})):
        with pytest.raises(SparsifyError, match=r"is already sparsified; call desparsify"):
            sparsify(again, 10, "id3", steps=5)
    assert state_of(model) == before


def test_data_parallel_is_refused_before_and_after():
    model = MLP()
    with pytest.raises(SparsifyError, match=r"wrapped in DataParallel.*train on one device"):
        sparsify(nn.DataParallel(model), 10, "id3", steps=5)
    sparsify(model, 10, "id3", steps=5)
    replica = copy.copy(model)
    replica._is_replica = True  # what nn.DataParallel's replicate() sets
    with pytest.raises(SparsifyError, match=r"replicated by nn\.DataParallel"):
        replica(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))


def test_a_model_that_cannot_be_sparsified_is_refused():
    own, sharded = MLP(), MLP()
    own.register_buffer("sparse_ids", torch.zeros(1))
    sharded.head.weight.ds_id = 7
    refused = {
        r"expected a torch\.nn\.Module, got dict": {},
        "TorchScript": nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))),
        r"`weight` is lazy.*run a forward pass": nn.LazyLinear(2),
        "outside of inference mode": torch.inference_mode()(lambda: nn.Linear(2, 2))(),
        "the model's own `sparse_ids`.* rename it": own,
        r"`head\.weight` is partitioned by DeepSpeed": sharded,
        r"no parameter of the model requires grad.*requires_grad_\(True\)": MLP().requires_grad_(False),
    }
    for message, model in refused.items():
        with pytest.raises(SparsifyError, match=message):
            sparsify(model, 10, "id3", steps=5)


UNSAFE = {
    r"`attention\.weight_ih_l0` cannot be masked.*\(LSTM\) reads .*exclude_modules.*freeze it": lambda: nn.LSTM(4, 4),
    r"`attention\.weight` cannot be masked.*renorm.* \(max_norm=0\.5\)": lambda: nn.Embedding(5, 4, max_norm=0.5),
    r"`attention\.weight` cannot be masked.*meta device": lambda: nn.Linear(2, 2, device="meta"),
}


@pytest.mark.parametrize("message", UNSAFE)
def test_modules_that_would_silently_go_wrong_are_refused_by_name_unless_they_are_left_out_or_frozen(message):
    model = nn.ModuleDict({"attention": UNSAFE[message](), "head": nn.Linear(2, 2)})
    before = [(type(part), [p.requires_grad for p in part.parameters()]) for part in model.modules()]
    with pytest.raises(SparsifyError, match=message):
        sparsify(model, 3, "id3", steps=5)
    assert [(type(part), [p.requires_grad for p in part.parameters()]) for part in model.modules()] == before
    frozen = copy.deepcopy(model)
    frozen["attention"].requires_grad_(False)
    sparsify(frozen, 3, "id3", steps=5)
    sparsify(model, 3, "id3", steps=5, exclude_modules=["attention"])


def test_increment_without_steps_fails_by_the_first_backward_and_can_be_told_later():
    model, batches = sparsified("mlp", 10)
    with pytest.raises(SparsifyError, match=r"number of training steps is not known.*steps="):
        model(**batches[0]).backward()
    for wrong in (0, 2.5, True):
        with pytest.raises(SparsifyError, match=f"steps={wrong}; expected the planned number"):
            get_engine(model).steps = wrong
    get_engine(model).steps = np.int64(2)
    model.state_dict()
    model(**batches[0]).backward()
    assert summary(model).unmasked == 5
    with pytest.raises(SparsifyError, match=r"begun with steps=2.*extend\(model, steps=9"):
        get_engine(model).steps = 9


@pytest.mark.parametrize("verb", [desparsify, summary, get_engine, lambda model: base_weights(model).__enter__()])
def test_verbs_on_a_plain_model_say_so(verb):
    with pytest.raises(SparsifyError, match="this MLP is not sparsified"):
        verb(MLP())


def test_random_entries_depend_on_the_seed_and_the_name_alone():
    def drawn(seed):
        model = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
        sparsify(model, 40, "random", seed=seed)
        return [sorted(model[name].indices.tolist()) for name in "ab"]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1], "equal shapes do not get equal masks"


def test_gradients_of_before_are_gone_from_what_is_frozen_then():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    before = copy.deepcopy(model)
    model(torch.randn(4, 8)).square().sum().backward()
    sparsify(model, 10, "id3", steps=2, target_modules=["0"])
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == []
    torch.optim.AdamW(model.parameters(), lr=1e-2).step()
    assert all(torch.equal(own, model.get_parameter(name)) for name, own in before.named_parameters())


def test_steps_may_be_numpys_and_a_linear_layers_input_may_be_named():
    model = sparsify(nn.Linear(8, 8), 10, "id3", steps=np.int64(3))
    model(input=torch.randn(2, 8)).sum().backward()
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    model.load_state_dict(trained_state(model))
    assert type(get_engine(model).steps) is int


def test_desparsify_inside_of_base_weights_is_refused_and_loses_nothing():
    model, batches = sparsified("mlp", 10, "random")
    model(**batches[0]).backward()
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    trained = copy.deepcopy(model.state_dict())
    with base_weights(model), pytest.raises(SparsifyError, match=r"desparsify\(\) inside base_weights\(\)"):
        desparsify(model)
    assert all(torch.equal(own, trained[name]) for name, own in model.state_dict().items())


@pytest.mark.parametrize(
    "place",
    ["core.entries.Entries.register", "training.entries.ModelEntries.remember", "training.install.groups",
     "training.install.record_settings", "training.install.place_hooks", "training.engine.Engine.start"],
)  # fmt: skip
def test_a_call_that_runs_out_of_memory_leaves_the_model_as_it_was(monkeypatch, place):
    model = MLP()
    model.first.bias.requires_grad_(False)
    before = state_of(model)

    def fail(*args, **kwargs):
        raise MemoryError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(f"sparsify.{place}", fail)
        with pytest.raises(MemoryError):
            sparsify(model, 30, "id3", steps=2, modules_to_save=["second"])
    assert state_of(model) == before
    assert get_engine(sparsify(model, 30, "id3", steps=2)).budget == 30
