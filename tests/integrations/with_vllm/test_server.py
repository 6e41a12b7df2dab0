"""vLLM's server follows a training over HTTP, under load, and after its engine was killed; deltas by name."""

import random
import threading

import pytest
import torch

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")

from vllm_serving import PROMPTS, Run, Served, save

from sparsify import SparseDelta, SparsifyError
from sparsify.integrations.vllm.client import VLLMPublisher, VLLMTasks
from sparsify.stream.publisher import DeltaUpdate

UPDATES = 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save("Llama", tmp_path_factory.mktemp("server") / "base")


@pytest.fixture(scope="module")
def server(folder):
    server = Served(folder).wait_until_up()
    yield server
    server.close()


def test_deltas_by_name_and_openais_api(server, folder, tmp_path):
    runs = {name: Run(folder, strategy=strategy).step().step() for name, strategy in [("a", "id3"), ("b", "random")]}
    tasks, base = VLLMTasks(server.url), Run(folder).answers()
    assert [server.complete(prompt) for prompt in PROMPTS] == base
    for name, run in runs.items():
        SparseDelta.from_model(run.model).save(tmp_path / name)
        tasks.load(name, tmp_path / name)
    for name in ("a", "b", "a"):
        tasks.activate(name)
        assert [server.complete(prompt) for prompt in PROMPTS] == runs[name].answers() != base
        assert server.generate(PROMPTS[0])[1] == [f"{name} of a,b"]
    with pytest.raises(SparsifyError, match="no delta called 'c' is attached"):
        tasks.activate("c")
    assert tasks.list() == {"a": True, "b": False}
    tasks.deactivate()
    assert [server.complete(prompt) for prompt in PROMPTS] == base
    tasks.unload("a")
    tasks.unload("b")


def test_each_answer_under_load_is_of_one_version_and_says_of_which(server, folder):
    run, versions, answers, done = Run(folder, strategy="random"), [], [], threading.Event()
    for _ in range(UPDATES):
        run.model.sparse_values.data += 0.3 * torch.randn(len(run.model.sparse_values))
        update = run.publisher.update()
        versions.append((update, f"{update.chain}:{update.version}", run.answers()))
    publisher, expected = VLLMPublisher(None, server.url), {label: answers for _, label, answers in versions}

    def ask(seed):
        rng = random.Random(seed)
        while not done.is_set():
            number = rng.randrange(len(PROMPTS))
            answers.append((number, *server.generate(PROMPTS[number])))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for update, label, _ in versions:
        publisher(update)
        publisher.wait()
        if label == versions[0][1]:
            [asker.start() for asker in askers]
    done.set()
    [asker.join() for asker in askers]
    assert len(answers) > UPDATES // 2
    for number, tokens, labels in answers:
        (label,) = labels
        assert tokens == expected[label][number]
    assert len({label for _, _, (label,) in answers}) > UPDATES // 4


def test_bad_updates_over_http_change_nothing_and_a_snapshot_makes_good(server, folder):
    run = Run(folder)
    publisher = VLLMPublisher(run.model, server.url)
    publisher.update()
    publisher.wait()
    lost = run.step().publisher.update()  # of another chain
    update = DeltaUpdate(lost.chain, 5, lost._state, lost._before)
    with pytest.raises(SparsifyError, match="answers 500: this is no update that can be used: its header .* `snapshot\(\)`\.$"):
        publisher._channels[0]._server.change("bad", data="AAAA")
    publisher._channels[0]._sent = update.chain, 4  # as if the server had that
    publisher(update)
    publisher.wait()
    assert [server.generate(prompt)[0] for prompt in PROMPTS] == run.answers()
    assert server.generate(PROMPTS[0])[1] == [f"{update.chain}:5"]


def test_an_engine_that_is_killed_during_updates_catches_up_when_it_is_there_again(folder):
    run, server = Run(folder), Served(folder).wait_until_up()
    publisher = VLLMPublisher(run.model, server.url, attempts=2)
    try:
        engine = server.engine_process()
        threading.Timer(0.7, engine.kill).start()
        while server.process.poll() is None and engine.is_running():
            publisher.update()
            run.step()
        server.close()
        publisher.update()
        with pytest.raises(SparsifyError, match="cannot be reached|EngineCore|weight_update"):
            publisher.wait()
        server = Served(folder, server.port).wait_until_up()
        publisher.update()
        publisher.wait()
        assert [server.generate(prompt)[0] for prompt in PROMPTS] == run.answers()
    finally:
        server.close()
