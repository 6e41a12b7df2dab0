"""The paper's experiments on generated text: answers are read from it, models are trained on answers and judged."""

import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
from urllib.error import URLError

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from examples.paper import curvature, language, metrics, rules, run, runs, sources, tasks, training
from examples.paper.answers import is_right, letter, number
from examples.paper.generation import PREFIX, PROMPT, Solver, Summarizer
from examples.paper.models import IGNORED
from examples.paper.settings import Settings

pytestmark = pytest.mark.usefixtures("data")
WIDTH, VOCABULARY = 32, 258  # of the models; padding, end of text, bytes
BASE = Settings(task="math", model="", method="full", rate=1e-2, seed=0, budget=None, epochs=20, batch_size=4,
                max_length=128, exp=0.0, target_length=20)  # fmt: skip
QUESTIONS = ("One and two?", "How many is 1 + 2, if at all?", "3 * 1 =", "Of 9 a third is?")
MATH = [{"instruction": text, "input": "", "output": "The answer is 3.", "answer": "3.0"} for text in QUESTIONS]
CHOICES = [{**MATH[0], "output": "wrong", "answer": "C"}] * 3
DOCUMENTS = [{"document": text, "summary": "a question"} for text in QUESTIONS]
FILES = {
    "math": {"train_gsm8k": MATH * 6, "addsub": MATH, "aqua": CHOICES},
    "xsum": {"train": DOCUMENTS * 6, "validation": DOCUMENTS},
}


