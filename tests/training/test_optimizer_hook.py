"""Optimizers that hold the flat delta, that should and do not, and that have nothing to do with it."""

import copy
import re
import subprocess
import sys
import warnings
from types import SimpleNamespace

import peft
import pytest
import torch
from models import build, loss_of, sparsified
from torch import nn

from sparsify import SparsifyCallback, SparsifyError, desparsify, get_engine, optimizer_stepped, sparsify, summary

BUDGET, STEPS = 20, 12
UNHELD = r"holds `sparse_values`.*Make it after sparsify\(\)"


def built(name="bert", **options):
    return sparsified(name, BUDGET, steps=STEPS, **options)


def step(model, batch, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss_of(model, batch).backward()
    for optimizer in optimizers:
        optimizer.step()


def made_before():
    model, batches = build("bert")
    optimizer = torch.optim.AdamW(model.parameters())
    return sparsify(model, BUDGET, "id3", steps=STEPS), optimizer, batches


def groups_of_layers():
    model, batches = built()
    groups = [{"params": list(layer.parameters())} for layer in model.bert.encoder.layer]
    return model, torch.optim.AdamW(groups), batches


def a_delta_that_was_replaced():
    model, batches = built()
    optimizer = torch.optim.AdamW([model.sparse_values])
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return model, optimizer, batches


def that_of_an_earlier_training():
    model, batches = built(modules_to_save=["classifier"])
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    again = sparsify(desparsify(model), BUDGET, "id3", steps=STEPS, modules_to_save=["classifier"])
    return again, optimizer, batches


@pytest.mark.parametrize(
    "make", [made_before, groups_of_layers, a_delta_that_was_replaced, that_of_an_earlier_training]
)
def test_an_optimizer_without_the_flat_delta_is_refused_at_its_first_step(make):
    model, optimizer, batches = make()
    before = copy.deepcopy(model.state_dict())
    loss_of(model, batches[0]).backward()
    unmasked = summary(model).unmasked
    with pytest.raises(SparsifyError, match=UNHELD):
        optimizer.step()
    assert not summary(model, verify=True).verification.ok
    assert summary(model).unmasked == unmasked
    assert torch.equal(before["sparse_values"], model.state_dict()["sparse_values"])
    right = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    right.step()
    assert summary(model, verify=True).verification.ok


def test_a_flat_delta_that_was_frozen_is_refused_in_backward():
    model, batches = built()
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    with pytest.raises(SparsifyError, match=r"does not require grad.*get_peft_model\(\)"):
        loss_of(model, batches[0]).backward()
    with torch.no_grad():
        loss_of(model, batches[0])


def test_a_flat_delta_that_was_frozen_with_everything_else_is_refused_in_the_optimizers_step():
    model, batches = built()
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model.get_input_embeddings().register_forward_hook(lambda *args: args[2].requires_grad_())
    loss_of(model, batches[0]).backward()
    with pytest.raises(SparsifyError, match=r"prepare_model_for_kbit_training\(\).*Call sparsify\(\) after these"):
        optimizer.step()


def test_an_optimizer_that_failed_to_be_made_is_passed_over_in_the_search_for_another():
    model, optimizer, batches = made_before()
    with pytest.raises(ValueError, match="Invalid learning rate") as kept:
        torch.optim.AdamW([model.sparse_values], lr=-1)
    loss_of(model, batches[0]).backward()
    with pytest.raises(SparsifyError, match=UNHELD):
        optimizer.step()
    assert kept.traceback


@pytest.fixture
def generator_and_critic():
    return [sparsify(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), 9, "id3", steps=4) for _ in range(2)]


def test_a_frozen_model_passes_gradients_on_to_another(generator_and_critic):
    generator, critic = generator_and_critic
    critic.requires_grad_(False)
    optimizer = torch.optim.SGD([generator.sparse_values], lr=0.1)
    critic(generator(torch.randn(5, 4))).mean().backward()
    optimizer.step()
    assert generator.sparse_values.any()
    critic.requires_grad_(True)
    critic(generator(torch.randn(5, 4))).mean().backward()
    assert critic.sparse_values.grad.any()


