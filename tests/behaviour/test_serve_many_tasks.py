"""The serving example: over real HTTP, each task's answers are those of its delta alone, in any order of requests."""

import copy
import json
import random
import re
import signal
import subprocess
import sys
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from models import train
from transformers import AutoTokenizer

from sparsify import SparseDelta, sparsify
from sparsify.cli.demo import Example, default_model

EXAMPLES = Path(__file__).parents[2] / "examples"
TEXTS = ["a fine film", "dull and far too long", "warm and funny"]
PAIRS = [["a fine film", "warm and funny"], ["a waste of time", "fine"]]
LABELS = {"mood": 2, "topic": 3, "same": 2}  # how many each task has
BUDGET, BASE = 120, default_model()  # the folder of a pretrained encoder, which has no head


@pytest.fixture(scope="module")
def examples(example):
    return example("serve_many_tasks"), example("serve_many_tasks_demo")


@pytest.fixture(scope="module")
def classifier(examples):
    return lambda num_labels: examples[0].classifier_class(BASE).from_pretrained(BASE, num_labels=num_labels)


def tokens(*columns):
    return AutoTokenizer.from_pretrained(BASE)(*columns, padding=True, return_tensors="pt")


@pytest.fixture(scope="module")
def paths(classifier, tmp_path_factory):
    folder = tmp_path_factory.mktemp("deltas")
    paths = {"mood": folder / "mood", "topic": folder / "topic.safetensors", "same": folder / "same"}
    for seed, (name, num_labels) in enumerate(LABELS.items(), start=1):
        torch.manual_seed(seed)
        model = classifier(num_labels)
        sparsify(model, BUDGET, "id3", steps=3, modules_to_save=["classifier"])
        train(model, [{**tokens(TEXTS), "labels": torch.arange(len(TEXTS)) % num_labels}] * 3, lr=0.01)
        SparseDelta.from_model(model).save(paths[name])
    return paths


@pytest.fixture(scope="module")
def expected(classifier, paths):
    scores = {}
    for name, path in paths.items():
        model = classifier(LABELS[name]).eval()
        SparseDelta.load(path).apply(model)
        for kind, columns in (("texts", [TEXTS]), ("pairs", [list(column) for column in zip(*PAIRS, strict=True)])):
            with torch.no_grad():
                scores[name, kind] = model(**tokens(*columns)).logits.softmax(-1)
    assert (scores["mood", "texts"] - scores["same", "texts"]).abs().max() > 0.01, "the tasks differ"
    return scores


@pytest.fixture
def tasks(examples, paths):
    return examples[0].load(BASE, paths)


@pytest.fixture
def server(examples, tasks):
    serve, demo = examples
    with demo.served(serve.make_app(tasks)) as url:
        yield lambda path, *body: demo.ask(f"{url}/{path}", *body)


def check(answer, task, kind, expected):
    torch.testing.assert_close(torch.tensor(answer["scores"]), expected[task, kind], atol=1e-6, rtol=0)
    assert answer["task"] == task
    assert answer["labels"] == expected[task, kind].argmax(-1).tolist()


def body(task, kind):
    return {"task": task, kind: TEXTS if kind == "texts" else PAIRS}


def test_each_task_answers_many_clients_at_once_as_its_delta_alone_would_on_a_base_of_its_own(server, tasks, expected):
    before = copy.deepcopy(tasks.model.state_dict())
    wanted = random.Random(0).choices([(task, kind) for task in LABELS for kind in ("texts", "pairs")], k=60)
    with ThreadPoolExecutor(8) as clients:
        answers = clients.map(lambda one: server("predict", body(*one)), wanted)
        for (task, kind), answer in zip(wanted, answers, strict=True):
            check(answer, task, kind, expected)
    assert len(tasks.swaps_ms) > 3
    tasks.switch.deactivate()
    assert all(torch.equal(before[name], tensor) for name, tensor in tasks.model.state_dict().items())


