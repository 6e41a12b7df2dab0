"""The demo: its data, its model and baseline, and the whole of it in a few steps."""

import random
from collections import Counter

import pytest
import torch
from rich.console import Console
from sklearn.linear_model import LogisticRegression
from typer.testing import CliRunner

from sparsify import SparseDelta, SparsifyError
from sparsify.cli import make_app
from sparsify.cli.demo import classifier, command, docstrings, training
from sparsify.cli.demo.classifier import Tokenized, default_model, load_classifier
from sparsify.cli.demo.docstrings import LABELS, Example, load_examples

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
def few_examples(examples, monkeypatch):
    """Makes the demo run on a few short examples."""
    few = [[example for example in part if len(example.text) < 60][:32] for part in examples]
    monkeypatch.setattr(command, "load_examples", lambda: tuple(few))
    return few


class TestDocstrings:
    def test_there_are_enough_of_each_label(self, examples):
        training, held_out = examples
        assert len(training) >= 1_000
        assert len(held_out) >= 300
        for part in examples:
            counts = Counter(example.label for example in part)
            assert set(counts) == set(range(len(LABELS)))
            assert max(counts.values()) < len(part) / 2

    def test_held_out_docstrings_are_of_other_files_and_not_nearly_in_the_training_part(self, examples):
        training, held_out = examples
        assert not {example.file for example in training} & {example.file for example in held_out}
        seen, asked = ([docstrings.words_of(example.text) for example in part] for part in examples)
        assert max(len(a & b) / max(1, len(a | b)) for a in asked for b in seen) < 0.81
        assert load_examples() == examples, "the same every time"

    def test_a_source_is_parsed_and_never_run(self, tmp_path):
        (tmp_path / "things.py").write_text(SOURCE)
        found = list(docstrings.read_examples(tmp_path / "things.py", tmp_path))
        assert found == [
            Example("Tools for reading and writing things.", LABELS.index("module"), "things.py"),
            Example("Reads one thing after another.", LABELS.index("class"), "things.py"),
            Example("Return the next thing, or None.", LABELS.index("function"), "things.py"),
            Example("Skip what is not a thing.", LABELS.index("function"), "things.py"),
        ]

        (tmp_path / "future.py").write_text('"""Written for a Python that is yet to come."""\nlet x = 1\n')
        assert list(docstrings.read_examples(tmp_path / "future.py", tmp_path)) == []

    def test_a_python_without_sources_is_an_error_that_says_so(self, tmp_path):
        with pytest.raises(SparsifyError, match=r"only 0 docstrings in .* installed with them"):
            load_examples(tmp_path)


class TestClassifier:
    def test_padding_does_not_matter(self, model):
        data = Tokenized([[101, 2023, 102], [101, 2023, 2003, 1037, 3231, 102]], torch.tensor([0, 1]), pad_id=0)
        logits = model(**data.batch([0, 1]))
        assert logits.shape == (2, len(LABELS))
        torch.testing.assert_close(logits[:1], model(**data.batch([0])))

    def test_the_seed_draws_the_head(self, model):
        again, other = load_classifier(default_model(), seed=0), load_classifier(default_model(), seed=1)
        assert torch.equal(model.head.weight, again.head.weight)
        assert not torch.equal(model.head.weight, other.head.weight)

    def test_long_texts_are_cut(self):
        (data,) = classifier.tokenize(default_model(), [Example("word " * 500, 0, "things.py")])
        assert len(data.ids[0]) == classifier.MAX_TOKENS


class TestTraining:
    def test_an_epoch_has_every_row_once_in_batches_of_similar_length(self):
        lengths = random.Random(0).choices(range(1, 40), k=100)
        data = Tokenized([[1] * length for length in lengths], torch.zeros(100), pad_id=0)
        batches = training.shuffled_batches(data, random.Random(0))
        for _ in range(2):
            epoch = [next(batches) for _ in range(7)]  # of 16 and a last one of 4
            assert sorted(row for batch in epoch for row in batch) == list(range(100))
            assert all(max(lengths[r] for r in batch) - min(lengths[r] for r in batch) < 15 for batch in epoch)

    def test_all_rows_keeps_their_order(self):
        data = Tokenized([[length] * length for length in (5, 2, 9)], torch.zeros(3), pad_id=0)
        result = training.all_rows(lambda input_ids, attention_mask: input_ids.sum(1), data)
        assert result.tolist() == [25, 4, 81]

    def test_the_baseline_head_is_logistic_regression(self):
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(200, 8, generator=generator)
        labels = (features @ torch.randn(8, 3, generator=generator)).argmax(1)
        head = torch.nn.Linear(8, 3)
        training.fit_head(head, features, labels, decay=0.03)
        reference = LogisticRegression(C=1 / (0.03 * 200), tol=1e-8).fit(features, labels)
        expected = torch.tensor(reference.predict_proba(features), dtype=torch.float32)
        torch.testing.assert_close(head(features).softmax(-1), expected, atol=1e-3, rtol=0)

    def test_the_baseline_leaves_the_model_as_it_was(self, model):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        data = Tokenized([[101, token, 102] for token in range(2000, 2012)], torch.arange(12) % 3, pad_id=0)
        assert training.frozen_baseline_accuracy(model, data, data) == 1.0
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class TestDemo:
    def test_the_command_saves_a_delta_and_prints_the_table(self, few_examples, tmp_path):
        options = ["--steps", "3", "--budget", "90", "--out", str(tmp_path / "delta")]
        result = CliRunner(env={"COLUMNS": "100"}).invoke(make_app(), ["demo", *options])
        assert result.exit_code == 0, result.output
        for text in ("step 3/3", "unmasked 90/90", "frozen baseline", "90 of 22,56", "same predictions, bit for bit"):
            assert text in result.output
        delta = SparseDelta.load(tmp_path / "delta")
        assert delta.num_entries == 90
        assert sorted(delta.whole) == ["head.bias", "head.weight"]

    def test_the_same_seed_gives_the_same_delta(self, few_examples, tmp_path):
        deltas = []
        for out in (tmp_path / "a", tmp_path / "b"):
            display = command.Display(Console(quiet=True), 2)
            command.run(default_model(), "id3", 60, 2, 1e-3, out, 3, display)
            deltas.append(SparseDelta.load(out))
        first, second = deltas
        assert all(torch.equal(first.whole[name], second.whole[name]) for name in first.whole)
        assert first.tensors.keys() == second.tensors.keys()
        for name, part in first.tensors.items():
            assert torch.equal(part.indices, second.tensors[name].indices)
            assert torch.equal(part.values, second.tensors[name].values)

    def test_a_delta_that_predicts_something_else_is_an_error(self):
        logits = torch.zeros(4, 3)
        command.check_same(logits, logits.clone())
        others = logits.clone()
        others[1, 2] = 0.5
        with pytest.raises(SparsifyError, match=r"1 of 12 logits differ, by up to 0\.5"):
            command.check_same(logits, others)

    def test_the_budget_is_entries_or_a_share(self):
        assert command.parse_budget("", "id3") == 38_000
        with pytest.raises(SparsifyError, match="budget='many'; expected a number of entries"):
            command.parse_budget("many", "id3")
        with pytest.raises(SparsifyError, match="strategy 'full' has none"):
            CliRunner().invoke(make_app(), ["demo", "--strategy", "full"], catch_exceptions=False)
