"""The gradients of a weight's uses add up, as factors where these are small and multiplied out otherwise."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsify import sparsify
from sparsify.masked.gradients import DenseGradient, Product
from sparsify.masked.recompute import recomputable, release_memory


def product(tokens, rows=12, cols=10, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(tokens, width, generator=generator, dtype=dtype) for width in (rows, cols))
    return Product(left, right)


def dense(gradient):
    return gradient.dense().values


@pytest.mark.parametrize(("tokens", "waits"), [(0, True), (3, True), (10, True), (11, False), (100, False)])
def test_the_sum_of_two_products_waits_as_a_product_while_its_factors_are_small(tokens, waits):
    first, second = product(tokens), product(tokens, seed=1)
    expected = dense(first) + dense(second)
    total = first.held().add(second)
    assert isinstance(total, Product) == waits
    torch.testing.assert_close(dense(total), expected)


def test_sums_with_other_types_and_with_multiplied_gradients_are_multiplied_out():
    first, short, multiplied = product(3), product(3, dtype=torch.float32, seed=1), DenseGradient(torch.ones(12, 10))
    for one, other in ((first, short), (short, first), (first, multiplied), (multiplied, first)):
        expected = dense(one) + dense(other)
        total = one.held().add(other)
        assert not isinstance(total, Product)
        torch.testing.assert_close(dense(total), expected)


def test_what_is_held_stays_when_the_memory_of_its_factors_is_used_again():
    h = [torch.randn(3, 10, requires_grad=True) for _ in range(2)]
    first, second = (recomputable(F.gelu(x)) for x in h)
    one = Product(torch.randn(3, 12), first())
    expected, held = dense(one), one.held()
    second()
    assert not torch.equal(dense(one), expected), "made in the same memory"
    assert torch.equal(dense(held), expected)
    release_memory()


def test_what_is_held_takes_no_memory_of_its_own_otherwise():
    one = product(3)
    held = one.held()
    assert held.left is one.left
    assert held.right is one.right


class Twice(nn.Module):
    """A layer that is used twice, each time behind an activation that is made again in backward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x):
        return self.second(F.gelu(self.first(x))) * self.second(F.gelu(self.first(2 * x)))


@pytest.mark.parametrize("tokens", [4, 400])
def test_a_layer_that_is_used_twice_is_trained_by_the_sum(tokens):
    plain = Twice().double()
    model = sparsify(copy.deepcopy(plain), 24 * 25 * 2, steps=1)
    x = torch.randn(tokens, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for trained in (plain, model):
        optimizer = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.1)
        trained(x).square().mean().backward()
        optimizer.step()
    expected = plain.state_dict()
    for name in expected:
        torch.testing.assert_close(model.state_dict()[name], expected[name], rtol=1e-6, atol=1e-9)
