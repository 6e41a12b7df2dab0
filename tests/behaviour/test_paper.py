"""The paper's experiments: methods and kinds of tasks train, nothing that has finished is lost, scores are right."""

import json
import math
import re
import signal
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path

import pytest
import torch
import transformers as hf
from scipy import stats

from examples.paper import analysis, protocol, reinforcement, run, runs, significance, suites, tables, tasks, training
from examples.paper.methods import METHODS
from examples.paper.settings import Settings
from sparsify.cli.demo import default_model

pytestmark = pytest.mark.usefixtures("data")

ROOT = Path(__file__).parents[2]
BUDGET, WIDTH = 50, 16
HEAD = 2 * WIDTH + 2
BASE = Settings(task="sst2", model="", method="id3", rate=1e-3, seed=0, budget=BUDGET, epochs=2, steps=3, batch_size=4)
TEXTS = ("a fine film", "dull and far too long", "warm and funny", "a waste of time")
ROWS = {
    "sst2": [{"sentence": text, "label": i % 2} for i, text in enumerate(TEXTS)] * 3,
    "mrpc": [{"sentence1": text, "sentence2": TEXTS[0], "label": i % 2} for i, text in enumerate(TEXTS)] * 3,
    "stsb": [{"sentence1": text, "sentence2": TEXTS[0], "label": i / 2} for i, text in enumerate(TEXTS)] * 3,
    "wnut17": [{"tokens": ["unbelievable", text, "Rome"], "ner_tags": ["O", "O", "B-location"]} for text in TEXTS] * 3,
    "mnli": [{"premise": text, "hypothesis": TEXTS[0], "label": i % 3} for i, text in enumerate(TEXTS)] * 3,
}
FILES = {task: dict.fromkeys(("train", *tasks.TASKS[task].judged), rows) for task, rows in ROWS.items()}
TEST_ROWS = FILES["mrpc"]["test"] = ROWS["mrpc"][:3]
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": WIDTH}
SIZES["vocab_size"] = 30522


