"""``sparsify bench-swap`` measures real swaps and real merges, and leaves both models as they were."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sparsify.bench import swapping
from sparsify.bench.memory import added_bytes, peak_bytes
from sparsify.cli import make_app
from sparsify.errors import SparsifyError


def test_every_operation_is_measured_in_every_round(tmp_path):
    out = tmp_path / "raw.json"
    command = ["bench-swap", "--shape", "tiny", "--rounds", "2", "--threads", "1", "--json", str(out)]
    result = CliRunner().invoke(make_app(), command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "LoRA merge" in result.output
    rows = json.loads(out.read_text())["results"]
    assert [row["name"] for row in rows][:3] == ["apply", "swap", "revert"]
    assert all(len(row["seconds"]) == len(row["bytes"]) == 2 for row in rows)
    assert all(second > 0 for row in rows for second in row["seconds"])


def test_an_unknown_shape_or_dtype_lists_the_known_ones():
    with pytest.raises(SparsifyError, match="unknown shape 'huge'; expected one of bert-base, llama-1b, tiny"):
        CliRunner().invoke(make_app(), ["bench-swap", "--shape", "huge"], catch_exceptions=False)
    with pytest.raises(SparsifyError, match="unknown dtype 'float31'; expected one of float32, bfloat16"):
        CliRunner().invoke(make_app(), ["bench-swap", "--dtype", "float31"], catch_exceptions=False)


def test_a_random_delta_has_the_density_that_was_asked_for():
    model = swapping.build("tiny", torch.bfloat16)
    delta = swapping.random_delta(model, 0.01, seed=0)
    matrices = {name: p for name, p in model.named_parameters() if p.dim() == 2}
    assert delta.tensors.keys() == matrices.keys()
    assert delta.num_entries == pytest.approx(0.01 * sum(p.numel() for p in matrices.values()), rel=0.05)
    with delta.applied(model):
        pass


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not tell")
def test_memory_that_a_block_takes_and_returns_is_seen():
    torch.ones(30 * 2**20, dtype=torch.uint8)  # glibc takes blocks up to this size from its heap, from now on
    held = [torch.ones(2**20, dtype=torch.uint8) for _ in range(200)]
    last = torch.ones(2**20, dtype=torch.uint8)
    held.clear()  # the heap keeps 200 MB for whoever comes next: they are no new memory to the system
    with added_bytes() as added:
        torch.ones(64 * 2**20, dtype=torch.uint8)
    assert added.bytes > 60 * 2**20
    assert peak_bytes() > added.bytes
    del last
