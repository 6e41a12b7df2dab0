"""Screening a product on a GPU: the candidates are those of the product multiplied out, whatever its factors are."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import KINDS, exact, factors, seeded

from sparsify.core.importance import D3
from sparsify.kernels.candidates import Candidates, Factors
from sparsify.kernels.select import select_product

triton_norm_bound = pytest.importorskip("sparsify.kernels.triton.norm_bound", reason="Triton is not installed")
pytestmark = pytest.mark.usefixtures("device")

SIZE, LIMIT, OFFSET = 20, 40, 1000
# an interpreted kernel takes seconds
EXAMPLES = pytest.mark.parametrize("examples", [6, pytest.param(40, marks=pytest.mark.slow)])
EDGES = st.sampled_from([1, 2, 31, 33, 127, 128, 129, 150])
INTEGERS = {
    "few numbers": lambda shape, generator: torch.randint(-2, 3, shape, generator=generator),
    "many numbers": lambda shape, generator: torch.randint(-100, 101, shape, generator=generator),
    "one number": lambda shape, generator: torch.ones(shape),
    "few tokens": lambda shape, generator: (
        torch.randint(-9, 10, shape, generator=generator)
        * (torch.rand(shape[0], 1, generator=generator) < 0.1)
    ),
    "zero": lambda shape, generator: torch.zeros(shape),
}  # fmt: skip


@pytest.fixture
def rough_units(monkeypatch):
    """Triton's interpreter cuts float32 numbers off as matrix units may."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    multiply = interpreter.InterpreterBuilder.create_dot

    def create_dot(self, a, b, total, precision, *options):
        if a.data.dtype == np.float32 and "TF32" in str(precision):
            a, b = (
                interpreter.TensorHandle((x.data.view(np.uint32) & 0xFFFFE000).view(np.float32), x.dtype)
                for x in (a, b)
            )
        return multiply(self, a, b, total, precision, *options)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def offer(importance, factors, threshold=-torch.inf, room=1100):
    """The candidates once a product was offered to none, and the gradient of the unmasked entries."""
    numel = factors.weight.numel()
    candidates = Candidates(SIZE, LIMIT, LIMIT + room, OFFSET + numel, torch.float32, factors.left.device)
    candidates.threshold.fill_(threshold)
    return candidates, select_product(candidates, importance, factors)


def some_factors(kind, tokens, rows, cols, dtype, seed):
    """Factors whose product is exact in any precision, of which one is strided; a weight; a tenth of it is unmasked."""
    generator = seeded(seed)
    left, right = (INTEGERS[kind]((tokens, width), generator).to(dtype) for width in (rows, cols))
    weight = torch.randint(-3, 4, (rows, cols), generator=generator).to(dtype)
    unmasked = torch.randperm(rows * cols, generator=generator)[: rows * cols // 10]
    excluded = torch.cat([unmasked, torch.arange(cols)])
    return Factors(left.t().contiguous().t(), right, weight, OFFSET, unmasked, excluded)


@EXAMPLES
def test_the_best_of_a_product_are_those_of_the_product_multiplied_out(examples):
    """With thresholds at exact scores, more ties than find room, and no threshold at all."""

    @settings(max_examples=examples)
    @given(
        kind=st.sampled_from(sorted(INTEGERS)), tokens=st.sampled_from([1, 63, 64, 65, 130]), rows=EDGES, cols=EDGES,
        dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 999),
        exp=st.sampled_from([0.0, 1.0, 2.0]), rank=st.sampled_from([None, 0, 3, 20, 500]),
    )  # fmt: skip
    def hold(kind, tokens, rows, cols, dtype, seed, exp, rank):
        factors, importance = some_factors(kind, tokens, rows, cols, dtype, seed), D3(exp=exp)
        product = exact(factors.left, factors.right).float()
        scores = importance.score(factors.weight.float(), product).view(-1).index_fill(0, factors.excluded, 0)
        ranked = scores.sort(descending=True, stable=True)
        threshold = -torch.inf if rank is None else float(ranked.values[min(rank, len(scores) - 1)])
        candidates, unmasked = offer(importance, factors, threshold)
        assert torch.equal(unmasked, product.take(factors.unmasked))
        number = int(candidates.count[0])
        ids, *parts = (array[:number] for array in candidates.arrays)
        places = ids - OFFSET
        expected = scores.take(places), product.take(places), factors.weight.float().take(places)
        assert all(torch.equal(*pair) for pair in zip(parts, expected, strict=True))
        reaching = int(((scores > 0) & (scores >= threshold)).sum())
        best = ranked.indices[: min(SIZE, reaching)]
        assert set(best.tolist()) <= set(places.tolist())
        assert number == (reaching if reaching <= LIMIT else number) <= LIMIT
        assert candidates.finite
        assert candidates.count.tolist() == [number, 0, number, 0, 0]
        assert threshold <= candidates.threshold <= max(threshold, ranked.values[min(SIZE, len(scores)) - 1])

    hold()


