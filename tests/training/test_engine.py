"""Training with the engine: failures of other implementations, each a test named after it."""

import copy
import gc
import warnings

import pytest
import torch
from models import MLP, build, loss_of, run_steps
from torch import nn
from torch._subclasses import FakeTensor

from sparsify import SparseDelta, SparsifyError, base_weights, desparsify, get_engine, sparsify, summary, trained_state

BUDGET, STEPS = 40, 8


def train(model, batches, optimizer=None, steps=STEPS):
    return run_steps(model, batches[:steps], optimizer or torch.optim.AdamW([model.sparse_values], 1e-2))[0]


def plain_weights(model):
    """Every tensor of the model under its own name, without the library's buffers."""
    return {name: value.clone() for name, value in model.state_dict().items() if not name.startswith("sparse_")}


def assert_weights_follow_the_delta(model):
    engine = get_engine(model)
    for tensor in engine.tensors:
        expected = (tensor.base.float() + engine.values.detach()[tensor.slots].float()).to(tensor.parameter.dtype)
        assert torch.equal(tensor.parameter.detach().take(tensor.indices), expected), tensor.name


@pytest.fixture
def mlp():
    model, batches = build("mlp")
    return sparsify(model, BUDGET, "id3", steps=STEPS), batches


def test_a_copy_made_in_the_middle_of_a_graph_works(mlp):
    model, batches = mlp
    loss = loss_of(model, batches[0])
    twin = copy.deepcopy(model)
    loss.backward()
    assert (summary(model).unmasked, summary(twin).unmasked) == (5, 0)
    train(twin, batches, steps=1)
    assert summary(twin).unmasked == 5


def cast_trainable(model, dtype=torch.bfloat16):  # as TRL's trainers do with a quantized base
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = parameter.data.to(dtype)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, cast_trainable])
def test_a_cast_leaves_the_delta_in_float32(mlp, cast):
    model, batches = mlp
    train(model, batches, steps=4)
    delta = model.sparse_values.detach().clone()
    cast(model)
    assert model.sparse_values.dtype == torch.float32
    assert torch.equal(model.sparse_values.detach(), delta)
    dtype = model.first.weight.dtype
    train(model, [{**batch, "x": batch["x"].to(dtype)} for batch in batches], steps=4)
    assert_weights_follow_the_delta(model)
    assert summary(model).unmasked == BUDGET


@pytest.mark.parametrize("when", ["before the optimizer", "at every step"])
def test_a_loop_that_casts_all_that_trains_changes_nothing(when):
    base, batches = build("mlp")
    models = [sparsify(copy.deepcopy(base), BUDGET, "id3", steps=STEPS) for _ in range(2)]
    cast_trainable(models[1])
    optimizers = [torch.optim.AdamW([model.sparse_values], 1e-2) for model in models]
    for batch in batches[:STEPS]:
        if when == "at every step":
            cast_trainable(models[1], torch.float16)
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, [batch], optimizer)
    assert torch.equal(*(model.sparse_values for model in models))
    assert summary(models[1], verify=True).verification.ok
    SparseDelta.from_model(models[1]).apply(base)


def test_short_values_that_are_set_or_put_in_its_place_are_held_in_float32(mlp):
    model, batches = mlp
    train(model, batches, steps=2)
    values = model.sparse_values
    values.data = torch.full_like(values, 0.5, dtype=torch.bfloat16)  # no cast of its own values
    assert (values.dtype, values[0].item()) == (torch.float32, 0.5)
    model.sparse_values = nn.Parameter(values.data.half())
    train(model, batches, steps=2)
    assert model.sparse_values.dtype == torch.float32
    assert_weights_follow_the_delta(model)
    with pytest.raises(SparsifyError, match=r"Nor cast: model.type\(\) casts them, model.to\(\) does not"):
        train(model.type(torch.bfloat16), batches)


def test_an_entry_begins_at_its_pretrained_value_whatever_noise_there_was_before(mlp):
    model, batches = mlp
    frozen, optimizer = copy.deepcopy(model), torch.optim.SGD([model.sparse_values], lr=1.0)
    for batch in batches[:STEPS]:
        before = get_engine(model).unmasked
        loss_of(model, batch).backward()
        assert not model.sparse_values[before : get_engine(model).unmasked].any()
        model.sparse_values.grad += 0.1  # of all numbers, as differential privacy's
        optimizer.step()
        optimizer.zero_grad()
    assert get_engine(model).unmasked == BUDGET
    assert_weights_follow_the_delta(model)
    assert summary(model, verify=True).verification.ok
    assert not summary(frozen).unmasked


