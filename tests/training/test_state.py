"""Trained states: they go onto a fresh base, without the frozen weights, and training goes on bit for bit."""

import copy
import io
import re
import warnings
from contextlib import nullcontext

import pytest
import torch
from deltas import bits, unchanged
from models import Extended, build
from models import run_steps as run
from oracle import unmasked_sets
from safetensors.torch import load_file, save_file
from torch import nn

from sparsify import BaseMismatchError, SparseDelta, SparsifyError, base_weights, desparsify, sparsify
from sparsify.api import get_engine, summary, trained_state
from sparsify.strategies.importance import Magnitude, Random
from sparsify.strategies.strategy import Increment, Strategy
from sparsify.training.plan import STATE

BUDGET, STEPS = 40, 8
STRATEGIES = ["id3", "pafi", "random", "d3-repeat", *(Strategy(each, Increment()) for each in (Magnitude(), Random()))]


def by_safetensors(model, path):
    save_file(trained_state(model), path)
    return load_file(path)


def whole_by_torch(model, path):
    torch.save(model.state_dict(), path)
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize(("name", "strategy"), [*(("mlp", each) for each in STRATEGIES), ("gpt2", "id3")], ids=str)
@pytest.mark.parametrize("kept", [by_safetensors, whole_by_torch])
def test_training_goes_on_from_the_trained_state_bit_for_bit(kept, name, strategy, tmp_path):
    plain, batches = build(name)
    options = {"modules_to_save": ["head"]} if name == "mlp" else {}
    straight = sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=STEPS, **options)
    _, optimizer = run(straight, batches[:3])
    state, moments = kept(straight, tmp_path / "state"), copy.deepcopy(optimizer.state_dict())
    losses, _ = run(straight, batches[3:STEPS], optimizer)

    resumed = sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=STEPS, **options)
    resumed.load_state_dict(state)  # strict
    _, optimizer = run(resumed, [])
    optimizer.load_state_dict(moments)
    assert run(resumed, batches[3:STEPS], optimizer)[0] == losses
    assert unmasked_sets(resumed) == unmasked_sets(straight)
    assert summary(resumed).updates == summary(straight).updates
    assert bits(resumed) == bits(straight)


@pytest.mark.parametrize("kept", [trained_state, nn.Module.state_dict])
def test_a_state_that_is_assigned_keeps_long_indices(kept):
    plain, batches = build("mlp")
    straight, resumed = (sparsify(copy.deepcopy(plain), BUDGET, "id3", steps=STEPS) for _ in range(2))
    run(straight, batches[:2])
    resumed.load_state_dict(copy.deepcopy(kept(straight)), assign=True)
    assert run(resumed, batches[2:3])[0] == run(straight, batches[2:3])[0]
    assert bits(resumed) == bits(straight)


def test_the_trained_state_is_a_few_bytes_an_unmasked_entry():
    model = sparsify(nn.Linear(200, 200), 20_000, "id3", steps=20)
    model(torch.ones(2, 200)).square().sum().backward()
    state, file = trained_state(model), io.BytesIO()
    assert state.keys() == set(STATE)
    size = 20_000 * 4 + 1_000 * (4 + 4) + 8 * 4 + 1024  # the flat delta, entries, position and settings
    assert sum(tensor.nbytes for tensor in state.values()) == size
    torch.save(state, file)
    assert file.tell() < size + 5_000
    assert model.sparse_ids.dtype == torch.int64  # of the model itself
    model.load_state_dict(state)
    assert model.sparse_ids.dtype == torch.int64


def test_what_the_base_does_not_have_is_in_the_trained_state():
    batches = build("mlp")[1]
    torch.manual_seed(0)
    model = sparsify(Extended(), 20, "id3", steps=4, modules_to_save=["head"], fresh_modules=["adapter"])
    run(model, batches[:2])
    whole = {f"{module}.{kind}" for module in ("adapter", "head") for kind in ("weight", "bias")}
    changed = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert trained_state(model).keys() == {*STATE, *whole, *changed}
    torch.manual_seed(0)
    base = Extended()
    nn.init.zeros_(base.adapter.weight)  # drawn otherwise
    other = sparsify(base, 20, "id3", steps=4, modules_to_save=["head"], fresh_modules=["adapter"])
    other.load_state_dict(trained_state(model))
    assert bits(other) == bits(model)


def test_a_trained_state_without_what_a_hook_renames_is_refused():
    model = sparsify(build("mlp")[0], 20, "id3", steps=4, modules_to_save=["second"])
    handle = model.register_state_dict_post_hook(lambda _, state, *__: state.update(w=state.pop("second.weight")))
    with pytest.raises(SparsifyError, match=r"`second.weight` is not in the model's state dict: a hook renames it"):
        trained_state(model)
    handle.remove()
    assert "second.weight" in trained_state(model)