def test_gradients_that_are_handed_to_a_copy_train_the_copy():
    model, batches = built(strategy="pafi")
    server = copy.deepcopy(model)
    optimizer = torch.optim.SGD([server.sparse_values], lr=0.1)
    loss_of(model, batches[0]).backward()
    server.sparse_values.grad = model.sparse_values.grad.clone()
    optimizer.step()
    assert (summary(server).step, summary(model).step) == (1, 0)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_that_initialises_the_optimizer_is_none(make):
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model, batches = built("mlp")
    whole = copy.deepcopy(model)
    optimizer, others = (make([each.sparse_values], lr=0.01) for each in (model, whole))
    for number, batch in enumerate(batches):
        step(whole, batch, others)
        step(model, batch, optimizer)
        optimizer.zero_grad()
        state = copy.deepcopy(get_state_dict(model, optimizer))
        if number % 5 == 2:
            model, _ = built("mlp")
            optimizer = make([model.sparse_values], lr=0.01)
            set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
        assert (summary(model).step, summary(model).unmasked) == (number + 1, summary(whole).unmasked)
    assert torch.equal(model.sparse_values, whole.sparse_values)


@pytest.mark.parametrize("active", ["second", ["default", "second"]], ids=str)
def test_what_trains_later_and_is_in_no_delta_is_named_once(active):
    model, batches = build("bert")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"]))
    sparsify(model, BUDGET, "id3", steps=STEPS)
    step(model, batches[0], torch.optim.SGD([model.sparse_values], lr=0.1))
    model.add_adapter("second", peft.LoraConfig(target_modules=["value"]))
    model.base_model.set_adapter(active)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch, name in zip(
        batches, (r"`bert\.\S+\.value\.lora_A\.second", r"position_embeddings\.weight"), strict=False
    ):
        with pytest.warns(UserWarning, match=f"{name}.* can train, but no delta holds them"):
            step(model, batch, optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            step(model, batch, optimizer)
        model.bert.embeddings.position_embeddings.requires_grad_(True)


def test_what_trains_before_the_flat_delta_does_is_named_too():
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
    sparsify(model, 20, "id3", steps=STEPS, target_modules=["0"])
    model[2].requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2](torch.ones(3, 16)).square().sum().backward()
    with pytest.warns(UserWarning, match=r"`2\.weight`, `2\.bias` can train, but no delta holds them"):
        optimizer.step()


def test_one_of_several_optimizers_may_hold_the_flat_delta():
    model, batches = built()
    layer = torch.optim.SGD(model.bert.encoder.layer[0].parameters(), lr=0.1)
    rest = torch.optim.SGD([*model.bert.encoder.layer[1].parameters(), model.sparse_values], lr=0.1)
    for batch in batches:
        step(model, batch, layer, rest)
    assert summary(model).step == STEPS
    assert summary(model, verify=True).verification.ok


def test_two_models_that_train_each_other_in_turns_are_left_alone(generator_and_critic):
    generator, critic = generator_and_critic
    of_generator, of_critic = (torch.optim.SGD([model.sparse_values], lr=0.1) for model in (generator, critic))
    for _ in range(4):
        for _ in range(3):  # the generator gets gradients that nobody wants
            of_critic.zero_grad()
            critic(generator(torch.randn(5, 4))).mean().backward()
            of_critic.step()
        of_generator.zero_grad()
        (-critic(generator(torch.randn(5, 4))).mean()).backward()
        of_generator.step()
    assert (summary(generator).step, summary(critic).step) == (4, 12)


def test_a_phase_that_trains_the_head_alone_is_left_alone_and_seen_by_verify():
    model, batches = built(modules_to_save=["classifier"])
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.1)
    step(model, batches[0], head)
    step(model, batches[1], head)
    verification = summary(model, verify=True).verification
    assert not verification.ok
    assert "2 backward passes ran, and no optimizer step was counted" in str(verification)
    step(model, batches[2], head, torch.optim.SGD([model.sparse_values], lr=0.1))
    assert summary(model, verify=True).verification.ok


