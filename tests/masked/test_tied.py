"""The gradient of a table that is an output layer too: a product and some rows are their sum, in whichever form."""

import pytest
import torch

from sparsify.masked.gradients import DenseGradient, Product, TiedGradient

ROWS, COLS, TOKENS = 12, 10, 4


def parts(seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right, values = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((TOKENS, ROWS), (TOKENS, COLS), (3, COLS))
    )
    return Product(left, right), DenseGradient(values, torch.tensor([1, 4, 11]))


def sum_of(*gradients):
    total = torch.zeros(ROWS, COLS, dtype=torch.float64)
    for gradient in gradients:
        gradient = gradient.dense()
        total[slice(None) if gradient.rows is None else gradient.rows] += gradient.values
    return total


def test_a_product_and_rows_are_kept_apart_and_are_their_sum():
    product, rows = parts()
    expected = sum_of(product, rows)
    tied = product.held().add(rows)
    assert isinstance(tied, TiedGradient)
    assert tied.numel == ROWS * COLS
    at = torch.tensor([0, 10, 47, 119, 47])
    torch.testing.assert_close(tied.take(at), expected.view(-1)[at])
    torch.testing.assert_close(tied.dense().values, expected)


@pytest.mark.parametrize("kind", ["rows", "product", "dense", "tied"])
def test_whatever_else_a_table_is_used_for_adds_up(kind):
    (product, rows), (other, more) = parts(), parts(1)
    added = {"rows": more, "product": other, "dense": other.dense(), "tied": TiedGradient(other, more)}[kind]
    expected = sum_of(product, rows, added)
    torch.testing.assert_close(TiedGradient(product, rows).add(added).dense().values, expected)


def test_rows_are_alone_where_no_token_reached_the_output_layer():
    _, rows = parts()
    nothing = Product(torch.zeros(0, ROWS, dtype=torch.float64), torch.zeros(0, COLS, dtype=torch.float64))
    assert nothing.held().add(rows) is rows