def test_a_tied_dense_weight_is_there_once(tmp_path):
    tied = nn.ModuleDict({"embed": nn.Embedding(9, 4), "middle": nn.Linear(4, 4), "head": nn.Linear(4, 9, bias=False)})
    tied["head"].weight = tied["embed"].weight
    model = sparsify(tied, 5, "pafi", modules_to_save=["embed"])
    state = trained_state(model)
    assert len({"embed.weight", "head.weight"} & state.keys()) == 1
    save_file(state, tmp_path / "state")
    assert not model.load_state_dict(load_file(tmp_path / "state")).unexpected_keys


def test_a_model_that_holds_the_sparsified_one_is_kept_but_for_the_frozen_weights():
    whole = nn.ModuleDict({"module": build("mlp")[0], "value_head": nn.Linear(8, 1)})
    sparsify(whole["module"], 20, "pafi")
    state = trained_state(whole)
    assert state.keys() == {*(f"module.{name}" for name in STATE), "value_head.weight", "value_head.bias"}
    whole.load_state_dict(state)


@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_another_base_are_refused_and_nothing_is_loaded(nested):
    models = [sparsify(build("mlp", seed=seed)[0], 20, "id3", steps=4) for seed in (0, 1)]
    for model in models:
        run(model, build("mlp")[1][:2])
    first, second = ([nn.ModuleDict({"inner": model}) for model in models]) if nested else models
    message = "has other pretrained values than the model that this checkpoint"
    with unchanged(models[1]), pytest.raises(BaseMismatchError, match=message):
        second.load_state_dict(trained_state(first))
    run(models[1], build("mlp")[1][2:4])


def test_a_model_in_another_dtype_is_refused_unless_its_values_are_the_same():
    plain = build("mlp")[0]
    model = sparsify(copy.deepcopy(plain).bfloat16(), 20, "random")
    state = trained_state(model)
    sparsify(copy.deepcopy(plain).bfloat16().float(), 20, "random").load_state_dict(state)
    with pytest.raises(BaseMismatchError, match="in the same dtype"):
        sparsify(plain, 20, "random").load_state_dict(state)


def test_a_part_of_a_state_dict_is_no_trained_state():
    model = sparsify(build("mlp")[0], 20, "pafi", modules_to_save=["head"])
    for state, name in ((dict(model.state_dict()), "first.weight"), (trained_state(model), "head.weight")):
        del state[name]
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            model.load_state_dict(state)


def test_save_pretrained_says_that_it_writes_no_delta(tmp_path):
    model = sparsify(build("bert")[0], 20, "id3", steps=2)
    with pytest.warns(UserWarning, match=r"merged model, .* and no delta: SparseDelta.from_model\(model\)") as shown:
        model.save_pretrained(tmp_path)
    assert [warning.filename for warning in shown] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.state_dict()
        torch.save(trained_state(model), tmp_path / "state")
        desparsify(model).save_pretrained(tmp_path)


class Parts(nn.Module):
    """A body whose table is the head's weight, too."""

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleDict({"table": nn.Embedding(9, 6), "middle": nn.Linear(6, 6)})
        self.head = nn.Linear(6, 9)
        self.head.weight = self.body["table"].weight

    def forward(self, ids):
        return self.head(torch.tanh(self.body["middle"](self.body["table"](ids))))


IDS = torch.arange(9).view(3, 3)


def parts(strategy="id3", trained=3, seed=0, ids=IDS):
    """A plain model, and the same one in training."""
    torch.manual_seed(seed)
    plain = Parts()
    model = sparsify(copy.deepcopy(plain), BUDGET, strategy, steps=STEPS)
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    for _ in range(trained):
        model(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return plain, model, optimizer


def assert_trains_on(model, optimizer, base, expected):
    """The model has the ``expected`` outputs before and after a step that moves nothing, and its delta fits a base."""
    optimizer.param_groups[0]["lr"] = 0.0
    model(IDS).square().sum().backward()
    optimizer.step()
    torch.testing.assert_close(model(IDS), expected)
    SparseDelta.from_model(model).apply(base)
    torch.testing.assert_close(base(IDS), expected)
    assert summary(model, verify=True).verification.ok


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("strategy", "trained"), [("id3", 0), ("random", 0), ("id3", 3)])
@pytest.mark.parametrize("name", ["", "body", "body.table"])
def test_pretrained_weights_loaded_into_a_part_are_its_base_now(name, strategy, trained, assign):
    plain, model, optimizer = parts(strategy, trained)
    torch.manual_seed(1)
    others = copy.deepcopy(Parts().get_submodule(name).state_dict())  # where ties are clones
    expected, base = copy.deepcopy(model), copy.deepcopy(plain)
    for each in (expected, base):
        each.get_submodule(name).load_state_dict(others, strict=False)
    with warnings.catch_warnings(record=True) as said:
        model.get_submodule(name).load_state_dict(others, strict=False, assign=assign)
        model.state_dict()
    assert re.search("other pretrained weights|they are its base now", str(said[0].message))
    assert_trains_on(model, optimizer, base, expected(IDS).detach())
    assert model.head.weight is model.body["table"].weight