def test_a_step_that_failed_is_not_taken_for_one_around_the_next():
    model, batches = built()
    optimizer = torch.optim.SGD([model.sparse_values], lr=0.1)
    handle = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    loss_of(model, batches[0]).backward()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    handle.remove()
    assert summary(model).step == 0
    model.sparse_values.data[:1] += 1  # by hand, which is no step
    assert summary(model).step == 0
    model.sparse_values.data[:1] -= 1
    for batch in batches[:2]:
        step(model, batch, optimizer)
    assert summary(model).step == 2


@pytest.mark.filterwarnings("error")
def test_an_optimizer_of_ones_own_trains_as_torchs_does_whose_steps_cannot_be_counted_again():
    own, batches = built()
    torchs = copy.deepcopy(own)
    optimizer = torch.optim.SGD([torchs.sparse_values], lr=0.1)
    for batch in batches:
        loss_of(own, batch).backward()
        with torch.no_grad():
            own.sparse_values -= 0.1 * own.sparse_values.grad
        own.sparse_values.grad = None
        optimizer_stepped(own)
        step(torchs, batch, optimizer)
    assert summary(own).unmasked == BUDGET
    state = torchs.state_dict()
    for name, tensor in own.state_dict().items():
        torch.testing.assert_close(tensor, state[name])
    with pytest.raises(SparsifyError, match=r"was counted already.*leave optimizer_stepped\(model\) out"):
        optimizer_stepped(torchs)
    assert summary(torchs).step == STEPS


def test_a_copy_that_fails_harms_no_optimizer():
    model, batches = built()
    model.resource = copy  # a module, which cannot be copied
    with pytest.raises(TypeError, match="cannot pickle") as error:
        copy.deepcopy(model)
    other, _ = built("mlp")
    step(other, build("mlp")[1][0], torch.optim.SGD([other.sparse_values], lr=0.1))
    step(model, batches[0], torch.optim.SGD([model.sparse_values], lr=0.1))
    assert error.traceback, "what was half made is alive here"
    assert summary(model).step == summary(other).step == 1


def test_an_error_in_one_model_comes_before_any_of_them_has_moved():
    models = [sparsify(nn.Linear(4, 4), 8, "id3", steps=4) for _ in range(3)]
    optimizer = torch.optim.SGD([model.sparse_values for model in models], lr=0.1)
    for model in models:
        model(torch.ones(2, 4)).sum().backward()
    get_engine(models[1]).paused = True
    with pytest.raises(SparsifyError, match=r"optimizer\.step\(\) inside base_weights\(\)"):
        optimizer.step()
    assert [get_engine(model).step for model in models] == [0, 0, 0]
    assert not any(model.sparse_values.any() for model in models)


def test_an_optimizer_that_nobody_has_heard_of_is_warned_of_after_three_steps():
    model = sparsify(nn.Linear(4, 4), 8, "id3", steps=4)
    for _ in range(3):
        model(torch.ones(2, 4)).square().sum().backward()
        model.sparse_values.data.sub_(0.1 * model.sparse_values.grad)
        model.sparse_values.grad = None
    with pytest.warns(UserWarning, match=r"Call optimizer_stepped\(model\)"):
        model(torch.ones(2, 4)).square().sum().backward()
    assert get_engine(model).step == 0


def test_the_trainers_callback_counts_the_steps_of_deepspeed():
    model = sparsify(torch.nn.Linear(4, 4), 8, "id3", steps=4)
    for _ in range(2):
        model(torch.ones(2, 4)).square().sum().backward()
        SparsifyCallback().on_step_end(SimpleNamespace(deepspeed="zero2.json"), None, None, model=model)
    assert get_engine(model).step == 2
    args = SimpleNamespace(deepspeed="zero2.json", load_best_model_at_end=True)
    state = SimpleNamespace(best_model_checkpoint=None)
    SparsifyCallback().on_train_end(args, state, None, model=model)
    assert get_engine(model).step == 2, "the last step has been counted"


def test_a_model_that_another_process_unpickles_has_the_same_checks(tmp_path):
    torch.save(sparsify(nn.Linear(4, 4), 8, "id3", steps=4), tmp_path / "model")
    code = """
import sys, torch
model = torch.load(sys.argv[1], weights_only=False)
optimizer = torch.optim.SGD([model.weight], lr=0.1)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
"""
    ended = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "model"], capture_output=True, text=True, check=False
    )
    assert re.search(UNHELD, ended.stderr), ended.stderr
