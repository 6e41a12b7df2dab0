"""One tensor's indices, slots and base values, and the gradients of its uses."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from recorder import Recorder
from torch import nn

from sparsify.masked.gradients import DenseGradient, as_matrix, sum_rows
from sparsify.masked.tensor import MaskedTensor

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
    return DenseGradient(torch.randn(len(rows), COLS).double(), torch.tensor(rows), **options)


row_sets = st.one_of(st.none(), st.sets(st.integers(0, ROWS - 1), min_size=1).map(sorted))
index_sets = st.sets(st.integers(0, ROWS * COLS - 1)).map(lambda chosen: torch.tensor(list(chosen), dtype=torch.int64))


def drawn(rows, **options):
    return DenseGradient(torch.randn(ROWS, COLS).double(), **options) if rows is None else by_rows(rows, **options)


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


@pytest.mark.parametrize("rows", [None, torch.tensor([0, 3])])
def test_a_sum_of_a_short_type_and_a_longer_one_is_not_rounded_to_the_short_one(rows):
    short = DenseGradient(torch.full((ROWS, COLS), 256.0, dtype=torch.bfloat16))
    longer = DenseGradient(torch.full((ROWS if rows is None else len(rows), COLS), 0.5), rows)
    for total in (short.add(longer), longer.add(DenseGradient(torch.full((ROWS, COLS), 256.0, dtype=torch.bfloat16)))):
        assert total.values.dtype == torch.float32
    assert short.values[0, 0] == 256.5


def test_a_sum_is_owned_so_that_clearing_it_needs_no_copy():
    total = DenseGradient(torch.ones(ROWS, COLS), owned=False).add(DenseGradient(torch.ones(ROWS, COLS), owned=False))
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
    gradient = DenseGradient(values, owned=owned)
    assert torch.equal(gradient.take(indices), before.take(indices))
    gradient.clear(indices)
    assert torch.equal(gradient.values, before.flatten().index_fill(0, indices, 0).view(ROWS, COLS))
    total = DenseGradient(values, owned=owned).add(DenseGradient(torch.ones(ROWS, COLS)))
    assert torch.equal(total.values, before + 1)
    assert torch.equal(values, before)


def test_rows_are_summed_where_they_are_the_same():
    gradient = sum_rows(torch.tensor([4, 1, 4]), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert gradient.rows.tolist() == [1, 4]
    assert gradient.values.tolist() == [[3, 4], [6, 8]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padded", [False, True])
def test_many_short_gradients_of_a_row_are_summed_in_float32(dtype, padded, monkeypatch):
    monkeypatch.setattr("sparsify.masked.gradients.CAST_ENTRIES", 100)
    rows, values = torch.arange(5000) % 2, torch.ones(5000, COLS, dtype=dtype)
    gradient = sum_rows(rows, values, padded=padded)
    places = torch.arange(2 * COLS)
    assert gradient.take(places).tolist() == [2500] * 2 * COLS
    more = gradient.add(sum_rows(rows[:1], values[:1]))
    assert more.take(places).tolist() == [2501] * COLS + [2500] * COLS


def test_float32_sums_of_a_few_rows_leave_a_whole_short_gradient_in_its_dtype():
    for order in (1, -1):
        whole = DenseGradient(torch.ones(ROWS, COLS, dtype=torch.bfloat16))
        rows = sum_rows(torch.tensor([1, 1]), torch.full((2, COLS), 0.5, dtype=torch.bfloat16))
        first, second = (whole, rows)[::order]
        total = first.add(second)
        assert total.values.dtype == torch.bfloat16
        assert total.values[1].tolist() == [2] * COLS


@pytest.mark.parametrize(
    ("shape", "matrix"), [((), (1, 1)), ((4,), (1, 4)), ((2, 3), (2, 3)), ((2, 3, 4), (6, 4)), ((2, 1, 3, 4), (6, 4))]
)
def test_every_shape_is_a_matrix_with_the_last_dimension_kept(shape, matrix):
    tensor = torch.randn(shape)
    assert as_matrix(tensor).shape == matrix
    assert torch.equal(as_matrix(tensor).flatten(), tensor.flatten())


def test_a_frozen_row_is_excluded():
    owner = nn.Embedding(ROWS, COLS, padding_idx=2)
    tensor = MaskedTensor(0, owner, "weight", "weight", 0, None, frozen_row=2)
    assert tensor.never_candidates.tolist() == list(range(2 * COLS, 3 * COLS))
    assert tensor.num_candidates == (ROWS - 1) * COLS


def masked(owner):
    recorder = Recorder()
    recorder.buffers.register(1, 10, owner.weight.dtype, owner.weight.device)
    return MaskedTensor(0, owner, "weight", "layer.weight", 0, recorder)


def test_a_tensor_sees_its_part_of_the_buffers_in_its_own_dtype():
    owner = nn.Linear(COLS, ROWS)
    tensor = masked(owner)
    assert tensor.count == 0
    tensor.collector.buffers.append(
        [2], torch.tensor([7, 2]), torch.tensor([1, 0]), owner.weight.take(torch.tensor([7, 2]))
    )
    tensor.collector.values = torch.tensor([0.5, -0.25])
    assert tensor.count == 2
    assert tensor.indices.tolist() == [7, 2]
    assert tensor.delta.tolist() == [-0.25, 0.5]
    owner.to(torch.float64)
    assert torch.equal(tensor.base, owner.weight.take(tensor.indices))


def test_values_are_written_at_the_indices_and_nowhere_else():
    owner = nn.Linear(COLS, ROWS).to(torch.bfloat16)
    expected = owner.weight.detach().clone()
    tensor = masked(owner)
    tensor.collector.buffers.append([2], torch.tensor([7, 2]), torch.tensor([1, 0]), torch.zeros(2))
    tensor.write(torch.tensor([1 + 2.0**-8 + 2.0**-12, 3.0]))  # rounded once: 1 + 2^-8 alone would be a tie
    expected.view(-1)[7], expected.view(-1)[2] = 1 + 2.0**-7, 3
    assert torch.equal(owner.weight, expected)


@pytest.mark.parametrize("rows", [[3], [1, 1], [4, 0, 4, 2, 4, 0], [2, 2, 1, 2]], ids=str)
def test_rows_are_summed_without_asking_how_many_differ(rows):
    values, places = torch.randn(len(rows), COLS).double(), torch.arange(ROWS * COLS)
    expected = sum_rows(torch.tensor(rows), values)
    gradient = sum_rows(torch.tensor(rows), values, padded=True)
    assert gradient.rows.tolist() == sorted(set(rows)) + [max(rows)] * (len(rows) - len(set(rows)))
    torch.testing.assert_close(gradient.take(places), expected.take(places))
    for each in (gradient, expected):
        each.clear(places[::2])
    torch.testing.assert_close(gradient.take(places), expected.take(places))
    other, whole = by_rows([0, 4]), torch.randn(ROWS, COLS).double()
    sums = [each.add(other).add(DenseGradient(whole.clone())) for each in (gradient, expected)]
    torch.testing.assert_close(sums[0].values, sums[1].values)