def test_only_a_change_of_task_swaps_and_the_list_says_so(server, paths):
    swapped = [server("predict", body(task, "texts"))["swap_ms"] > 0 for task in ("mood", "mood", "same")]
    assert swapped == [True, False, True]
    found = server("tasks")
    assert found["swaps"] == 2
    assert found["median_swap_ms"] > 0
    assert [name for name, task in found["tasks"].items() if task["active"]] == ["same"]
    assert all(task["entries"] == BUDGET for task in found["tasks"].values())
    assert found["tasks"]["topic"]["bytes"] == paths["topic"].stat().st_size
    assert found["tasks"]["mood"]["bytes"] == (paths["mood"] / "sparse_delta.safetensors").stat().st_size


@pytest.mark.parametrize(
    ("wrong", "status", "text"),
    [
        ({"task": "moot", "texts": ["a"]}, 404, "there is no task 'moot'; there are: mood, topic, same"),
        ({"task": "mood"}, 422, "give either texts or pairs"),
        ({"task": "mood", "texts": ["a"] * 65}, 422, "at most 64"),
    ],
)
def test_a_wrong_request_is_refused_and_swaps_nothing(server, tasks, wrong, status, text):
    with pytest.raises(urllib.error.HTTPError) as error:
        server("predict", wrong)
    assert error.value.code == status
    assert text in error.value.read().decode()
    assert tasks.switch.active is None


def test_a_head_that_fits_nowhere_is_refused_when_the_server_starts(examples, paths, tmp_path):
    for shape, more, text in (
        ((2, 5), {"classifier.bias": torch.ones(2)}, r"no place for the delta's `classifier\.weight` of"),
        ((2, 384), {}, r"neither the base nor .* has a trained `classifier\.bias`"),
    ):
        whole = {"classifier.weight": torch.ones(shape), **more}
        SparseDelta(SparseDelta.load(paths["mood"]).tensors, whole).save(tmp_path)
        with pytest.raises(SystemExit, match=text):
            examples[0].main(["--base", BASE, "--delta", f"mood={tmp_path}"])


@pytest.mark.parametrize("deltas", [["mood"], ["=mood"], ["mood=a", "mood=b"]])
def test_deltas_are_named_once_each(examples, deltas, capsys):
    with pytest.raises(SystemExit):
        examples[0].main(["--base", "anything", *(word for delta in deltas for word in ("--delta", delta))])
    assert re.search("expected NAME=PATH|a task's name is there twice", capsys.readouterr().err)


def test_the_command_serves_until_it_is_interrupted_and_says_how_long_swaps_took(examples, paths, expected):
    options = [word for name, path in paths.items() for word in ("--delta", f"{name}={path}")]
    command = [sys.executable, str(EXAMPLES / "serve_many_tasks.py"), "--base", BASE, *options, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            lines = (re.search(r"running on (http://[\d.:]+)", line) for line in process.stderr)
            url = next(filter(None, lines))[1]
            for task in ("mood", "topic"):
                check(examples[1].ask(f"{url}/predict", body(task, "texts")), task, "texts", expected)
        finally:
            process.send_signal(signal.SIGINT)
        assert re.search(r"^2 swaps, median [\d.]+ ms$", process.stdout.read(), re.MULTILINE)


def test_the_demonstration_trains_serves_and_asks(examples, capsys):
    rows = [Example(f"{text} {text}", label, "") for label, text in enumerate(TEXTS)] * 4
    examples[1].run(rows, rows, steps=1)
    shown = capsys.readouterr().out
    assert shown.count("POST /predict, task ") == 2
    assert "order: held-out accuracy" in shown
    assert "42 swaps, median" in shown
    listed = json.loads(shown[shown.index("{") : shown.rindex("}") + 1])
    assert [task["entries"] for task in listed["tasks"].values()] == [38_000, 38_000]
