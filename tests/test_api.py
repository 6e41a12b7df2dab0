"""Bad input: the named error, before anything has been changed."""

import copy

import pytest
import torch
from models import MLP, build
from torch import nn

from sparsify import (
    D3,
    Magnitude,
    Repeat,
    Schedule,
    SparsifyError,
    Static,
    Strategy,
    base_weights,
    desparsify,
    get_engine,
    sparsify,
    summary,
)

ENTRIES = sum(parameter.numel() for parameter in MLP().parameters())
BATCHES = [{"x": torch.ones(4, 6), "labels": torch.zeros(4, dtype=torch.int64)}]


def state_of(model):
    """Everything about a model that a call may change."""
    return (
        {name: (type(module), dict(vars(module)).keys()) for name, module in model.named_modules()},
        {name: (id(p), p.requires_grad, p.detach().clone()) for name, p in model.named_parameters()},
        {name: buffer.clone() for name, buffer in model.named_buffers()},
        {name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in model.named_modules()},
    )


def assert_unchanged(model, before):
    modules, parameters, buffers, hooks = state_of(model)
    assert modules == before[0]
    assert parameters.keys() == before[1].keys()
    for name, (identity, requires_grad, values) in parameters.items():
        assert (identity, requires_grad) == before[1][name][:2]
        assert torch.equal(values, before[1][name][2])
    assert buffers.keys() == before[2].keys()
    assert hooks == before[3]


# the texts about targets, schedules and strategies are in the tests of those
BAD_CALLS = [
    ({"budget": 0}, r"budget=0 entries; expected 1 to \d+"),
    ({"budget": ENTRIES + 1}, rf"budget={ENTRIES + 1} entries; expected 1 to {ENTRIES}"),
    ({"budget": 1.0}, r"budget=1\.0 is a float and so a share.*\(0, 1\)"),
    ({"budget": True}, r"budget=True with D3.*; expected a number of entries"),
    ({"budget": "320k"}, r"budget='320k' with D3.*; expected a number of entries"),
    ({"budget": None}, r"budget=None with D3.*Only bitfit and full"),
    ({"budget": None, "strategy": "full", "loss_fn": len}, r"loss_fn= are not used by strategy 'full'"),
    ({"budget": 10, "strategy": "full"}, r"budget=10 with a strategy that trains every candidate"),
    ({"schedule": 3}, r"schedule=3; expected a name"),
    ({"steps": 2.5}, r"steps=2\.5; expected"),
    ({"modules_to_save": ["hed"]}, r"modules_to_save: 'hed' matches no module"),
    ({"target_modules": ["head"], "exclude_modules": ["head"]}, r"no trainable parameter is left"),
    ({"strategy": "fish"}, r"chooses by gradients before training; pass calibration="),
    ({"calibration": BATCHES}, r"calibration= and loss_fn= are not used by D3"),
    ({"strategy": "pafi", "loss_fn": len}, r"calibration= and loss_fn= are not used by Magnitude"),
    ({"strategy": "fish", "calibration": lambda model: None}, r"the calibration gave no candidate a gradient"),
    ({"strategy": "d3-repeat", "steps": None}, r"pass steps= .*, or Repeat\(capacity=\.\.\.\)"),
    ({"strategy": "d3-repeat", "schedule": "cubic"}, r"takes no schedule"),
    ({"strategy": Strategy(D3(), Repeat(capacity=5))}, r"less room than the budget of 20 entries"),
    ({"strategy": {"first.weight": torch.tensor([0, 1])}}, r"budget=20 with a given set of 2 entries; pass"),
    ({"strategy": {"first.wait": torch.tensor([0])}}, r"`first\.wait`, which is no candidate .*`first\.weight`"),
    ({"strategy": {"first.weight": torch.tensor([60])}}, r"indices of `first\.weight` outside its 60 entries"),
    ({"strategy": {"first.weight": torch.tensor([-1])}}, r"indices of `first\.weight` outside its 60 entries"),
    ({"strategy": {"first.weight": torch.tensor([0.5])}}, r"torch\.float32 for `first\.weight`; expected a bool"),
    ({"strategy": {"first.weight": torch.ones(6, 10) > 0}}, r"shape \(6, 10\), expected \(10, 6\)"),
    ({"strategy": {}}, r"the given set is empty"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_CALLS)
def test_a_bad_call_says_what_is_wrong_and_changes_nothing(arguments, message):
    model = MLP()
    before = state_of(model)
    with pytest.raises(SparsifyError, match=message):
        sparsify(model, **{"budget": 20, "steps": 5, **arguments})
    assert_unchanged(model, before)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())
    torch.optim.SGD(model.parameters(), lr=0.1).step()  # nothing of the failed call listens to it


