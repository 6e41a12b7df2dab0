"""One tensor's indices, slots and base values, and the gradients of its uses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import Recorder
from torch import nn

from sparsify.masked.tensor import Gradient, MaskedTensor, as_matrix, sum_rows

ROWS, COLS = 5, 3


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def dense(gradient):
    """A gradient as one matrix (ROWS, COLS)."""
    total = torch.zeros(ROWS, COLS, dtype=gradient.values.dtype)
    total[slice(None) if gradient.rows is None else gradient.rows] = gradient.values
    return total


def by_rows(rows, **options):
    return Gradient(torch.randn(len(rows), COLS).double(), torch.tensor(rows), **options)


row_sets = st.one_of(st.none(), st.sets(st.integers(0, ROWS - 1), min_size=1).map(sorted))
index_sets = st.sets(st.integers(0, ROWS * COLS - 1)).map(lambda chosen: torch.tensor(list(chosen), dtype=torch.int64))


def drawn(rows, **options):
    return Gradient(torch.randn(ROWS, COLS).double(), **options) if rows is None else by_rows(rows, **options)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(rows=row_sets, indices=index_sets, owned=st.booleans())
def test_take_and_clear_are_those_of_the_dense_gradient(rows, indices, owned):
    gradient = drawn(rows, owned=owned)
    shared, before = gradient.values, gradient.values.clone()
    expected = dense(gradient)
    assert torch.equal(gradient.take(indices), expected.take(indices))
    gradient.clear(indices)
    expected.view(-1)[indices] = 0
    assert torch.equal(dense(gradient), expected)
    if not owned:
        assert torch.equal(shared, before)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(first=row_sets, second=row_sets, owned=st.tuples(st.booleans(), st.booleans()))
def test_a_sum_is_that_of_the_dense_gradients(first, second, owned):
    gradients = [drawn(rows, owned=own) for rows, own in zip((first, second), owned, strict=True)]
    expected = dense(gradients[0]) + dense(gradients[1])
    shared = [(gradient.values, gradient.values.clone()) for gradient in gradients]
    total = gradients[0].add(gradients[1])
    assert torch.equal(dense(total), expected)
    assert (total.rows is None) == (first is None or second is None)
    if total.rows is not None:
        assert total.rows.tolist() == sorted({*first, *second})
    for (values, before), own in zip(shared, owned, strict=True):
        assert own or torch.equal(values, before)


def test_a_sum_is_owned_so_that_clearing_it_needs_no_copy():
    total = Gradient(torch.ones(ROWS, COLS), owned=False).add(Gradient(torch.ones(ROWS, COLS), owned=False))
    values = total.values
    total.clear(torch.tensor([0]))
    assert total.values is values


@pytest.mark.parametrize(
    "values",
    [torch.ones(1, COLS).expand(ROWS, COLS), torch.randn(COLS, ROWS).t(), torch.randn(ROWS, 2 * COLS)[:, ::2]],
    ids=["expanded", "transposed", "strided"],
)
@pytest.mark.parametrize("owned", [True, False])
def test_any_memory_layout_can_be_cleared_and_added_to(values, owned):
    before, indices = values.clone(), torch.tensor([1, ROWS * COLS - 1])
    gradient = Gradient(values, owned=owned)
    assert torch.equal(gradient.take(indices), before.take(indices))
    gradient.clear(indices)
    assert torch.equal(gradient.values, before.flatten().index_fill(0, indices, 0).view(ROWS, COLS))
    total = Gradient(values, owned=owned).add(Gradient(torch.ones(ROWS, COLS)))
    assert torch.equal(total.values, before + 1)
    assert torch.equal(values, before)


def test_rows_are_summed_where_they_are_the_same():
    gradient = sum_rows(torch.tensor([4, 1, 4]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert gradient.rows.tolist() == [1, 4]
    assert gradient.values.tolist() == [[3, 4], [6, 8]]


@pytest.mark.parametrize(
    ("shape", "matrix"), [((), (1, 1)), ((4,), (1, 4)), ((2, 3), (2, 3)), ((2, 3, 4), (6, 4)), ((2, 1, 3, 4), (6, 4))]
)
def test_every_shape_is_a_matrix_with_the_last_dimension_kept(shape, matrix):
    tensor = torch.randn(shape)
    assert as_matrix(tensor).shape == matrix
    assert torch.equal(as_matrix(tensor).flatten(), tensor.flatten())


@pytest.fixture
def tensor():
    owner = nn.Linear(COLS, ROWS)
    masked = MaskedTensor(owner, "weight", "layer.weight", 0, Recorder())
    masked.register_buffers()
    return masked


def test_buffers_belong_to_the_module_and_start_empty(tensor):
    assert tensor.buffer_names == ("weight_indices", "weight_slots", "weight_base")
    assert tensor.count == 0
    assert set(tensor.owner.state_dict()) == {"weight", "bias", *tensor.buffer_names}
    tensor.owner.to(torch.float64)
    assert tensor.base.dtype == torch.float64
    assert tensor.indices.dtype == tensor.slots.dtype == torch.int64
    tensor.remove_buffers()
    assert set(tensor.owner.state_dict()) == {"weight", "bias"}


def test_entries_are_appended_in_order_of_unmasking_with_their_values_as_the_base(tensor):
    weight = tensor.parameter.detach().clone()
    tensor.append(torch.tensor([7, 2]), torch.tensor([1, 0]))
    tensor.append(torch.tensor([4]), torch.tensor([2]))
    assert tensor.indices.tolist() == [7, 2, 4]
    assert tensor.slots.tolist() == [1, 0, 2]
    assert torch.equal(tensor.base, weight.take(tensor.indices))
    assert torch.equal(tensor.parameter, weight)


def test_the_effective_weight_is_base_plus_delta_at_the_indices_and_untouched_elsewhere(tensor):
    weight = tensor.parameter.detach().clone()
    tensor.append(torch.tensor([7, 2]), torch.tensor([1, 0]))
    for delta in (torch.tensor([0.5, -0.25]), torch.tensor([1e-3, 2.0]), torch.zeros(2)):
        tensor.collector.values = delta
        tensor.write_effective()
        expected = weight.clone()
        expected.view(-1)[7] += delta[1]
        expected.view(-1)[2] += delta[0]
        assert torch.equal(tensor.parameter, expected)


def test_a_short_dtype_gets_the_float32_sum_rounded_once():
    owner = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        owner.weight.fill_(1.0)
    tensor = MaskedTensor(owner, "weight", "weight", 0, Recorder())
    tensor.register_buffers()
    tensor.append(torch.tensor([0]), torch.tensor([0]))
    tensor.collector.values = torch.tensor([2.0**-9])  # lost in bfloat16
    tensor.write_effective()
    assert owner.weight.item() == 1
    tensor.collector.values = torch.tensor([2.0**-8 + 2.0**-12])  # rounds up; 2^-8 alone would be a tie, to even, down
    tensor.write_effective()
    assert owner.weight.item() == 1 + 2.0**-7


def test_a_frozen_row_is_excluded():
    owner = nn.Embedding(ROWS, COLS, padding_idx=2)
    tensor = MaskedTensor(owner, "weight", "weight", 0, None, frozen_row=2)
    assert tensor.never_candidates.tolist() == list(range(2 * COLS, 3 * COLS))
    assert tensor.num_candidates == (ROWS - 1) * COLS
