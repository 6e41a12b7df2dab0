"""An input that autograd can make again is not kept by the layer, and its gradient is the same to the last bit."""

from copy import deepcopy

import pytest
import torch
from oracle import model_gradients, sparsify_fully
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import assert_close

from sparsify.masked.recompute import recomputable

ROWS, IN, OUT = 6, 5, 4


def written_into(x):
    x.detach().zero_()
    return x


def backward_over(x):
    x.sum().backward()
    return x


def dropout(x):
    torch.manual_seed(1)
    return F.dropout(x, 0.3)


AGAIN = {
    "gelu": F.gelu,
    "silu": F.silu,
    "gated": lambda h: F.silu(h) * h.sin(),
    "broadcast product": lambda h: h * h.sum(0),
    "squared": lambda h: h * h,
}
KEPT = {
    "relu, whose output is kept anyway": F.relu,
    "scaled": lambda h: 2 * h,
    "masked by a constant": lambda h: h * torch.ones(IN),
    "dropout of what was not made": lambda h: dropout(h),
    "dropout of what is made again": lambda h: dropout(F.gelu(h)),
    "dropout of a kept output": lambda h: dropout(F.relu(h)),
    "written into, unknown to autograd": lambda h: written_into(F.gelu(h)),
    "backward is over": lambda h: backward_over(F.gelu(h)),
    "view": lambda h: F.gelu(h).view(2, ROWS // 2, IN),
    "changed in place": lambda h: F.gelu(h).add_(1),
    "detached": lambda h: F.gelu(h).detach(),
    "leaf": lambda h: h,
    "of a checkpointed block": lambda h: checkpoint(F.gelu, h, use_reentrant=False),
}


@pytest.fixture
def h():
    return torch.randn(ROWS, IN, generator=torch.Generator().manual_seed(0), requires_grad=True)


@pytest.mark.parametrize("name", KEPT)
def test_what_cannot_be_made_again_is_kept(h, name):
    assert recomputable(KEPT[name](h)) is None


@pytest.fixture(params=[(), ("cpu",)], ids=["on a CPU", "as on a GPU"])
def place(request, monkeypatch):
    """Where the layer has a node of its own, and where it is a plain one, of a tap, of a large input."""
    monkeypatch.setattr("sparsify.core.devices.AHEAD", request.param)
    monkeypatch.setattr("sparsify.masked.recompute.LARGEST_KEPT", 0)
    return request.param


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("activation", [F.gelu, torch.sin])
def test_a_layer_behind_an_activation_keeps_no_input(activation, autocast, place):
    layer, h = sparsify_fully(nn.Linear(IN, OUT)), torch.randn(64, IN, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = activation(h)
        node = layer(x).grad_fn
    saved = node._raw_saved_mat1 if place else node._raw_saved_tensors[0]
    storage = StorageWeakRef(x.untyped_storage())
    del x
    is_kept = activation is torch.sin
    assert (saved.unpack_hook is None) == is_kept
    assert storage.expired() == (autocast or not is_kept)  # autocast has made another, in the layer's dtype


@pytest.mark.parametrize("largest", [64 * IN, 64 * IN - 1])
@pytest.mark.parametrize("before", [nn.LayerNorm(IN), nn.GELU()], ids=str)
def test_a_layer_on_a_gpu_keeps_a_small_input(before, largest, monkeypatch):
    monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    monkeypatch.setattr("sparsify.masked.recompute.LARGEST_KEPT", largest)
    model = sparsify_fully(nn.Sequential(deepcopy(before), nn.Linear(IN, OUT)))
    node = model(torch.randn(64, IN, requires_grad=True)).grad_fn
    assert (node._raw_saved_mat1.unpack_hook is None) == (largest == 64 * IN)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", AGAIN)
@pytest.mark.parametrize(("autocast", "tolerance"), [(False, 0), (True, 1e-2)])
def test_behind_what_is_made_again_and_cast_again_the_weight_has_the_plain_gradient(h, name, autocast, tolerance):
    layer = sparsify_fully(nn.Linear(IN, OUT))
    weight = layer.weight.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        x = AGAIN[name](h)
        assert recomputable(x) is not None
        layer(x).square().sum().backward()
        F.linear(AGAIN[name](h), weight, layer.bias.detach()).square().sum().backward()
    assert_close(model_gradients(layer)["weight"], weight.grad, tolerance)


class OwnNorm(nn.LayerNorm):
    def forward(self, input):
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, eps=0.5)


def test_behind_a_layer_norm_the_input_is_kept_only_where_its_eps_is_not_known(h):
    known, own, frozen = sparsify_fully(nn.LayerNorm(IN, eps=0.1)), sparsify_fully(OwnNorm(IN)), nn.LayerNorm(IN)
    x = known(h)
    with torch.no_grad():
        assert torch.equal(recomputable(x)(), x)
    assert recomputable(own(h)) is None
    assert recomputable(frozen(h)) is None


@pytest.fixture
def enter_pass(monkeypatch):
    """Makes all threads run a backward pass of this number."""
    return lambda number: monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: number)


def test_passes_that_take_turns_in_one_thread_do_not_share_memory(h, enter_pass):
    x, other = F.gelu(h), F.silu(h)
    again, other_again = recomputable(x), recomputable(other)
    enter_pass(1)
    kept = again()
    enter_pass(2)
    assert torch.equal(other_again(), other)
    assert torch.equal(kept, x)
    enter_pass(1)
    assert torch.equal(again(), x)
