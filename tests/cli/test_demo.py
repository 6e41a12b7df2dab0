"""The demo: its data, its model and baseline, and the whole of it in a few steps."""

import re
from collections import Counter

import pytest
import torch
from deltas import bits
from typer.testing import CliRunner

from sparsify import SparseDelta, SparsifyError
from sparsify.cli import demo as module
from sparsify.cli import make_app
from sparsify.cli.demo import LABELS, Example, Tokenized, default_model, load_classifier, load_examples

SOURCE = '''"""Tools for reading and writing things."""
raise SystemExit("a source is parsed, never run")

class Reader:
    """Reads one thing after another."""

    async def read(self):
        """Return the next thing, or None."""

        def inner():
            """Skip what is not a thing."""

    if True:
        def close(self):
            """Too short."""

def undocumented(): ...
'''


@pytest.fixture(scope="module")
def examples():
    return load_examples()


@pytest.fixture(scope="module")
def model():
    return load_classifier(default_model(), seed=0).eval()


@pytest.fixture
def demo(examples, monkeypatch, tmp_path):
    """Runs the command on a few short examples; gives what it printed and the delta."""
    few = [[example for example in part if len(example.text) < 60][:16] for part in examples]
    monkeypatch.setattr(module, "load_examples", lambda: tuple(few))
    monkeypatch.setattr(module, "BASELINE_CS", (0.1,))

    def demo(*options):
        arguments = ["demo", "--out", str(tmp_path), *options]
        result = CliRunner(env={"COLUMNS": "100"}).invoke(make_app(), arguments, catch_exceptions=False)
        return result.output, SparseDelta.load(tmp_path)

    return demo


def test_examples_are_enough_of_each_label_and_held_out_ones_of_other_files_and_not_nearly_the_same(examples):
    training, held_out = examples
    assert len(training) >= 1_000
    assert len(held_out) >= 300
    for part in examples:
        counts = Counter(example.label for example in part)
        assert set(counts) == set(range(len(LABELS)))
        assert max(counts.values()) < len(part) / 2
    assert not {example.file for example in training} & {example.file for example in held_out}
    seen, asked = ([set(re.findall("[a-z]+", one.text.lower())) for one in part] for part in examples)
    assert max(len(a & b) / max(1, len(a | b)) for a in asked for b in seen) < 0.81


def test_a_source_is_parsed_and_never_run(tmp_path):
    (tmp_path / "things.py").write_text(SOURCE)
    found = list(module.read_examples(tmp_path / "things.py", tmp_path))
    assert found == [
        Example("Tools for reading and writing things.", LABELS.index("module"), "things.py"),
        Example("Reads one thing after another.", LABELS.index("class"), "things.py"),
        Example("Return the next thing, or None.", LABELS.index("function"), "things.py"),
        Example("Skip what is not a thing.", LABELS.index("function"), "things.py"),
    ]
    (tmp_path / "future.py").write_text('"""Written for a Python that is yet to come."""\nlet x = 1\n')
    assert list(module.read_examples(tmp_path / "future.py", tmp_path)) == []
    with pytest.raises(SparsifyError, match=r"no docstrings in .* installed with its library's sources"):
        load_examples(tmp_path)


def test_predictions_of_batches_by_length_come_in_the_rows_own_order():
    ids = torch.nn.utils.rnn.pad_sequence([torch.full((length,), length) for length in (5, 2, 9)], batch_first=True)
    data = Tokenized(ids, (ids > 0).long(), torch.zeros(3))
    assert module.all_rows(lambda input_ids, attention_mask: input_ids.sum(1), data).tolist() == [25, 4, 81]


def test_the_baseline_fits_a_head_and_leaves_the_model_as_it_was(model):
    before = bits(model)
    ids = torch.tensor([[101, token, 102] for token in range(2000, 2012)])
    data = Tokenized(ids, torch.ones_like(ids), torch.arange(12) % 3)
    assert module.frozen_baseline_accuracy(model, data, data) == 1.0
    assert bits(model) == before


def unmasked_by_step(text):
    return [line.split()[-1] for line in text.splitlines() if line.startswith("step ")]


def test_the_command_saves_the_same_delta_each_time_and_prints_the_table(demo):
    options = ["--steps", "3", "--budget", "90", "--seed", "3", "--schedule", "uniform"]
    (text, first), (_, second) = demo(*options), demo(*options)
    assert unmasked_by_step(text) == ["30", "60", "90"]
    for part in ("step 3/3", "frozen baseline", "90 of 22,56", "same predictions, bit for bit"):
        assert part in text
    assert first.num_entries == 90
    assert sorted(first.whole) == ["head.bias", "head.weight"]
    assert first == second


def test_a_delta_that_predicts_something_else_is_an_error(demo, monkeypatch):
    monkeypatch.setattr(SparseDelta, "apply", lambda delta, model: model)
    with pytest.raises(SparsifyError, match="does not predict what the trained model did"):
        demo("--steps", "1")


@pytest.mark.parametrize(
    ("options", "unmasked"), [((), "38,000"), (("--strategy", "bitfit"), "25,728"), (("--budget", "0.01"), "225,649")]
)
def test_the_budget_is_a_number_that_the_strategy_may_know_or_a_share(demo, options, unmasked):
    text, _ = demo("--steps", "1", "--strategy", "random", *options)
    assert f"{unmasked} of 22,56" in text


@pytest.mark.parametrize("options", [("--lr", "nan"), ("--lr", "-1"), ("--out", __file__)], ids=str)
def test_a_rate_and_a_path_that_cannot_be_are_refused_before_anything_runs(options, demo, monkeypatch):
    monkeypatch.setattr(module, "load_examples", None)
    with pytest.raises(SparsifyError, match=r"--lr .* --out .*: expected a finite rate above 0, and a folder to write"):
        demo(*options)


def test_the_schedule_says_when_the_budget_is_unmasked(demo):
    text, _ = demo("--steps", "3", "--budget", "90", "--schedule", "early")
    assert unmasked_by_step(text) == ["90", "90", "90"]