def test_base_values_of_a_model_in_float64_are_kept_whatever_the_delta_is_cast_to():
    base, batches = build("mlp", dtype=torch.float64)
    for parameter in base.parameters():
        parameter.data /= 3  # to values that float32 does not have
    model = sparsify(copy.deepcopy(base), BUDGET, "id3", steps=STEPS)
    cast_trainable(model, torch.float32)
    train(model, batches)
    SparseDelta.from_model(model).apply(base)


def test_a_move_to_a_device_takes_everything_along(mlp):
    model, batches = mlp
    train(model, batches, steps=2)
    on_meta = copy.deepcopy(model).to("meta")  # any second device will do to see what moves
    assert {tensor.device.type for tensor in [*on_meta.parameters(), *on_meta.buffers()]} == {"meta"}
    assert {tensor.device.type for tensor in model.to("cpu").state_dict().values()} == {"cpu"}
    train(model, batches, steps=2)
    assert_weights_follow_the_delta(model)


def test_deterministic_algorithms_are_enough():
    """As with the Trainer's ``full_determinism``, which makes torch refuse whatever may not be deterministic."""
    model, batches = build("gpt2")
    base = copy.deepcopy(model)
    torch.use_deterministic_algorithms(True)
    try:
        sparsify(model, BUDGET, "id3", steps=STEPS)
        train(model, batches)
        assert summary(model, verify=True).verification.ok
        with SparseDelta.from_model(model).applied(base):
            assert torch.equal(loss_of(base, batches[0]), loss_of(model, batches[0]))
    finally:
        torch.use_deterministic_algorithms(False)


WRITES = {"scale": lambda v: v.mul_(100.0), "signs": lambda v: v.neg_(), "order": lambda v: v.copy_(v.flip(0))}
READS = {"forward": loss_of, "state dict": lambda m, _: m.state_dict(), "refresh": lambda m, _: get_engine(m).refresh()}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("write", WRITES)
def test_writes_through_data_are_seen(mlp, write, read):
    model, batches = mlp
    train(model, batches)
    before = plain_weights(model)
    WRITES[write](model.sparse_values.data)  # moves no version counter; the last two keep every sum
    READS[read](model, batches[0])
    assert_weights_follow_the_delta(model)
    assert any(not torch.equal(value, before[name]) for name, value in plain_weights(model).items())