def saved(model, folder, ends):
    """The folder of a model with a tokenizer of bytes; ``ends``: whether it ends texts, as T5's does."""
    tokens = ["<pad>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    model.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
                      decoder_start_token_id=0)  # fmt: skip
    return saved(hf.T5ForConditionalGeneration(config), tmp_path_factory.mktemp("t5"), ends=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = hf.LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=2, bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    return saved(hf.LlamaForCausalLM(config), tmp_path_factory.mktemp("llama"), ends=False)


# text -> the last number in it
NUMBERS = {
    "She has 5 left. The answer is 1,234.": 1234, "so it costs $5.00": 5, "72.0": 72, "The answer is -3.": -3,
    "He owes -$12.50": -12.5, "a change of \N{MINUS SIGN}7 degrees": -7, "That is 17.5%.": 17.5, ".25 of it": 0.25,
    "1,234,567.89 in all": 1234567.89, "Step 1: nothing. The answer is $ 2,000,000.": 2_000_000, "either 3, 4": 4,
    "12,34": 34,  # no thousands
    "5-3": 3, "(5)-3": 3, "10 - 4 = 6": 6,  # an operator
    "no number here": None, "": None,
}  # fmt: skip
LETTERS = {
    "The answer is (D).": "D", "A train leaves. The answer is B. A second one does not.": "B", "Answer: C": "C",
    "Of (A) and (B) it is (B), A Good Choice": "B", "E": "E", "Be careful": None, "the answer is 12": None,
}  # fmt: skip
RIGHT = [
    ("72.0", "The answer is 72."), ("72", "The answer is 72.0004"), ([22.0], "22"), ("1,430", "$1430"), ("B", "(B)"),
]  # fmt: skip
WRONG = [(22, "21.9"), ("B", "it is 2"), ("2", "B")]


def test_the_answer_is_the_last_number_or_the_letter_that_is_named_last():
    assert {text: number(text) for text in NUMBERS} == NUMBERS
    assert {text: letter(text) for text in LETTERS} == LETTERS
    assert all(is_right(answer, text) is True for answer, text in RIGHT), "numbers are compared by value"
    assert not any(is_right(answer, text) for answer, text in WRONG)


def test_rouge_is_of_common_words_pairs_and_subsequences(monkeypatch):
    found = metrics.scores("rouge", ["the cats sat on the mat"] * 2, ["the cat", "the cats sat on the mat"])
    # of the first text: 2 of 2 words and 2 of 6, 1 of 1 pairs and 1 of 5; cat and cats have one stem
    assert found == {"rouge1": 75, "rouge2": pytest.approx((100 / 3 + 100) / 2, abs=1e-3), "rougeL": 75}
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(SystemExit, match=r"rouge-score's: pip install 'sparsify-ft\[paper\]'"):
        metrics.scores("rouge", ["a"], ["a"])


@pytest.mark.parametrize("method", ["lora", "id3"])
def test_a_causal_model_learns_to_solve_and_is_judged_on_every_set(llama, method):
    line = training.run(replace(BASE, model=llama, method=method, budget=6_000))
    last = line["epochs"][-1]
    assert last["parts"] == {"addsub accuracy": 100, "aqua accuracy": 0}
    assert (last["score"], last["loss"], line["right"]) == (50, None, f"{0b1111000:x}")
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_an_encoder_decoder_learns_to_summarize(t5):
    line = training.run(replace(BASE, model=t5, task="xsum", method="id3", budget=6_000))
    first, *_, last = line["epochs"]
    assert last["parts"] == {"rouge1": 100, "rouge2": 100, "rougeL": 100}
    assert (last["score"], line["right"]) == (100, None)
    assert last["loss"] < first["loss"]


def test_the_loss_is_on_the_solution_alone_and_what_is_too_long_loses_its_beginning(llama):
    solver = Solver(tasks.TASKS["math"], MATH, replace(BASE, model=llama))
    row = solver.encode(MATH[0])
    assert solver.tokenizer.decode(row["input_ids"]) == PROMPT.format(QUESTIONS[0]) + "The answer is 3.</s>"
    assert solver.tokenizer.decode([label for label in row["labels"] if label != IGNORED]) == "The answer is 3.</s>"
    assert solver.encode_judged(MATH[0])["input_ids"] == row["input_ids"][: row["labels"].count(IGNORED)]
    short = Solver(tasks.TASKS["math"], MATH, replace(BASE, model=llama, max_length=20)).encode(MATH[0])
    assert short == {name: values[-20:] for name, values in row.items()}


def test_a_document_and_its_summary_are_cut_off_at_their_own_lengths(t5):
    settings = replace(BASE, model=t5, max_length=15, target_length=4)
    row = Summarizer(tasks.TASKS["xsum"], DOCUMENTS, settings).encode(DOCUMENTS[0])
    decode = Summarizer(tasks.TASKS["xsum"], DOCUMENTS, settings).tokenizer.decode
    assert decode(row["input_ids"]) == (PREFIX + QUESTIONS[0])[:14] + "</s>"
    assert decode(row["labels"]) == "a q</s>"


def test_what_is_generated_does_not_depend_on_the_batch(llama):
    solver = Solver(tasks.TASKS["math"], MATH, replace(BASE, model=llama))
    model, head = solver.load_model()
    assert head == []
    rows = [solver.encode_judged(row) for row in MATH]
    together, loss = solver.predict(model.eval(), solver.collate(rows))
    assert together == [solver.predict(model, solver.collate([row]))[0][0] for row in rows]
    assert loss != loss
    assert len({len(row["input_ids"]) for row in rows}) > 1


SMOKE = "--steps 4 --rows 16 --judged 2 --target-length 5 --batch-size 8"


@pytest.mark.parametrize(
    ("suite", "options", "shown"),
    [
        ("summarization", "--tasks docstrings --budgets 100", "docstrings rougeL"),
        ("math", "", "| id3+lora-32 (exp=0.0) | lora-2 |"),
        ("math-full", "--budgets 100", "math addsub accuracy"),
    ],
)
def test_a_suite_runs_from_the_command_to_its_tables(suite, options, shown, request, tmp_path, monkeypatch, capsys):
    def run_here(wanted, path, jobs, device, command):
        for settings in wanted:
            runs.append(path, training.run(settings, device))

    files = list(itertools.islice(sources.source_files(Path(json.__file__).parents[1]), 25))
    monkeypatch.setattr(sources, "source_files", lambda root: files)
    monkeypatch.setattr(run, "run_missing", run_here)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    model, path = request.getfixturevalue("t5" if suite == "summarization" else "llama"), tmp_path / "runs.jsonl"
    run.main(["--suite", suite, "--model", model, "--results", str(path), *SMOKE.split(), *options.split()])
    lines = list(runs.read(path).values())
    printed = capsys.readouterr().out
    assert printed.startswith(f"{len(lines)} of {len(lines)} runs")
    assert shown in printed
    assert all(line["facts"]["train_rows"] == 16 and line["steps"] == 4 for line in lines)
    trained = {line["settings"]["method"]: line["trained"] for line in lines}
    if suite == "math":
        assert trained["id3+lora-32"] == trained["pafi+lora-32"] == trained["lora-2"] == trained["lora-32"] / 16


def test_the_papers_sets_come_from_their_authors_or_the_error_says_what_to_do(monkeypatch):
    monkeypatch.delenv("SPARSIFY_DATA")
    monkeypatch.setattr(sources, "urlopen", lambda url, timeout: io.BytesIO(json.dumps([url]).encode()))
    train, sets = tasks.load_rows(tasks.TASKS["math"])
    assert train == [sources.LLM_ADAPTERS + "/ft-training_set/math_10k.json"]
    assert sets["addsub"] == [sources.LLM_ADAPTERS + "/dataset/AddSub/test.json"]
    assert list(sets) == ["addsub", "multiarith", "singleeq", "gsm8k", "aqua", "svamp"]
    monkeypatch.setattr(sources, "urlopen", Mock(side_effect=URLError("no network")))
    with pytest.raises(SystemExit, match=r"math_10k.json cannot be read \(no network\); .*train_gsm8k.jsonl"):
        tasks.load_rows(tasks.TASKS["math"])


BUDGET = 120
RULES = ["none", "lora-1", "random", "id3-early", "gradient", "floor-1", "mixed-25", "balanced", "sampled-50",
          "consistent-square-8", "consistent-even", "consistent-redrawn",
         "random-mlp", "dora-1", "shira", "supertuning"]  # fmt: skip


def test_runs_are_kept_and_compared_by_row(llama, tmp_path, capsys):
    path = tmp_path / "runs.jsonl"
    options = f"--model {llama} --results {path} --rates 1e-2 --budget {BUDGET} --steps 3 --held-out 4".split()
    for _ in range(2):
        language.main([*options, "--methods", *RULES])
    assert (first := path.read_text()).count("\n") == len(RULES)
    lines = {line["settings"]["method"]: line for line in runs.read(path).values()}
    assert list(lines) == RULES
    assert all(len(line["rows"]) == 4 for line in lines.values())
    assert {lines[method]["trained"] for method in RULES[2:-3]} == {BUDGET}
    assert len({tuple(line["rows"]) for line in lines.values()}) == len(RULES)
    assert {method for method, line in lines.items() if "file_bytes" not in line} == {"none"}
    assert lines["random"]["file_bytes"] > 6 * BUDGET
    assert llama not in first
    language.main([*options, "--candidates", "qv", "--methods", "lora", "random", "--jobs", "2"])
    assert path.read_text().count("\n") == len(RULES) + 2
    size = 4 * lines["lora-1"]["trained"]
    language.main([*options, "--methods", "lora+random", "lora+random-3", "--budget", str(size)])
    one_rate, two_rates = [*runs.read(path).values()][-2:]
    assert one_rate["trained"] == two_rates["trained"] == size
    assert one_rate["training_losses"][0] == two_rates["training_losses"][0]
    assert one_rate["training_losses"] != two_rates["training_losses"]
    language.main(["--results", str(path), "--table"])
    assert f"### {Path(llama).name}, qv, 3 steps of 2 rows, 4 held-out rows" in capsys.readouterr().out


def test_balanced_entries_are_as_many_in_each_row_and_column():
    tensors = {"wide": torch.ones(20, 30), "high": torch.ones(40, 15)}
    entries = rules.balanced(tensors, 120, seed=0)
    assert {name: len(ids.unique()) for name, ids in entries.items()} == {"wide": 60, "high": 60}
    for name, ids in entries.items():
        height, width = tensors[name].shape
        for lines, size in ((ids // width, height), (ids % width, width)):
            found = lines.bincount(minlength=size)
            assert 60 / size - 1 <= found.min()
            assert found.max() <= 60 / size + 2  # two may be drawn twice, and are replaced


def test_of_each_tensor_as_many_are_taken_by_density_or_as_another_rule_takes():
    scores = {"wide": torch.arange(60.0).view(6, 10), "high": torch.arange(120.0).view(20, 6)}
    even = rules.evenly_spread(scores, 18)
    assert {name: len(ids) for name, ids in even.items()} == {"wide": 6, "high": 12}
    assert even["wide"].tolist() == [36, 37, 48, 49, 58, 59]  # two of a row, and of a column
    again = rules.redrawn(scores, {"high": torch.arange(7)}, seed=0)
    assert {name: len(ids.unique()) for name, ids in again.items()} == {"high": 7}


def test_entries_are_sampled_by_a_power_of_their_gradients():
    steep = {"w": torch.tensor([1e-6] * 100 + [1e6] * 100)}
    assert (rules.sampled(steep, 50, 1.0, seed=0)["w"] >= 100).all()
    assert 10 < (rules.sampled(steep, 50, 0.0, seed=0)["w"] >= 100).sum() < 40


def test_the_curvature_of_a_first_step_is_measured_for_each_rule(llama, tmp_path, capsys):
    curvature.main(["--model", llama, "--budget", str(BUDGET), "--out", str(tmp_path / "figure.png")])
    table = capsys.readouterr().out.split("| first step of |")[-1].splitlines()[2:]
    rows = {cells[0]: cells for line in table if len(cells := line.strip("| ").split(" | ")) > 5}
    assert list(rows) == [*curvature.RULES, *curvature.OTHERS]
    assert {rows[rule][1] for rule in curvature.RULES} == {str(BUDGET)}
    slopes = {rule: float(cells[4]) for rule, cells in rows.items()}
    assert slopes["full"] >= slopes["gradient"] >= slopes["square-4"] >= 0
    assert (tmp_path / "figure.png").exists()


def test_a_step_is_followed_along_a_quadratic_loss():
    """0.5 w^T diag(h) w at w = 1: the gradient is h, the slope its sum, and so is the curvature."""
    steep = {"w": torch.tensor([[1.0, 9.0], [4.0, 2.0]])}

    def loss_at(step, rate):
        return float((steep["w"] * (1 + rate * step["w"]).square()).sum() / 2)

    found = curvature.measure("gradient", steep, 2, 0, loss_at)
    assert (found.trained, found.slope, found.columns, found.rows) == (2, 13.0, [1, 1], [1, 1])
    assert found.curvature == pytest.approx(13.0, rel=1e-3)