@EXAMPLES
@pytest.mark.usefixtures("rough_units")
def test_no_entry_is_missed_whatever_the_factors_are(examples):
    @settings(max_examples=examples)
    @given(
        kind=st.sampled_from(sorted(KINDS)), tokens=st.sampled_from([1, 45, 300]), rows=EDGES, cols=EDGES,
        dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 999),
        share=st.sampled_from([0.5, 0.99, 1.0]),
    )  # fmt: skip
    def hold(kind, tokens, rows, cols, dtype, seed, share):
        left, right = factors(kind, tokens, rows, cols, dtype, seed)
        if dtype == torch.bfloat16:  # the interpreter misreads its denormal numbers
            left, right = (part.masked_fill(part.abs() < 2.0**-126, 0) for part in (left, right))
        weight, nothing = torch.zeros(rows, cols), torch.empty(0, dtype=torch.int64)
        size = exact(left, right).abs().view(-1)
        threshold = float(size.quantile(share).float())
        candidates, _ = offer(D3(), Factors(left, right, weight, 0, nothing, nothing), threshold)
        off = (exact(left.abs(), right.abs()) * tokens * 2**-23).view(-1) + tokens * 2**-120
        best = size.sort(descending=True).indices[:SIZE]
        sure = best[size[best] - off[best] > max(threshold, float((size - off).sort().values[-min(SIZE, len(size))]))]
        assert set(sure.tolist()) <= set(candidates.ids[: candidates.count[0]].tolist())

    hold()


def test_what_the_units_cut_off_is_allowed_for(rough_units):
    nothing, parts = torch.empty(0, dtype=torch.int64), [torch.full((64, 3), 1 + 2**-10 - 2**-22) for _ in range(2)]
    entries = Factors(*parts, torch.zeros(3, 3), 0, nothing, nothing)
    candidates, _ = offer(D3(), entries, float(exact(*parts)[0, 0]) * (1 - 1e-6))
    assert candidates.count[0] == 9


def test_what_the_norms_rule_out_is_not_multiplied(monkeypatch):
    """A wrong number in a tile that is not multiplied is not seen: here the packed factor has them."""
    generator = seeded(0)
    left, right = (torch.randn(64, 256, generator=generator) for _ in range(2))
    left[:, ::2] *= 1e-3  # every second column
    wanted = torch.arange(10) * 257
    whole = Factors(left, right, torch.zeros(256, 256), 0, wanted, wanted)
    threshold = float(exact(left, right).abs().view(-1).sort().values[-30])
    candidates, _ = offer(D3(), whole, threshold)
    found = set(candidates.ids[: candidates.count[0]].tolist())

    pack_rightly = triton_norm_bound.pack

    def pack(left, right, order):
        packed = pack_rightly(left, right, order)
        packed.values[128:256] = torch.nan  # the rows of small norms
        return packed

    monkeypatch.setattr(triton_norm_bound, "pack", pack)
    again, _ = offer(D3(), whole, threshold)
    assert len(found) > 10
    assert set(again.ids[: again.count[0]].tolist()) == found
    assert again.finite


def test_a_second_round_has_room_for_what_the_first_had_not(monkeypatch):
    left, right = factors("random", 50, 150, 150)
    nothing, noted, last = torch.empty(0, dtype=torch.int64), [], triton_norm_bound._screen_again

    class Last:
        def __getitem__(self, grid):
            def launch(*args, **options):
                noted.append(args[5][3:].tolist())  # how many entries, and in which round
                last[grid](*args, **options)

            return launch

    monkeypatch.setattr(triton_norm_bound, "_screen_again", Last())
    candidates, _ = offer(D3(), Factors(left, right, torch.zeros(150, 150), 0, nothing, nothing), 1e-3)
    ((number, second),) = noted
    assert number < 1100
    assert second
    best = exact(left, right).abs().view(-1).topk(SIZE).indices
    assert set(best.tolist()) <= set(candidates.ids[: candidates.count[0]].tolist())


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_not_finite_is_noticed(bad, side):
    parts = factors("random", 33, 20, 50)
    parts[side][32, 19] = bad
    candidates, unmasked = offer(D3(), Factors(*parts, torch.zeros(20, 50), 0, *[torch.tensor([3])] * 2))
    assert not candidates.finite
    assert unmasked.shape == (1,)


def test_a_product_that_overflows_is_noticed_and_large_factors_alone_are_not():
    nothing = torch.empty(0, dtype=torch.int64)
    for size, finite in ((1e10, True), (1e21, False)):  # of 1e25, no square is finite
        parts = torch.full((8, 20), 1e25), torch.full((8, 30), size)
        candidates, _ = offer(D3(), Factors(*parts, torch.zeros(20, 30), 0, nothing, nothing))
        assert bool(candidates.finite) == finite
        assert not finite or int(candidates.count[0]) == SIZE


def test_entries_beyond_the_range_of_32_bits_are_found():
    """One tile, which has the last row of a weight of 2.1 billion entries, though all but its memory is small."""
    rows, cols, last = 2**21 + 1, 1040, 2**21
    order = torch.cat([torch.full((rows,), last), rows + torch.arange(cols)])
    norms = torch.full((rows + cols,), 3.0)
    values = torch.zeros(128 + 1152, 64)
    values[0, 0], values[128 + 1030, 0] = 3.0, 2.0
    places = torch.zeros(rows + cols, dtype=torch.int32)
    places[rows:] = torch.arange(cols)
    marks = torch.zeros(rows * cols // 32 + 1, dtype=torch.int32)
    unmasked = torch.tensor([last * cols + 1029])
    triton_norm_bound._mark[(1,)](marks, unmasked, 1, block=16)
    found, count = torch.zeros(10, dtype=torch.int64), torch.zeros(5, dtype=torch.int64)
    at = 1030 // 128 * 8  # with the 8 rows of tiles that go together
    program = partial(
        triton_norm_bound._screen.__getitem__((at + 1,)), tile=128, depth=64, group=8, widens=False, second=0
    )
    rest = torch.full((1,), 5.0), torch.ones(1, dtype=torch.int8), 1.0, 1.0, 0.0, 0.0
    program(values, order, norms, marks, found, 10, count, *rest, rows, cols, 128, 64)
    assert count[3] == 1
    assert found[0] == last * cols + 1030
