"""Merging into a checkpoint on disk takes the memory of one tensor, and the command that measures it runs."""

import json
import sys

import pytest
import torch

from sparsify.bench.merging import bench_merge, make_checkpoint, make_delta, measure, parse_size
from sparsify.cli import main
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.errors import SparsifyError


def test_a_merge_takes_the_memory_of_one_tensor(tmp_path):
    """Of a checkpoint of 96 MB in tensors of 6 MB, much less than half is in memory at a time."""
    make_checkpoint(tmp_path / "base", 96 * 2**20, shards=2)
    delta = make_delta(tmp_path / "base", 0.001)
    delta.save(tmp_path / "delta")
    result = measure(tmp_path / "delta", tmp_path / "base", tmp_path / "merged")
    assert result["peak_bytes"] - result["library_bytes"] < 40 * 2**20
    merged = Checkpoint(tmp_path / "merged")
    for name, part in delta.tensors.items():
        assert torch.equal(merged[name].take(part.indices), part.values)


def test_the_command_measures_a_merge(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsify", "bench-merge", "--size", "1MB", "--json", str(tmp_path / "raw.json")])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    assert "1MB of bfloat16 in 4 shards, density 0.10%" in " ".join(capsys.readouterr().out.split())
    raw = json.loads((tmp_path / "raw.json").read_text())
    assert raw["peak_bytes"] >= raw["library_bytes"] > 0
    assert raw["largest_shard_bytes"] > 2**18


@pytest.mark.parametrize(("options", "message"), [({"shards": 0}, "expected at least 1"), ({"density": 0}, "above 0")])
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(SparsifyError, match=message):
        bench_merge(**{"size": "1MB", "shards": 1, "density": 0.1, "folder": None, "json": None, **options})


@pytest.mark.parametrize("size", ["2", "GB", "2 XB", "-1GB"])
def test_a_size_has_a_unit(size):
    with pytest.raises(SparsifyError, match="expected a number and a unit: 2GB, 500MB"):
        parse_size(size)
