"""``sparsify bench-file`` writes one delta in every format and counts bytes."""

import json
import math
import sys

import pytest
import torch

from sparsify.bench.sizes import build, linear_weights, make_delta, measure, uneven_counts
from sparsify.cli import main


def run(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["sparsify", "bench-file", "--shape", "minilm", *map(str, options)])
    with pytest.raises(SystemExit) as stopped:
        main()
    return stopped.value.code


@pytest.fixture(scope="module")
def sizes():
    return {size.format: size for size in measure("minilm", 20_000, torch.bfloat16)}


def test_the_command_prints_the_table_and_writes_it(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    assert run(monkeypatch, "--density", 0.001, "--json", tmp_path / "sizes.json") == 0
    printed = capsys.readouterr().out
    assert "minilm, float32: 10,764 entries of 10,764,288 in 37 linear layers (0.100%)" in printed
    written = json.loads((tmp_path / "sizes.json").read_text())
    assert written["conditions"]["entries"] == 10_764
    assert written["conditions"]["placement"].startswith("density of each layer lognormal, sigma 1, seed 0")
    for size in written["sizes"]:
        assert size["format"] in printed
        assert f"{size['bytes_per_entry']:,.2f}" in printed


def test_what_is_measured_is_what_the_formats_say(sizes):
    per_entry = {name: size.bytes_per_entry for name, size in sizes.items()}
    assert per_entry["flat int64 positions"] == 8 + 2
    assert per_entry["the paper's toolkit"] == pytest.approx(16 + 2, rel=0.1)
    assert per_entry["PEFT shira, its own counts"] == pytest.approx(8 + 4, rel=0.05)
    assert per_entry["PEFT supertuning, its own counts"] == pytest.approx(4 + 4, rel=0.1)
    assert per_entry["entropy bound"] < per_entry["sparsify"] < per_entry["entropy bound"] + 2
    assert sizes["the whole model"].num_bytes == 2 * sum(p.numel() for p in build("minilm", torch.float32).parameters())


def test_only_the_uneven_delta_is_padded(sizes):
    assert "0.0 % of its places are padding" in sizes["PEFT shira, its own counts"].counted
    assert "0.0 % of its places are padding" in sizes["PEFT supertuning, its own counts"].counted
    assert sizes["PEFT shira"].bytes_per_entry > 2 * sizes["PEFT shira, its own counts"].bytes_per_entry
    assert "are corrections" in sizes["PEFT supertuning"].counted


def test_the_bound_counts_every_set_of_positions(sizes):
    weights = linear_weights(build("minilm", torch.bfloat16))
    bits = sum(
        math.log2(math.comb(weights[name].numel(), count)) for name, count in uneven_counts(weights, 20_000).items()
    )
    assert sizes["entropy bound"].num_bytes == pytest.approx(bits / 8 + 2 * 20_000)


def test_entries_lie_unevenly_and_add_up():
    weights = {str(i): torch.zeros(64, 64) for i in range(40)}
    counts = uneven_counts(weights, 3_000)
    assert sum(counts.values()) == 3_000
    assert min(counts.values()) >= 1
    assert max(counts.values()) > 4 * sorted(counts.values())[20]
    assert make_delta(weights, counts, lambda base: base + 1).num_entries == 3_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shape", "large"], "unknown shape 'large'; expected one of minilm, bert-base."),
        (["--dtype", "int8"], "unknown dtype 'int8'; expected one of float32, bfloat16."),
        (["--entries", 3], "3 entries; expected 37, one a layer, to 215,285, 2 % of the 10,764,288 in minilm's linear"),
        (["--density", 0.5], "5,382,144 entries; expected"),
    ],
)
def test_options_out_of_range_are_one_line(monkeypatch, options, message):
    assert message in str(run(monkeypatch, *options))