def saved(model, config, folder, **sizes):
    getattr(hf, model)(getattr(hf, config)(**SIZES, **sizes)).save_pretrained(folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(default_model())
    if "MPNet" in model:
        tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return saved("BertModel", "BertConfig", tmp_path_factory.mktemp("bert"))


def trained(tiny, **changes):
    settings = replace(BASE, model=tiny, **changes)
    return training.run(METHODS[settings.method].normalise(settings))


LORA = 4 * 2 * WIDTH + 2 * 2 * WIDTH  # of rank 1: four layers of the attention, two of the feed-forward network
BIASES = 8 * WIDTH  # six layers and two norms; the embeddings' norm has one more
NUMBERS = {method: BUDGET for method, row in METHODS.items() if row.takes_budget} | {
    "lora-2": 2 * LORA, "lora-32": 32 * LORA, "id3+lora-32": 2 * LORA, "pafi+lora-32": 2 * LORA,
    "bitfit": BIASES + WIDTH, "lora": LORA, "lora-8": 8 * LORA, "pfeiffer": 2 * WIDTH * WIDTH // 2 + WIDTH // 2 + WIDTH,
    "full": 30522 * WIDTH + (512 + 2 + 2) * WIDTH + 6 * WIDTH * WIDTH + BIASES + 2 * WIDTH, "d3-repeat": 3 * BUDGET,
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_its_numbers_and_a_dense_head(tiny, method):
    line = trained(tiny, method=method)
    assert line["head"] == HEAD
    assert line["trained"] == NUMBERS[method] + HEAD
    assert (line["steps"], len(line["epochs"])) == (3, 1)
    assert 0 <= line["epochs"][0]["score"] <= 100
    assert json.loads(json.dumps(line)) == line


@pytest.mark.parametrize(("task", "labels"), [("mrpc", 2), ("stsb", 1), ("wnut17", 2)])
def test_pairs_numbers_and_tags_are_learned(tiny, task, labels):
    line = trained(tiny, task=task, steps=None, epochs=4, method="full", rate=1e-2)
    assert line["head"] == labels * (WIDTH + 1)
    assert [epoch["loss"] for epoch in line["epochs"]][-1] < line["epochs"][0]["loss"]
    assert len(line["epochs"]) == 4
    assert line["epochs"][-1]["score"] > 60
    if task == "wnut17":  # words that are cut off count as outside of entities
        assert trained(tiny, task=task, max_length=4, method="full", steps=1)["epochs"][0]["score"] == 0


def test_a_line_holds_which_rows_are_right_and_several_sets_are_scored_by_their_mean(tiny):
    line = trained(tiny, method="full", rate=1e-2, steps=12)
    share = int(line["right"], 16).bit_count() / len(ROWS["sst2"])
    assert 100 * share == pytest.approx(line["epochs"][-1]["score"], 1e-3)
    assert training.packed([True, False, False, False, True]) == "11"
    (epoch,) = trained(tiny, task="mnli", method="full", rate=1e-2)["epochs"]
    assert list(epoch["parts"]) == ["matched accuracy", "mismatched accuracy"]
    assert epoch["score"] == pytest.approx(statistics.mean(epoch["parts"].values()), abs=1e-3)


def test_a_run_is_the_same_when_it_is_run_again(tiny):
    first, second = (trained(tiny, until=0.5, decay="linear", warmup=0.4, candidates="linear") for _ in range(2))
    assert (first["epochs"], first["facts"]) == (second["epochs"], second["facts"])


def test_a_head_has_the_rate_of_the_others_or_one_of_its_own(tiny):
    same, own = (trained(tiny, head_rate=rate)["epochs"] for rate in (BASE.rate, 10 * BASE.rate))
    assert same == trained(tiny)["epochs"] != own


def test_adamw_has_the_beta2_that_is_given(tiny, monkeypatch):
    made, adamw = [], torch.optim.AdamW
    monkeypatch.setattr(torch.optim, "AdamW", lambda *args, **options: made.append(adamw(*args, **options)) or made[-1])
    trained(tiny, beta2=0.9)
    assert made[0].defaults["betas"] == (0.9, 0.9)


def test_the_papers_head_is_part_of_the_budget_new_pooler_included(tmp_path):
    path = saved("DebertaV2ForMaskedLM", "DebertaV2Config", tmp_path, pooler_hidden_size=WIDTH)
    assert trained(path, head="budget")["trained"] == BUDGET
    dense = trained(path, head="dense")
    assert dense["trained"] - BUDGET == dense["head"] == HEAD + WIDTH * WIDTH + WIDTH


def test_the_mpnet_that_reads_the_mean_is_judged_on_test_rows_too(tmp_path):
    path = saved("MPNetForMaskedLM", "MPNetConfig", tmp_path)
    (tmp_path / "modules.json").write_text("[]")  # sentence-transformers'
    line = trained(path, task="mrpc", with_test=True)
    assert line["trained"] - BUDGET == line["head"] == HEAD
    assert line["facts"]["judged_rows"] == len(ROWS["mrpc"]) + len(TEST_ROWS)
    with pytest.raises(SystemExit, match=r"--with-test: `qqp` is not in SPARSIFY_DATA"):
        tasks.load_rows(tasks.TASKS["qqp"], with_test=True)


def test_held_out_rows_train_no_run_and_the_halves_share_no_row():
    rows = [{"number": i} for i in range(20)]
    train, judged = tasks.choose_rows(rows, {}, rows=10, held_out=5)
    more, same = tasks.choose_rows(rows, {}, rows=None, held_out=5)
    assert judged == same
    assert (len(train), len(more), len(judged[""])) == (10, 15, 5)
    assert more[:10] == train
    assert not any(row in judged[""] for row in more)
    assert tasks.choose_rows(rows, {"": rows}, rows=None, held_out=None)[1] == {"": rows}
    first, second = tasks.halves(9)
    assert sorted(first + second) == list(range(9))
    with pytest.raises(SystemExit, match="--held-out 20, and there are 20 training rows"):
        tasks.choose_rows(rows, {}, None, 20)


def test_missing_data_is_an_error_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SystemExit, match=r"`qqp` is not in SPARSIFY_DATA=.*pip install 'sparsify-ft\[paper\]'"):
        tasks.load_rows(tasks.TASKS["qqp"])


def test_every_suite_can_be_planned_and_a_run_is_planned_once_whatever_it_does_not_depend_on():
    for name in suites.SUITES:
        options = run.parse_arguments(["--suite", name, "--exp", "0", "2", "--rows", "5"])
        planned = suites.plan(run.chosen_suite(options), run.chosen_recipes(options), {})
        assert {settings.rows for settings in planned} == {5}
        assert {settings.exp for settings in planned if settings.method.startswith("id3")} == {0, 2}
    suite = replace(suites.SUITES["local"], tasks=("sst2",), seeds=(0, 1))
    planned = suites.plan(suite, [{"until": 0.2}, {"until": 1.0}], {})
    count = Counter(settings.method for settings in planned)
    # four rates and two seeds; two budgets; two recipes
    assert (count["id3"], count["pafi"], count["lora"], count["full"], count["bitfit"]) == (32, 16, 16, 8, 8)
    assert len({settings.key for settings in planned}) == len(planned)
    seeds = [settings.seed for settings in planned]
    assert seeds == sorted(seeds), "a table of one seed is complete before the next begins"


# a worker that trains nothing: a rate of 13 fails, one of 99 does not end
WORKER = """
import json, sys, time
from pathlib import Path
from examples.paper.runs import append
task = json.loads(sys.argv[1])
rate = task["settings"]["rate"]
while rate == 99:
    time.sleep(0.1)
if rate == 13:
    sys.exit("no luck")
append(Path(task["path"]), {"settings": task["settings"], "run": time.time()})
"""


@pytest.fixture
def worker(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    monkeypatch.setattr(runs, "WORKER", (str(script),))


def at(*rates):
    return [replace(BASE, rate=rate) for rate in rates]


@pytest.mark.usefixtures("worker")
def test_what_is_missing_is_run_and_a_failure_stops_nothing(tmp_path, capsys):
    path = tmp_path / "results" / "runs.jsonl"
    assert runs.run_missing(at(1, 13, 2), path, 2, "cpu", "") == [at(13)[0].key]
    first = runs.read(path)
    assert first.keys() == {settings.key for settings in at(1, 2)}
    assert runs.run_missing(at(1, 2, 3), path, 1, "cpu", "") == []
    again = runs.read(path)
    assert again.items() >= first.items()
    assert len(path.read_text().splitlines()) == len(again) == 3
    shown = capsys.readouterr()
    assert shown.out.splitlines()[-1].endswith("1 of 1: sst2 id3 50 at 3, seed 0")
    assert shown.err.strip() == "no luck"


@pytest.mark.usefixtures("worker")
def test_an_interrupted_command_loses_nothing_that_has_finished(tmp_path, monkeypatch):
    path, sleep = tmp_path / "runs.jsonl", time.sleep

    def interrupted(seconds):
        sleep(seconds)
        if len(runs.read(path)) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(runs.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runs.run_missing(at(1, 2, 99, 3), path, 2, "cpu", "")
    assert runs.read(path).keys() == {settings.key for settings in at(1, 2, 3)}


def test_a_line_that_was_cut_off_is_run_again_and_spoils_no_other(tmp_path):
    path = tmp_path / "runs.jsonl"
    first, second = ({"settings": asdict(each)} for each in at(1, 2))
    runs.append(path, first)
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2])
    assert list(runs.read(path).values()) == [first]
    runs.append(path, second)
    assert list(runs.read(path).values()) == [first, second]
    old = {"settings": {name: value for name, value in asdict(BASE).items() if name != "warmup"}}
    runs.append(path, old)  # of a version before the setting was added, whose default it has
    assert list(runs.read(path))[2:] == [BASE.key]


def line(rate, seed, *halves, method="id3", task="sst2", loss=0.5, **settings):
    """A run whose epochs have these scores on the two halves; on all rows, their mean."""
    own = replace(BASE, method=method, task=task, rate=rate, seed=seed, **settings)
    epochs = [{"score": statistics.mean(pair), "halves": list(pair), "loss": loss} for pair in halves]
    return {"settings": asdict(own), "epochs": epochs, "trained": 84}


RUNS = [
    line(1, 0, (70, 90), (80, 60)),  # best epoch 80, last 70
    line(1, 1, (82, 62)),
    line(2, 0, (40, 40), (60, 80)),
    line(2, 1, (62, 84)),
    line(3, 0, (99, 99)),  # a seed is missing: not to be chosen
]


def test_the_papers_score_is_of_each_runs_best_epoch_and_the_strict_one_of_rows_that_chose_nothing():
    cell = protocol.paper_cell(RUNS)
    assert (cell.scores, cell.rates) == ((80, 72, 70, 73, 99), (1, 2, 3))
    assert cell.mean == pytest.approx(78.8)
    cell = protocol.strict_cell(RUNS)
    # the first half chooses rate 1, the second 2; seed 0: the second half at 1, and the first at 2: (60 + 60) / 2
    assert (cell.scores, cell.rates, cell.seeds) == ((60, 62), (1, 2), (0, 1))
    assert math.isnan(protocol.paper_cell([line(1, 0, (1, 2), loss=None)]).loss), "it was not finite"
    by_rate = [cell for cells in protocol.rate_scores(RUNS).values() for cell in cells.values()]
    assert [(cell.rates, cell.scores) for cell in by_rate] == [((1,), (70, 72)), ((2,), (70, 73)), ((3,), (99,))]


def cells(**scores):
    return {task: protocol.Cell(tuple(own), (1,), tuple(range(len(own))), 0.5, 84) for task, own in scores.items()}


def test_a_difference_has_welchs_interval_and_pairs_of_the_same_task_and_seed():
    a, b = [84.0, 85.0, 83.5], [82.0, 82.5, 83.0]
    found = significance.strict_difference(cells(sst2=a), cells(sst2=b, cola=[1]))
    low, high = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert found.mean == pytest.approx((low + high) / 2)
    assert found.half_width == pytest.approx((high - low) / 2)
    assert found.p == stats.wilcoxon([2, 2.5, 0.5], alternative="greater").pvalue == 0.125
    assert (found.pairs, found.tasks) == (3, 1)
    two = significance.strict_difference(cells(sst2=a, cola=b), cells(sst2=b, cola=b))
    assert two.mean == pytest.approx(found.mean / 2)
    assert math.isnan(significance.strict_difference(cells(sst2=[1]), cells(sst2=[2])).half_width)
    found = significance.paper_difference(cells(sst2=[3, 4], cola=[9]), cells(sst2=[1, 2, 2], cola=[5, 6]))
    assert found.p == stats.wilcoxon([2, 1, 1, 3, 2, 2, 4, 3], alternative="greater").pvalue  # all runs with all runs
    assert significance.wilcoxon([(1, 1), (2, 2)]) == 1


def test_anova_is_over_the_values_of_a_setting_with_tasks_set_equal():
    scores = {0: [70, 71], 1: [74, 75], 2: [80, 82]}
    cases = [(i, exp, score) for exp, own in scores.items() for i, score in enumerate(own)]
    lines = [line(i, 0, (score, score), exp=float(exp)) for i, exp, score in cases]
    (found,) = significance.anova(lines, "exp").values()
    expected = stats.f_oneway(*scores.values())
    assert found == (pytest.approx(expected.statistic), pytest.approx(expected.pvalue), 3)
    lower = [line(i, 0, (score - 50,) * 2, task="cola", exp=float(exp)) for i, exp, score in cases]
    (both,) = significance.anova(lines + lower, "exp").values()
    ratio = expected.statistic * 8 / 3  # twice the squares, and 12 - 3 - 1 degrees of freedom in place of 6 - 3
    assert both == (pytest.approx(ratio), pytest.approx(stats.f.sf(ratio, 2, 8)), 3)
    assert significance.anova(lines[:2], "exp") == {}


def test_the_tables_name_what_differs_and_compare_within_a_budget():
    lines = [line(1, seed, (80 + seed, 80 + seed), until=until) for seed in (0, 1) for until in (0.2, 1.0)]
    lines += [line(1, seed, (70, 70), method="lora", exp=None, eps=None, until=None, shape=None) for seed in (0, 1)]
    lines += [line(1, 0, (90, 90), method="lora", budget=99, exp=None, eps=None, until=None, shape=None)]
    shown = tables.report(lines, "id3").splitlines()
    assert "| id3 50 (until=0.2) | 84 | 80.5 ± 0.7 | 80.5 | 0.500 | 2 |" in shown
    assert "| id3 50 (until=1.0) | 84 | 80.5 ± 6.4 (1) | 80.5 | 0.500 | 2 |" in shown
    assert "| lora 99 | 84 | 90.0 (1) | 90.0 | 0.500 | 1 |" in shown
    assert "| id3 50 at 1 (until=0.2) | 84 | 80.5, 0.500 | 80.5 | 0.500 | 2 |" in shown
    assert "| id3 50 (until=0.2) | lora 50 | +10.5 ± 6.4 | 0.25 | 2 | 1 |" in shown
    assert not any("lora 99 |" in text and "id3" in text for text in shown)
    assert shown[-1] == "- id3, 50 entries: F = 0.00, p = 1, 2 values"


SCORE_AND_LOSS = re.compile(r"(?<=\| )(-?\d+\.\d), (0\.\d{3})\b")


@pytest.mark.parametrize("page", ["examples/paper/README.md", "tutorials/choosing.md"])
def test_the_scores_and_losses_in_a_pages_tables_are_those_of_the_raw_lines(page):
    files, found = [ROOT / "examples" / "results" / f"paper_{model}.jsonl" for model in ("mpnet", "local")], set()
    lines = [line for file in files for line in runs.read(file).values()]
    for seeds in ({0}, {0, 1}, {0, 1, 2}):
        scores = protocol.rate_scores(line for line in lines if line["settings"]["seed"] in seeds)
        found |= {(f"{cell.mean:.1f}", f"{cell.loss:.3f}") for own in scores.values() for cell in own.values()}
    table_rows = re.findall(r"(?m)^\|.*", (ROOT / page).read_text(encoding="utf-8").replace("*", ""))
    shown = [pairs for row in table_rows if (pairs := SCORE_AND_LOSS.findall(row))]
    assert len(shown) > 20
    for pairs in shown:
        cells, mean = pairs[:4], pairs[4:]
        assert set(cells) <= found
        for column, value in enumerate(chain(*mean)):
            own = statistics.mean(float(pair[column]) for pair in cells)
            assert float(value) == pytest.approx(own, abs=(0.1, 1e-3)[column]), "their mean, of rounded numbers"


def test_the_command_runs_what_is_missing_prints_tables_and_prints_them_again(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    options = ["--suite", "local", "--tasks", "sst2", "--model", tiny, "--methods", "id3", "--budgets", "50",
               "--rates", "1e-3", "--seeds", "0", "--steps", "2", "--until", "0.5",
               "--results", str(tmp_path / "runs.jsonl")]  # fmt: skip
    run.main([*options, "--table"])
    assert "0 of 1 runs" in capsys.readouterr().out
    run.main([*options, "--jobs", "2"])
    shown = capsys.readouterr().out
    (line,) = [json.loads(text) for text in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert line["settings"].items() >= {"method": "id3", "until": 0.5, "rows": 2_000, "head": "dense"}.items()
    assert "--until 0.5" in line["command"]
    assert {"sparsify", "torch", "device", "threads", "rows_sha256"} <= line["facts"].keys()
    run.main([*options, "--table"])
    assert capsys.readouterr().out == shown[shown.index("1 of 1 runs") :]


@pytest.mark.parametrize("task", ["sst2", "stsb", "wnut17"])
def test_a_run_that_diverges_is_a_result_too(tiny, task):
    last = trained(tiny, task=task, method="full", rate=1e30, steps=4)
    assert json.loads(json.dumps(last, allow_nan=False))["epochs"][-1]["loss"] is None


def test_the_analyses_compare_what_increment_repeat_and_full_fine_tuning_change(tiny, tmp_path, capsys):
    analysis.main(["--model", tiny, "--steps", "4", "--budget", str(BUDGET), "--out", str(tmp_path / "pictures")])
    shown = capsys.readouterr().out
    rows = {cells[0]: cells for text in shown.splitlines() if len(cells := text.strip("| ").split(" | ")) > 5}
    entries = {name: int(rows[name][2].replace(",", "")) for name in analysis.NAMES.values()}
    assert entries["ID3, increment-S"] == BUDGET < entries["D3, repeat-S"] < entries["full"]
    assert rows["ID3, increment-S"][4] == rows["ID3, increment-S"][5], "all it changed are its entries"
    assert 0 < float(rows["full"][6]) < 1
    assert -1 <= float(shown.split()[-1]) <= 1
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {"selection.png"}


def test_reinforcement_learning_trains_equal_numbers_and_counts_what_it_sends(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reinforcement, "PRETRAINING", 2)
    results = tmp_path / "runs.jsonl"
    options = ["--steps", "2", "--results", str(results)]
    reinforcement.main([*options, "--methods", "lora", "id3", "full"])
    lora, id3, full = runs.read(results).values()
    assert lora["trained"] == id3["trained"] == reinforcement.BUDGET
    assert lora["bytes"] == [4 * lora["trained"]] * 2
    assert full["bytes"] == [4 * full["trained"]] * 2
    assert all(0 < sent < full["bytes"][0] / 100 for sent in id3["bytes"])
    capsys.readouterr()
    reinforcement.main([*options, "--methods", "full"])  # is there already
    assert len(runs.read(results)) == 3
    assert "| id3 | 8,192 | 0.001 |" in capsys.readouterr().out
