"""Averages of a sparsified model over its training: torch's AveragedModel, and EMAs as people write them."""

import copy
import functools

import pytest
import torch
from models import build, loss_of, train
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from sparsify import SparseDelta, SparsifyError, sparsify, summary

BUDGET, STEPS, DECAY = 24, 6, 0.7


def trained(update=AveragedModel.update_parameters, start=copy.deepcopy, strategy="id3", dtype=torch.float64):
    """The pretrained model, the average, the effective weights before training and after each step, and the batches."""
    model, batches = build("bert", dtype=dtype)
    pretrained = copy.deepcopy(model)
    sparsify(model, BUDGET, strategy, steps=STEPS)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    average, seen = start(model), [{name: p.detach().clone() for name, p in pretrained.named_parameters()}]
    for batch in batches[:STEPS]:
        train(model, [batch], optimizer=optimizer)
        update(average, model)
        seen.append({name: model.get_parameter(name).detach().clone() for name in seen[0]})
    return pretrained, average, seen, batches


def check(pretrained, average, expected, batches):
    delta = SparseDelta.from_model(average)
    assert delta.num_entries == BUDGET
    delta.apply(pretrained)
    for name, parameter in pretrained.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name])
    torch.testing.assert_close(loss_of(average, batches[-1]), loss_of(pretrained, batches[-1]))


@pytest.mark.parametrize("strategy", ["id3", "pafi"])
def test_torchs_averaged_model_is_the_mean_of_all_steps(strategy):
    pretrained, average, (_, *seen), batches = trained(start=AveragedModel, strategy=strategy)
    mean = {name: sum(weights[name] for weights in seen) / STEPS for name in seen[0]}
    check(pretrained, average, mean, batches)
    assert summary(average, verify=True).verification.ok
    assert SparseDelta.from_model(average).config["steps_done"] == STEPS


def ema_of(seen):
    expected = seen[0]
    for weights in seen[1:]:
        expected = {name: DECAY * expected[name] + (1 - DECAY) * weights[name] for name in weights}
    return expected


@torch.no_grad()
def average_by_hand(average, model, *, delta_alone=False):
    pairs = zip(average.parameters(), model.parameters(), strict=True)
    for own, other in [(average.sparse_values, model.sparse_values)] if delta_alone else pairs:
        own.mul_(DECAY).add_(other, alpha=1 - DECAY)
    for buffer, of_model in zip(average.buffers(), model.buffers(), strict=True):
        buffer.copy_(of_model)


@pytest.mark.parametrize("by", ["torch", "hand", "hand, the delta alone"])
def test_an_exponential_average_is_one(by):
    options = {"update": functools.partial(average_by_hand, delta_alone="alone" in by)}
    if by == "torch":
        options = {"start": functools.partial(AveragedModel, multi_avg_fn=get_ema_multi_avg_fn(DECAY))}
    pretrained, average, seen, batches = trained(**options)
    check(pretrained, average, ema_of(seen[by == "torch" :]), batches)


def test_an_average_of_the_indices_is_refused_at_once():
    _, average, _, batches = trained(start=functools.partial(AveragedModel, use_buffers=True))
    with pytest.raises(SparsifyError, match=r"make no sense any more.*use_buffers=False"):
        loss_of(average, batches[0])


class OfMMEngine:
    """mmengine's BaseAveragedModel: copies first, then averages, all through ``.data``, and copies the buffers."""

    def __init__(self, model):
        self.module, self.steps = copy.deepcopy(model).requires_grad_(False), 0
        self.module.state_dict()

    def update(self, model):
        for own, other in zip(self.module.parameters(), model.parameters(), strict=True):
            own.data.lerp_(other.data, 1 - DECAY if self.steps else 1)
        for own, other in zip(self.module.buffers(), model.buffers(), strict=True):
            own.data.copy_(other.data)
        self.steps += 1


def test_an_average_by_data_alone_as_mmengines_is_one():
    pretrained, average, seen, batches = trained(OfMMEngine.update, OfMMEngine)
    check(pretrained, average.module, ema_of(seen[1:]), batches)
    assert SparseDelta.from_model(average.module).config["steps_done"] == STEPS


@torch.no_grad()
def average_as_yolo(average, model):
    """ultralytics' ModelEMA: all floats of the state dict, those of the entries' pretrained values too."""
    others = model.state_dict()
    for name, value in average.state_dict().items():
        if value.dtype.is_floating_point:
            value *= DECAY
            value += (1 - DECAY) * others[name].detach()


@pytest.mark.parametrize(("strategy", "sentence"), [("id3", "buffers were not"), ("random", "average of equal")])
def test_an_average_of_all_floats_without_the_indices_as_yolos_computes_and_is_refused_as_a_delta(strategy, sentence):
    pretrained, average, seen, batches = trained(average_as_yolo, strategy=strategy, dtype=torch.float32)
    pretrained.load_state_dict(ema_of(seen), strict=False)
    torch.testing.assert_close(loss_of(average, batches[-1]), loss_of(pretrained, batches[-1]))
    with pytest.raises(SparsifyError, match=rf"{sentence}.*own\.copy_\(other\)"):
        SparseDelta.from_model(average)
