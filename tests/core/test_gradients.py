"""The forms of a weight's gradient: their sums are those of the dense gradients, in any type and layout of memory."""

import pytest
import torch

from sparsify.core.gradients import DenseGradient, Product, sum_rows
from sparsify.selection.screening import RowBlocks

ROWS, COLS = 12, 10
EVERY = torch.arange(ROWS * COLS)


def product(tokens, dtype=torch.float64):
    return Product(torch.randn(tokens, ROWS, dtype=dtype), torch.randn(tokens, COLS, dtype=dtype))


def of_rows(rows=None):
    """A dense gradient of some rows, or of all."""
    size, rows = (ROWS, None) if rows is None else (len(rows), torch.tensor(rows))
    return DenseGradient(torch.randn(size, COLS).double(), rows)


def tied(rows):
    """That of a table that some rows were looked up in."""
    factors = product(4)
    return Product(factors.left, factors.right, of_rows(rows))


def sum_of(*gradients):
    """The sum (ROWS, COLS) of gradients that are left as they are."""
    total = torch.zeros(ROWS, COLS, dtype=torch.float64)
    for gradient in (gradient.dense() for gradient in gradients):
        rows = torch.arange(ROWS) if gradient.rows is None else gradient.rows
        total.index_add_(0, rows, gradient.values.double())
    return total


@pytest.mark.parametrize("at_once", [1, 5, ROWS])
def test_a_tied_table_is_multiplied_out_some_rows_at_a_time(at_once):
    gradient, indices, excluded = tied([0, 4, 11]), torch.tensor([0, 45, 119]), torch.tensor([3, 45])
    expected, blocks = sum_of(gradient), RowBlocks(gradient, indices, excluded)
    parts = [blocks.rows(start, min(start + at_once, ROWS)) for start in range(0, ROWS, at_once)]
    torch.testing.assert_close(blocks.taken, expected.take(indices))
    expected.view(-1)[excluded] = 0
    torch.testing.assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3])])
def test_a_sum_is_in_the_longer_of_the_types_that_gradients_came_in(rows, order):
    short = DenseGradient(torch.full((ROWS, COLS), 256.0, dtype=torch.bfloat16))
    longer = DenseGradient(torch.full((ROWS if rows is None else len(rows), COLS), 0.5), rows)
    first, second = (short, longer)[::order]
    assert first.add(second).values[0, 0] == 256.5
    whole = DenseGradient(torch.ones(ROWS, COLS, dtype=torch.bfloat16))
    some = sum_rows(torch.tensor([1, 1]), torch.full((2, COLS), 0.5, dtype=torch.bfloat16))  # in float32
    first, second = (whole, some)[::order]
    total = first.add(second).values
    assert total.dtype == torch.bfloat16
    assert total[1].tolist() == [2] * COLS


@pytest.mark.parametrize("owned", [True, False])
@pytest.mark.parametrize("values", [
    torch.ones(1, COLS).expand(ROWS, COLS), torch.randn(COLS, ROWS).t(), torch.randn(ROWS, 2 * COLS)[:, ::2]
], ids=["expanded", "transposed", "strided"])  # fmt: skip
def test_any_memory_layout_can_be_cleared_and_added_to(values, owned):
    before, indices = values.clone(), torch.tensor([1, ROWS * COLS - 1])
    gradient = DenseGradient(values, owned=owned)
    assert torch.equal(gradient.take(indices), before.take(indices))
    gradient.clear(indices)
    assert torch.equal(gradient.values, before.flatten().index_fill(0, indices, 0).view(ROWS, COLS))
    total = DenseGradient(values, owned=owned).add(DenseGradient(torch.ones(ROWS, COLS)))
    assert torch.equal(total.values, before + 1)
    assert torch.equal(values, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_short_gradients_of_a_row_are_summed_in_float32(dtype):
    rows, values = torch.arange(5000) % 2, torch.ones(5000, COLS, dtype=dtype)
    gradient = sum_rows(rows, values)
    assert gradient.take(EVERY[: 2 * COLS]).tolist() == [2500] * 2 * COLS
    more = gradient.add(sum_rows(rows[:1], values[:1]))
    assert more.take(EVERY[: 2 * COLS]).tolist() == [2501] * COLS + [2500] * COLS


FORMS = {
    "dense": of_rows,
    "rows": lambda: of_rows([1, 4, 11]),
    "product": lambda: product(4),
    "product of another type": lambda: product(3, torch.float32),
    "product of no tokens": lambda: product(0),
    "tied": lambda: tied([0, 4]),
}


@pytest.mark.parametrize("first", FORMS)
@pytest.mark.parametrize("second", FORMS)
def test_any_two_forms_add_up(first, second):
    first, second = FORMS[first](), FORMS[second]()
    expected, total = sum_of(first, second), first.held().add(second)
    torch.testing.assert_close(total.take(EVERY).double(), expected.flatten(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sum_of(total), expected, rtol=1e-6, atol=1e-6)
