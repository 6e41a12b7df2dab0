"""``sparsify bench-lora`` writes one LoRA as PEFT's file and as deltas, and counts bytes."""

import json

import pytest
from typer.testing import CliRunner

from sparsify.bench.lora import measure_lora
from sparsify.cli import make_app
from sparsify.errors import SparsifyError


def test_the_command_prints_the_table_and_writes_it(tmp_path):
    out = tmp_path / "lora.json"
    command = ["bench-lora", "--shape", "minilm", "--rank", "4", "--entries", "40000", "--json", str(out)]
    result = CliRunner().invoke(make_app(), command, catch_exceptions=False)
    assert result.exit_code == 0
    assert "40,000 of its 168,960 float32 numbers trained" in " ".join(result.output.split())
    sizes = {size["format"]: size for size in json.loads(out.read_text())["sizes"]}
    assert list(sizes) == ["PEFT", "delta, fresh='store'", "delta, fresh='seed'"]
    assert sizes["PEFT"]["num_bytes"] == pytest.approx(168_960 * 4, rel=0.05)
    for size in sizes.values():
        assert f"{size['bytes_per_entry']:,.2f}" in result.output


def test_320_000_entries_of_a_drawn_lora_take_at_most_six_and_a_half_bytes_each():
    numel, sizes = measure_lora("bert-base", 8, 320_000)
    assert numel == 1_339_392
    assert sizes[-1].format == "delta, fresh='seed'"
    assert sizes[-1].bytes_per_entry <= 6.5


def test_an_unknown_shape_lists_the_known_ones():
    with pytest.raises(SparsifyError, match="unknown shape 'huge'; expected one of minilm, bert-base"):
        CliRunner().invoke(make_app(), ["bench-lora", "--shape", "huge"], catch_exceptions=False)
