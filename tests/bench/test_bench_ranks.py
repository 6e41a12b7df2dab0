"""The benchmark of several ranks, and the formulae that speak of more of them than there are here."""

import json

import pytest
import torch
from rank_models import mlp, own_part
from rank_processes import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from sparsify import get_unmasker, sparsify
from sparsify.bench.ranks import RankMeasurement, make_paper_table, make_table, measure_ranks
from sparsify.bench.scale import LLAMA_70B, at_scale, choosing_bytes, delta_bytes, ring
from sparsify.bench.worker import Settings
from sparsify.cli import make_app
from sparsify.common.ranks import WIDTH
from sparsify.errors import SparsifyError

RANKS, BUDGET, STEPS = 2, 60, 6


class Sent(TorchDispatchMode):
    """Adds up the bytes that this rank sends, by the rule of rings, as torch's collective calls go by."""

    def __init__(self):
        super().__init__()
        self.gathered = self.reduced = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if name.startswith("c10d::_allgather_base_"):
            self.gathered += ring(args[0].nbytes, RANKS)
        elif name.startswith(("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")):
            self.reduced += ring(args[1].nbytes, RANKS)
        elif name.startswith("c10d::allreduce_"):
            self.reduced += sum(2 * ring(tensor.nbytes, RANKS) for tensor in args[0])
        return function(*args, **(kwargs or {}))


def chosen_bytes(rank, mode):
    """What each step of a DDP run sent to choose."""
    model, batches = mlp()
    engine = get_unmasker(sparsify(model.float(), BUDGET, steps=STEPS, sync=mode))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    sent = []
    for batch in batches:
        before = engine.ranks.bytes_sent
        optimizer.zero_grad()
        parallel(
            **{name: value.float() if name == "x" else value for name, value in own_part(batch, rank).items()}
        ).backward()
        optimizer.step()
        sent.append(engine.ranks.bytes_sent - before)
    state, written = optimizer.state[model.sparse_values], engine.weights._written
    own = [model.sparse_values, model.sparse_values.grad, state["exp_avg"], state["exp_avg_sq"], written]
    buffers = [model.sparse_indices, model.sparse_slots, model.sparse_base]
    return sent, [tensor.numel for tensor in engine.tensors], sum(tensor.nbytes for tensor in own + buffers)


def sharded_bytes(rank):
    """Memory of the shards, and what a step under FSDP2 in bfloat16 sends when nothing is chosen."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(4)])
    sparsify(model, BUDGET, "pafi")
    policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
    for layer in model:
        fully_shard(layer, **policy)
    fully_shard(model, ignored_params={model.sparse_values}, **policy)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    for _ in range(3):  # the first two also find out that the ranks are alike
        with Sent() as sent:
            optimizer.zero_grad()
            model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    held = sum(layer.weight.to_local().nbytes for layer in model)
    return held, sent.gathered, sent.reduced


def measured(rank):
    return [chosen_bytes(rank, mode) for mode in ("exact", "candidates")], sharded_bytes(rank)


@pytest.fixture(scope="module")
def small():
    return on_ranks(RANKS, measured)


def test_the_formulae_bound_what_is_sent_to_choose(small):
    for choosing, _ in small:
        for mode, (sent, sizes, state) in zip(("exact", "candidates"), choosing, strict=True):
            assert all(number <= choosing_bytes(sizes, BUDGET // STEPS, RANKS, mode) for number in sent[2:])
            assert all(number >= 8 * WIDTH * (RANKS - 1) * (len(sizes) + 1) for number in sent)
            assert state == delta_bytes(BUDGET, base_bytes=4)


def test_the_formulae_say_what_shards_take_and_gathering_them_sends(small):
    number = 4 * 64 * 64
    for _, (held, gathered, reduced) in small:
        assert held == 4 * number // RANKS
        again = 3 / 4  # the last layer is still there when backward begins
        assert ring(2 * number, RANKS) * (1 + again) <= gathered <= 2 * ring(2 * number, RANKS)
        assert reduced == 2 * ring(4 * BUDGET, RANKS)


def test_at_scale_the_delta_is_small_beside_full_fine_tuning():
    assert LLAMA_70B.num_parameters == pytest.approx(70.55e9, rel=1e-3)
    rows = {row.method: row for row in at_scale(LLAMA_70B, ranks=64, budget=70_000_000, steps=10_000)}
    assert rows["ID3 candidates"].state_bytes < rows["full"].state_bytes / 3
    assert rows["ID3 candidates"].choosing_bytes < rows["full"].averaging_bytes / 50
    assert rows["ID3 exact"].averaging_bytes == rows["ID3 candidates"].averaging_bytes == 2 * ring(280_000_000, 64)
    assert len(make_paper_table().rows) == len(rows)


def test_the_table_has_the_ratios_to_the_first_row():
    rows = [
        RankMeasurement(Settings("full"), 2, 10**6, [2.0], 2**30, [10**6], [0]),
        RankMeasurement(Settings("id3-exact"), 2, 1000, [1.0], 2**28, [4000], [2 * 10**6]),
    ]
    cells = {column.header: list(column.cells) for column in make_table(rows).columns}
    assert cells["ratio"] == ["1.00", "0.50"]
    assert cells["choosing (MB)"] == ["-", "2.000"]


def test_the_paper_needs_no_ranks():
    result = CliRunner().invoke(make_app(), ["bench-ranks", "--paper"], catch_exceptions=False)
    assert "Llama 70B, 64 GPUs" in result.output


def test_an_unknown_method_lists_the_known_ones():
    with pytest.raises(SparsifyError, match="unknown method 'id4'; expected one of full, lora, id3-exact"):
        CliRunner().invoke(make_app(), ["bench-ranks", "--methods", "id4"], catch_exceptions=False)


@pytest.mark.slow
def test_each_method_is_measured_in_every_round(tmp_path):
    seen = []
    tiny = {"shape": "minilm", "budget": 2_000, "batch": 1, "length": 8, "threads": 1}
    methods = [Settings(name, **tiny) for name in ("full", "lora", "id3-exact", "id3-candidates")]
    results = measure_ranks(methods, rounds=2, steps=1, progress=seen.append)
    assert seen[4:6] == ["round 1 of 2: full", "round 1 of 2: lora"]
    for result in results:
        assert len(result.seconds) == 2
        assert result.averaging_bytes[-1] == 4 * result.trained  # on two ranks an all-reduce sends each byte once
        assert bool(result.choosing_bytes[-1]) == result.settings.method.startswith("id3")
    assert results[3].choosing_bytes[-1] < results[0].averaging_bytes[-1] / 100
    assert json.dumps(results[0].seconds)
