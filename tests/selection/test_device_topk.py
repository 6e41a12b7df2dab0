"""Selection on a GPU, or as on one on the CPU: the same winners (test_cuda.py counts what it waits for)."""

import copy
import gc
import math
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import build, loss_of, train
from products import seeded
from twins import Twins

from sparsify import D3, SNIP, Fisher, get_engine, kernels, sparsify
from sparsify.core.gradients import Product
from sparsify.core.topk import TopK
from sparsify.selection import device_topk, screening
from sparsify.selection.device_topk import DeviceTopK
from sparsify.selection.screening import RowBlocks, StreamingSelector

STEPS, BUDGET = 6, 61
NUMBERS = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -4.0, 1e-3, 1e-40, 1e30, -1e38]  # few, so that there are ties


@pytest.fixture(params=["plain", "triton"])
def like_a_gpu(request, device, monkeypatch):
    """The CPU is treated as a GPU is; kernels in either form."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "_found", lambda name: None)
    elif not kernels.has_triton(device):
        pytest.skip("Triton is not installed, or does not run here")
    monkeypatch.setattr("sparsify.core.devices.AHEAD", (device.type,))
    return request.param


@pytest.fixture
def small_parts(monkeypatch):
    """Tensors of a few entries come in several parts, with cuts between them, and so do products."""
    for name, number in {"LARGEST": 8, "LARGEST_AHEAD": 130, "AT_ONCE": 300}.items():
        monkeypatch.setattr(f"sparsify.selection.joined.{name}", number)
    monkeypatch.setattr(screening, "MOST_MULTIPLIED", 60)
    monkeypatch.setattr(device_topk, "FEWEST_AT_ONCE", 8)
    monkeypatch.setattr(device_topk, "MOST_AT_ONCE", 40)
    monkeypatch.setattr(device_topk, "SMALLEST_CUT", 1)
    monkeypatch.setattr("sparsify.core.topk.BLOCK_ENTRIES", 7)
    monkeypatch.setattr("sparsify.core.topk.SMALLEST_CUT", 1)


SHAPES = st.lists(st.sampled_from([(1, 1), (1, 7), (5, 3), (1, 200), (30, 4)]), min_size=1, max_size=4)
# whose scores both forms round alike; the last overflows where a weight is zero
IMPORTANCES = st.sampled_from([D3(), D3(exp=0), D3(exp=1, eps=1e-3), Fisher(), SNIP(), D3(eps=1e-30)])


def a_tensor(shape, generator, random):
    weight, grad = (torch.tensor(NUMBERS)[torch.randint(len(NUMBERS), shape, generator=generator)] for _ in range(2))
    if random.random() < 0.2:  # scores that rise from part to part
        weight, grad = torch.zeros(shape), torch.arange(1.0, weight.numel() + 1).view(shape)
    rows = None
    if random.random() < 0.3:  # of which the last may come again, with zeros
        rows = torch.cat([torch.arange(0, shape[0], 2), torch.tensor([(shape[0] - 1) // 2 * 2])])
        grad = torch.cat([grad[::2], torch.zeros(1, shape[1])])
    if random.random() < 0.3:
        weight, grad = weight.t().contiguous().t(), grad.t().contiguous().t()
    if random.random() < 0.3:  # without subnormal numbers, which Triton's interpreter takes for zeros
        grad = grad.where(grad.abs() > 1e-37, 0).bfloat16()
    return weight, grad, rows


def plain_sort(tensors, importance, size):
    """Global ids and gradients of the best entries with a positive finite score, as plainly as can be."""
    entries = []
    for weight, grad, rows, offset in tensors:
        rows = torch.arange(len(weight)) if rows is None else rows
        ids = offset + rows[:, None] * weight.shape[1] + torch.arange(weight.shape[1])
        parts = -importance.score(weight[rows], grad.float()), ids, grad.float()
        entries += zip(*(part.flatten().tolist() for part in parts), strict=True)
    best = sorted(entry for entry in entries if -math.inf < entry[0] < 0)[:size]
    return [id for _, id, _ in best], [grad for *_, grad in best]


@pytest.mark.usefixtures("like_a_gpu", "small_parts")
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    SHAPES, st.integers(1, 30), st.integers(0, 999), IMPORTANCES,
    st.sampled_from([None, None, torch.nan, torch.inf, -torch.inf]), st.randoms(use_true_random=False),
)  # fmt: skip
def test_the_winners_are_a_plain_sorts_in_any_number_of_parts_and_order(shapes, size, seed, importance, bad, random):
    generator = seeded(seed)
    tensors, offset = [], 0
    for shape in shapes:
        tensors.append((*a_tensor(shape, generator, random), offset))
        offset += tensors[-1][0].numel()
    if bad is not None:
        tensors[-1][1][0, 0] = bad
    weights = torch.cat([weight.reshape(-1) for weight, *_ in tensors])
    random.shuffle(tensors)
    ids, grads = plain_sort(tensors, importance, size)
    for dtype in (torch.float32, torch.float64):  # that of a model with a tensor in float64
        host = TopK(size, dtype, torch.get_default_device())
        for tensor in tensors:
            host.offer(importance, *tensor)
        assert host.finite == (bad is None)
        assert (host.winners().ids.tolist(), host.winners().grads.tolist()) == (ids, grads)
    topk = DeviceTopK(size, offset, torch.float32, torch.get_default_device())
    assert topk.winners().ids.tolist() == [-1] * size, "nothing seen"
    for tensor in tensors:
        topk.offer(importance, *tensor)
    assert bool(topk.finite) == (bad is None)
    for _ in range(2):  # asked twice
        winners = topk.winners()
        assert winners.ids.tolist() == ids + [-1] * (size - len(ids))
        assert winners.grads[: len(ids)].tolist() == grads
        assert winners.weights[: len(ids)].tolist() == weights[winners.ids[: len(ids)]].tolist()


def test_the_best_of_several_devices_are_selected(like_a_gpu):
    topks = [DeviceTopK(3, 40, torch.float32, torch.get_default_device()) for _ in range(2)]
    for number, scores in enumerate(([5.0, 1.0, 3.0, 3.0], [3.0, 4.0, torch.inf])):
        topks[number].offer(D3(exp=0), torch.zeros(1, len(scores)), torch.tensor([scores]), None, 20 - 10 * number)
    topks[0]._held |= {torch.device("cuda"): held for held in topks[1]._held.values()}  # as if of another device
    assert topks[0].winners().ids.tolist() == [20, 11, 10]  # of the equal ones the one with the lowest id
    assert not topks[0].finite


def test_no_more_of_a_large_product_is_multiplied_out_at_once_than_the_limit(device, monkeypatch):
    (tensor,) = get_engine(sparsify(torch.nn.Linear(7, 30, bias=False), 9, "id3", steps=1)).tensors
    left, right, ids = torch.randn(5, 30), torch.randn(5, 7), []
    for limit in (210, 60):  # entries: all of them, and 8 rows
        monkeypatch.setattr(screening, "MOST_MULTIPLIED", limit)
        selector = StreamingSelector(DeviceTopK(9, 210, torch.float32, device), D3(), Counter(), True)
        with patch.object(RowBlocks, "rows", autospec=True, side_effect=RowBlocks.rows) as rows:
            selector.offer(tensor, Product(left, right))
        ids.append(selector.winners().ids.tolist())
    sizes = [7 * (stop - start) for _, start, stop in (call.args for call in rows.call_args_list)]
    assert sum(sizes) == 210
    assert max(sizes) <= limit
    assert ids[0] == ids[1]


in_triton = pytest.mark.parametrize("like_a_gpu", ["triton"], indirect=True)  # in the other form as on a CPU


def optimizer_of(model):
    return torch.optim.SGD([model.sparse_values], lr=0.05, momentum=0.9)


def test_id3_is_the_oracle(like_a_gpu, small_parts):
    dense, batches = build("mlp", dtype=torch.float64)
    sparse = sparsify(copy.deepcopy(dense), BUDGET, "id3", steps=STEPS)
    Twins(dense, sparse, BUDGET, STEPS).train(batches[:STEPS])  # which compares the two
    assert get_engine(sparse).unmasked == BUDGET


@in_triton
def test_an_optimizer_step_that_is_compiled_writes_the_weights_too(like_a_gpu):
    gc.collect()  # the step's hook goes over all sparsified models, of which none may die while Dynamo traces it
    models, (batch, *_) = [build("mlp")[0] for _ in range(2)], build("mlp")[1]
    for model in models:
        sparsify(model, BUDGET, "id3", steps=STEPS)
        step = optimizer_of(model).step
        loss_of(model, batch).backward()
        (torch.compile(step, backend="aot_eager") if model is models[0] else step)()
    assert all(torch.equal(*pair) for pair in zip(*(model.parameters() for model in models), strict=True))


@in_triton
def test_a_forward_follows_a_flat_delta_that_was_written_to(like_a_gpu):
    model, (first, second, *_) = build("mlp")
    sparsify(model, BUDGET, "id3", steps=STEPS)
    train(model, [first], optimizer=optimizer_of(model))
    model.sparse_values.data.mul_(3)
    loss_of(model, second)
    tensors = [tensor for tensor in get_engine(model).tensors if tensor.count]
    assert all(torch.equal(tensor.take(tensor.indices), tensor.base + tensor.delta) for tensor in tensors)
    assert any(tensor.delta.any() for tensor in tensors)