PARTS = {
    "a layer": lambda m, x: m["in"](x),
    "a parameter": lambda m, x: x @ m["in"].weight.T + m["in"].bias,
    "a norm": lambda m, x: m["norm"](x),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_runs_without_the_root_has_what_was_written_into_the_flat_delta(part, grad):
    """As the values of an EMA, of SAM, or of a line search, where a loop calls the parts of a model, or PEFT does."""
    model = nn.ModuleDict({"in": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
    sparsify(model, 28, "random", steps=1)
    x = torch.randn(3, 4)
    PARTS[part](model, x).square().sum().backward()  # the others get no gradient, and are unmasked all the same
    torch.optim.SGD([model.sparse_values], lr=0.1).step()
    with torch.no_grad():
        model.sparse_values += 1
    with torch.set_grad_enabled(grad):
        read = PARTS[part](model, x)
    assert torch.equal(read, PARTS[part](desparsify(model), x))


def test_the_flat_delta_or_merged_weights_alone_can_be_loaded(mlp):
    model, batches = mlp
    train(model, batches, steps=4)
    best, best_loss = plain_weights(model), loss_of(model, batches[0]).item()
    train(model, batches, steps=4)
    assert loss_of(model, batches[0]).item() != best_loss
    model.load_state_dict(best, strict=False)
    assert loss_of(model, batches[0]).item() == best_loss
    train(model, batches, steps=1)
    assert_weights_follow_the_delta(model)
    model.load_state_dict({"sparse_values": torch.zeros(BUDGET)}, strict=False)
    with base_weights(model):
        base = loss_of(model, batches[0]).item()
    assert loss_of(model, batches[0]).item() == base


def test_base_weights_are_the_pretrained_ones_and_leave_no_trace():
    model, batches = build("bert")
    pretrained = copy.deepcopy(model)
    sparsify(model, BUDGET, "id3", steps=STEPS)
    train(model, batches)
    trained = plain_weights(model)
    policy = loss_of(model, batches[0])
    with pytest.raises(ZeroDivisionError), base_weights(model), torch.no_grad():
        1 / int(not torch.equal(loss_of(model, batches[0]), loss_of(pretrained, batches[0])))
    policy.backward()  # the graph of before is undisturbed
    assert all(torch.equal(value, trained[name]) for name, value in plain_weights(model).items())


def test_base_weights_are_for_forward_passes_only(mlp):
    model, batches = mlp
    train(model, batches, steps=2)
    loss = loss_of(model, batches[0])
    with base_weights(model):
        with pytest.raises(SparsifyError, match=r"backward\(\) inside base_weights\(\)"):
            loss.backward()
        with pytest.raises(SparsifyError, match=r"from_model\(\) inside base_weights\(\)"):
            SparseDelta.from_model(model)
        with pytest.raises(SparsifyError, match=r"verify=True\) inside base_weights"):
            summary(model, verify=True)


def live_storages():
    """Bytes of every live tensor's memory, by where it is; what torch.compile calculates with has none."""
    gc.collect()
    tensors = (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if not isinstance(tensor, FakeTensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def test_after_a_step_nothing_as_large_as_a_weight_lives_beyond_the_weights():
    model = nn.Sequential(nn.Embedding(500, 128), nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 128))
    sparsify(model, 100, "id3", steps=5)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-3)
    known = live_storages()
    for _ in range(3):
        model(torch.randint(500, (4, 7))).square().mean().backward()
        optimizer.step()
    assert summary(model).unmasked == 60
    new = [size for place, size in live_storages().items() if place not in known]
    assert max(new, default=0) <= 8 * 100  # the smallest weight matrix has 8 bytes x 16,000


def test_a_weight_that_changed_its_shape_is_refused(mlp):
    model, batches = mlp
    model.head.weight = nn.Parameter(torch.zeros(5, 8), requires_grad=False)
    with pytest.raises(SparsifyError, match=r"`head\.weight` had shape \(3, 8\) at sparsify\(\) and has \(5, 8\) now"):
        loss_of(model, batches[0])


def test_a_module_that_got_no_gradient_is_named_once():
    model = MLP()
    model.unused = nn.Linear(3, 3)
    resumed = copy.deepcopy(model)
    sparsify(model, BUDGET, "id3", steps=STEPS)
    _, batches = build("mlp")
    with pytest.warns(UserWarning, match=r"2 of 10 tensors got no gradient.*unused\.weight, unused\.bias.*no_grad"):
        train(model, batches, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, batches, steps=2)
        sparsify(resumed, BUDGET, "id3", steps=STEPS).load_state_dict(trained_state(model))
        train(resumed, batches, steps=1)


@pytest.mark.parametrize("strategy", ["random", "id3"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_that_is_frozen_in_a_run_stays_as_it_is_until_it_is_unfrozen(strategy, compiled):
    model = sparsify(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 30, strategy, steps=6)
    if compiled:
        model.compile(backend="aot_eager")
    optimizer = torch.optim.AdamW([model.sparse_values], lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
        return [(layer.weight.detach().clone(), layer.indices) for layer in (model[0], model[2])]

    before = [step(), step()][-1]
    model[0].requires_grad_(False)
    frozen = [step(), step()][-1]
    for own, held in zip(frozen[0], before[0], strict=True):
        assert torch.equal(own, held)
    assert not torch.equal(frozen[1][0], before[1][0])
    model[0].weight.requires_grad = True
    assert not torch.equal(step()[0][0], frozen[0][0])
    model.requires_grad_(False).sparse_values.requires_grad_(True)  # as a preparation for k-bit training
    model[2].requires_grad_(True)
    assert not torch.equal(step()[0][0], frozen[0][0])


def test_what_is_unfrozen_after_all_was_frozen_trains_alone():
    model = sparsify(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), 20, "random")
    model.requires_grad_(False)[2].requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    before = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    for _ in range(2):
        model(torch.randn(5, 4)).square().sum().backward()
        optimizer.step()
    assert torch.equal(model[0].weight, before[0])
    assert not torch.equal(model[2].weight, before[1])