def test_a_model_with_nothing_trainable_is_refused():
    model = MLP().requires_grad_(False)
    before = state_of(model)
    with pytest.raises(SparsifyError, match=r"no parameter of the model requires grad.*requires_grad_\(True\)"):
        sparsify(model, 10, steps=5)
    assert_unchanged(model, before)


def test_a_model_is_sparsified_once():
    model = sparsify(MLP(), 10, steps=5)
    before = state_of(model)
    for again in (model, nn.ModuleDict({"inner": model})):
        with pytest.raises(SparsifyError, match=r"is already sparsified; call desparsify"):
            sparsify(again, 10, steps=5)
    assert_unchanged(model, before)


def test_data_parallel_is_refused_before_and_after():
    model = MLP()
    with pytest.raises(SparsifyError, match=r"wrapped in DataParallel.*train on one device"):
        sparsify(nn.DataParallel(model), 10, steps=5)
    sparsify(model, 10, steps=5)
    replica = copy.copy(model)
    replica._is_replica = True  # what nn.DataParallel's replicate() sets
    with pytest.raises(SparsifyError, match=r"replicated by nn\.DataParallel"):
        replica(torch.randn(2, 6), torch.zeros(2, dtype=torch.long))


def test_deepspeed_zero_3_is_refused():
    model = MLP()
    model.head.weight.ds_id = 7
    with pytest.raises(SparsifyError, match=r"`head\.weight` is partitioned by DeepSpeed"):
        sparsify(model, 10, steps=5)


def test_what_is_no_plain_module_is_refused():
    with pytest.raises(SparsifyError, match=r"expected a torch\.nn\.Module, got dict"):
        sparsify({}, 10)
    with pytest.raises(SparsifyError, match="TorchScript"):
        sparsify(torch.jit.script(nn.Linear(2, 2)), 1)
    model = MLP()
    model.register_buffer("sparse_ids", torch.zeros(1))
    with pytest.raises(SparsifyError, match="the MLP has a `sparse_ids` of its own"):
        sparsify(model, 10, steps=5)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (
            lambda: nn.LSTM(4, 4),
            r"`attention\.weight_ih_l0` cannot be masked.*\(LSTM\) reads .*exclude_modules.*freeze it",
        ),
        (lambda: nn.Embedding(5, 4, max_norm=0.5), r"`attention\.weight` cannot be masked.*renorm.* \(max_norm=0\.5\)"),
        (lambda: nn.Linear(2, 2, device="meta"), r"`attention\.weight` cannot be masked.*meta device"),
    ],
)
def test_modules_that_would_silently_go_wrong_are_refused_by_name_unless_they_are_left_out_or_frozen(module, name):
    model = nn.ModuleDict({"attention": module(), "head": nn.Linear(2, 2)})
    classes = [type(part) for part in model.modules()]
    with pytest.raises(SparsifyError, match=name):
        sparsify(model, 3, steps=5)
    assert [type(part) for part in model.modules()] == classes
    assert all(parameter.requires_grad for parameter in model.parameters())
    frozen = copy.deepcopy(model)
    frozen["attention"].requires_grad_(False)
    sparsify(frozen, 3, steps=5)
    sparsify(model, 3, steps=5, exclude_modules=["attention"])


def test_increment_without_steps_fails_by_the_first_backward_and_can_be_told_later():
    model, batches = build("mlp")
    sparsify(model, 10)
    with pytest.raises(SparsifyError, match=r"number of training steps is not known.*steps="):
        model(**batches[0]).backward()
    get_engine(model).steps = 2
    model(**batches[0]).backward()
    assert summary(model).unmasked == 5


@pytest.mark.parametrize("verb", [desparsify, summary, get_engine, lambda model: base_weights(model).__enter__()])
def test_verbs_on_a_plain_model_say_so(verb):
    with pytest.raises(SparsifyError, match="this MLP is not sparsified"):
        verb(MLP())


def test_desparsify_restores_what_required_grad():
    model = MLP()
    model.first.requires_grad_(False)
    sparsify(model, 10, Strategy(Magnitude(), Static()), schedule=Schedule("cubic", every=2))
    assert summary(model).unmasked == 10
    assert not any(tensor.name.startswith("first") for tensor in get_engine(model).tensors)
    desparsify(model)
    assert not model.first.weight.requires_grad
    assert model.head.weight.requires_grad


def test_random_entries_depend_on_the_seed_and_the_name_alone():
    def drawn(seed):
        model = nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)})
        sparsify(model, 40, "random", seed=seed)
        return [sorted(model[name].indices.tolist()) for name in "ab"]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1], "equal shapes do not get equal masks"
