"""Several threads that run one model forward and backward: their gradients are summed, as plain torch sums them."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from models import build, loss_of, sparsified
from oracle import unmasked_sets

from sparsify import MaskedLinear, SparsifyError, get_engine, sparsify, summary

BUDGET, THREADS = 30, 4


class Meeting(torch.autograd.Function):
    """Holds the backward pass until all threads are in theirs."""

    @staticmethod
    def forward(ctx, x, barrier):
        ctx.barrier = barrier
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.barrier.wait(timeout=20)
        return grad, None


def errors_of(model, batches):
    with ThreadPoolExecutor(len(batches)) as threads:
        passes = [threads.submit(lambda batch=batch: loss_of(model, batch).backward()) for batch in batches]
        return [error for each in passes if (error := each.exception(timeout=60)) is not None]


def meet_before(module, barrier):
    return module.register_forward_hook(lambda module, args, output: Meeting.apply(output, barrier))


@pytest.mark.parametrize("name", ["mlp", "t5"])
def test_gradients_of_overlapping_backward_passes_are_summed(name):
    plain, batches = build(name, dtype=torch.float64)
    sparse = sparsify(copy.deepcopy(plain), BUDGET, "random")
    for batch in batches[:THREADS]:
        loss_of(plain, batch).backward()
    for module in [module for module in sparse.modules() if type(module) is MaskedLinear]:
        meet_before(module, threading.Barrier(THREADS))
    assert not errors_of(sparse, batches[:THREADS])
    for tensor in get_engine(sparse).tensors:
        expected = plain.get_parameter(tensor.name).grad
        if tensor.count and expected is not None:
            torch.testing.assert_close(sparse.sparse_values.grad[tensor.slots], expected.take(tensor.indices))


def test_a_selection_that_another_pass_overlaps_is_an_error_and_not_half_a_gradient():
    model, batches = build("mlp", dtype=torch.float64)
    sparsify(model, BUDGET, "id3", steps=3)
    handle = meet_before(model.second, threading.Barrier(2))
    errors = errors_of(model, batches[:2])
    assert [type(error) for error in errors] == [SparsifyError]
    assert "ran at the same time, in several threads" in str(errors[0])
    assert summary(model).unmasked == BUDGET // 3
    handle.remove()
    model.zero_grad()  # drops these entries: one of the next passes masks them, and one selects anew
    assert {type(error) for error in errors_of(model, batches[:2])} <= {SparsifyError}
    assert not errors_of(model, batches[:2]), "the step has its entries"


def test_a_backward_pass_that_failed_in_one_thread_does_not_hold_up_another():
    model, batches = sparsified("mlp", BUDGET, steps=3)
    twin = copy.deepcopy(model)
    failing = model.second.register_full_backward_hook(lambda *_: 1 / 0)
    (error,) = errors_of(model, batches[:1])
    assert isinstance(error, ZeroDivisionError)
    failing.remove()
    for each in (model, twin):
        loss_of(each, batches[1]).backward()
    assert unmasked_sets(model) == unmasked_sets(twin)
    assert torch.equal(model.sparse_values.grad, twin.sparse_values.grad)


def test_failed_backward_passes_leave_nothing_behind():
    model, batches = sparsified("mlp", BUDGET, steps=3)
    failing = model.second.register_full_backward_hook(lambda *_: 1 / 0)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            loss_of(model, batches[0]).backward()
    failing.remove()
    loss_of(model, batches[1]).backward()
    assert not get_engine(model)._begun