def test_merged_weights_loaded_into_a_part_go_on_with_the_same_delta():
    plain, model, optimizer = parts()
    values, expected, merged = model.sparse_values.detach().clone(), model(IDS).detach(), copy.deepcopy(model.body)
    model.sparse_values.data.zero_()
    model(IDS)
    model.body.load_state_dict(merged.state_dict())
    model(IDS)
    tensors = [tensor for tensor in get_engine(model).tensors if tensor.name.startswith("body")]
    slots = torch.cat([tensor.slots for tensor in tensors])
    torch.testing.assert_close(model.sparse_values[slots], values[slots])
    model.sparse_values.data.copy_(values)
    assert_trains_on(model, optimizer, plain, expected)


@pytest.mark.parametrize("name", ["", "body"])
def test_a_load_among_the_base_weights_is_refused_and_changes_nothing(name):
    _, model, _ = parts()
    state = copy.deepcopy(parts(seed=1)[1].get_submodule(name).state_dict())
    refused = pytest.raises(SparsifyError, match=r"load_state_dict\(\) inside base_weights\(\)")
    with unchanged(model), base_weights(model), refused:
        model.get_submodule(name).load_state_dict(state)


@pytest.mark.parametrize(("strategy", "inside"), [("id3", False), ("id3", True), ("random", True)])
def test_accelerates_loader_for_several_devices_brings_everything(strategy, inside, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    straight, resumed = parts(strategy)[1], parts(strategy, trained=1)[1]
    save_file({name: value.clone() for name, value in straight.state_dict().items()}, tmp_path / "model.safetensors")
    with base_weights(resumed) if inside else nullcontext():
        accelerate.load_checkpoint_in_model(resumed, tmp_path, device_map={"": "cpu"})
        if inside and strategy == "id3":
            with pytest.raises(SparsifyError, match=r"a state was loaded inside base_weights\(\)"):
                resumed(IDS)
    assert (get_engine(resumed).step, get_engine(resumed).unmasked) == (3, get_engine(straight).unmasked)
    assert bits(resumed) == bits(straight)


@pytest.mark.parametrize("options", [{"trained": 2}, {"trained": 5, "ids": IDS % 2}], ids=["earlier", "other ids"])
def test_a_state_that_is_written_into_the_models_own_tensors_is_gone_back_to(options):
    other, model = parts(**options)[1], parts(trained=5)[1]
    assert unmasked_sets(other) != unmasked_sets(model)
    state = model.state_dict()
    for name, value in other.state_dict().items():
        state[name].copy_(value)  # as torch.distributed.checkpoint.load() does
    model.load_state_dict(state)
    assert bits(model) == bits(other)
    assert unmasked_sets(model) == unmasked_sets(other)


def test_trained_values_without_their_entries_are_refused():
    plain, batches = build("mlp")
    trained = sparsify(copy.deepcopy(plain), BUDGET, "id3", steps=STEPS)
    run(trained, batches[:STEPS])
    alone = {name: own.detach().clone() for name, own in trained.named_parameters() if own.requires_grad}
    fresh = sparsify(copy.deepcopy(plain), BUDGET, "id3", steps=STEPS)
    with pytest.raises(SparsifyError, match=r"has values for entries that this model does not know.*trained_state"):
        fresh.load_state_dict(alone, strict=False)
    assert not fresh.sparse_values.any()
    trained.load_state_dict(alone, strict=False)


def test_a_state_with_other_modules_to_save_is_refused():
    plain, batches = build("mlp")
    options = {"steps": STEPS, "target_modules": ["first", "second"]}
    trained = sparsify(copy.deepcopy(plain), BUDGET, "id3", modules_to_save=["head"], **options)
    run(trained, batches[:2])
    other = sparsify(copy.deepcopy(plain), BUDGET, "id3", **options)
    with pytest.raises(SparsifyError, match=r"modules_to_save=2 parameters, and .*modules_to_save=0 parameters"):
        other.load_state_dict(trained_state(trained), strict=False)
    assert summary(other).step == 0
    assert torch.equal(other.head.weight, plain.head.weight)
