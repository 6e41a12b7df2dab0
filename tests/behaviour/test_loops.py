"""Training loops other than the Trainer: accelerate, and closures as Lightning uses them."""

import copy

import accelerate
import pytest
import torch
from models import build, loss_of
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from trainers import make_model, rows_of
from twins import assert_close, trainable

from sparsify import sparsify, summary, trained_state

BUDGET, STEPS = 40, 6


def make_optimizer(model):
    return torch.optim.AdamW(trainable(model), lr=0.01)


def assert_same_states(model, other):
    assert_close(dict(model.state_dict()), dict(other.state_dict()), 0)


def plain_loop(model, batches, in_step=False):
    """The losses; with ``in_step``, the optimizer calls a closure, as by Lightning's automatic optimization."""
    torch.manual_seed(5)
    losses, optimizer = [], make_optimizer(model)
    for batch in batches:

        def closure(batch=batch):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(trainable(model), 1.0)
            losses.append(loss.item())
            return loss

        if in_step:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return losses


class Accelerated:
    def __init__(self, model, accumulation=1, **options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulation, **options)
        optimizer = make_optimizer(model)
        scheduler = LambdaLR(optimizer, lambda step: 1 - step / (2 * STEPS))
        prepared = self.accelerator.prepare(model, optimizer, DataLoader(rows_of(), batch_size=4), scheduler)
        self.model, self.optimizer, self.loader, self.scheduler = prepared

    def train(self, batches, skip=0):
        losses = []
        loader = self.accelerator.skip_first_batches(self.loader, skip) if skip else self.loader
        for batch, _ in zip(loader, range(batches), strict=False):
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @property
    def plain(self):
        return self.accelerator.unwrap_model(self.model)


def test_accelerates_loop_is_the_plain_one_and_its_way_to_save_a_model_writes_an_ordinary_one(tmp_path):
    model, batches = build("bert")
    loop = Accelerated(copy.deepcopy(sparsify(model, BUDGET, "id3", steps=STEPS)))
    loop.scheduler.scheduler.lr_lambdas[:] = [lambda step: 1.0]
    assert loop.train(STEPS) == plain_loop(model, batches[:STEPS])
    assert_same_states(model, loop.plain)
    state_dict = loop.accelerator.get_state_dict(loop.model)
    loop.plain.save_pretrained(tmp_path, save_function=loop.accelerator.save, state_dict=state_dict)
    again = type(model).from_pretrained(tmp_path)
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in again.named_parameters())


def keep_trained_state(models, weights, output_dir):
    for model, state_dict in zip(models, weights, strict=True):
        for name in state_dict.keys() - trained_state(model).keys():
            del state_dict[name]


@pytest.mark.parametrize("trained_only", [False, True])
@pytest.mark.parametrize("options", [{}, {"accumulation": 2}, {"mixed_precision": "bf16"}], ids=str)
def test_a_state_that_accelerate_saved_is_gone_on_from_bit_for_bit(options, trained_only, tmp_path):
    def loop():
        return Accelerated(make_model(steps=STEPS, budget=BUDGET, modules_to_save=["classifier"]), **options)

    torch.manual_seed(5)
    half = STEPS * options.get("accumulation", 1) // 2
    straight = loop()
    if trained_only:
        straight.accelerator.register_save_state_pre_hook(keep_trained_state)
    straight.train(half)
    straight.accelerator.save_state(tmp_path)
    assert ((tmp_path / "model.safetensors").stat().st_size < 6_000) == trained_only
    losses = straight.train(half, skip=half)
    assert summary(straight.plain, verify=True).verification.ok
    assert summary(straight.plain).unmasked == BUDGET
    resumed = loop()
    resumed.accelerator.load_state(tmp_path)
    assert resumed.train(half, skip=half) == losses
    assert_same_states(resumed.plain, straight.plain)


def test_a_loop_of_closures_is_the_plain_loop():
    batches, model = build("bert")[1][:STEPS], make_model(steps=STEPS, budget=BUDGET)
    other = copy.deepcopy(model)
    assert plain_loop(other, batches, in_step=True) == plain_loop(model, batches)
    assert_same_states(other, model)
