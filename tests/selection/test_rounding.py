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
