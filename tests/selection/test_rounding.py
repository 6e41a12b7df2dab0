"""How far a selection in bfloat16 may be from that of exact products: by the rounding of one gradient, and no more."""

import pytest
import torch
from torch import nn

from sparsify import D3, get_engine, sparsify

ROUNDING = 2**-7  # of a gradient in bfloat16, twice: it is rounded up, and what it is compared with down
WAYS = ["a CPU", "a simulated device", pytest.param("a GPU", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("way", WAYS)
def test_no_selected_entry_is_worse_than_a_left_out_one_by_more_than_the_rounding_of_a_gradient(way, monkeypatch):
    if way == "a GPU" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU here")
    if way == "a simulated device":
        monkeypatch.setattr("sparsify.core.devices.AHEAD", ("cpu",))
    layer, x, grad = nn.Linear(300, 200, bias=False), torch.randn(50, 300), torch.randn(50, 200)
    layer, x, grad = (part.to("cuda" if way == "a GPU" else "cpu", torch.bfloat16) for part in (layer, x, grad))
    exact = D3().score(layer.weight.detach().double(), grad.double().t() @ x.double()).flatten()
    sparsify(layer, 2_000, "id3", steps=1)
    layer(x).backward(grad)
    chosen = torch.zeros_like(exact, dtype=torch.bool).index_fill_(0, get_engine(layer).entries.ids, True)
    assert chosen.sum() == 2_000
    threshold = exact.topk(2_000).values[-1]
    assert exact[chosen].min() >= threshold * (1 - ROUNDING)
    assert exact[~chosen].max() <= threshold * (1 + ROUNDING)
    assert (chosen != (exact >= threshold)).sum() < 40  # a hundredth of both sets


@pytest.mark.parametrize("by_dot_products", [True, False])
def test_in_a_step_that_selects_nothing_only_the_whole_product_rounds_a_gradient(by_dot_products, monkeypatch):
    monkeypatch.setattr("sparsify.selection.screening.sampling_pays", lambda *_: by_dot_products)
    layer, x, grad = nn.Linear(300, 200, bias=False), torch.randn(50, 300), torch.randn(50, 200)
    layer, x, grad = (part.bfloat16() for part in (layer, x, grad))
    sparsify(layer, 200, "random")
    layer(x).backward(grad)
    found = layer.sparse_values.grad
    assert found.equal(found.bfloat16().float()) == (not by_dot_products)
    exact = (grad.double().t() @ x.double()).take(get_engine(layer).entries.ids)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
