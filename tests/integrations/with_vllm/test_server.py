"""vLLM's server switches between deltas; then it follows a training over HTTP, under load, and after kills.

The deltas come first: a server that has followed a training serves no deltas.
"""

import random
import threading
import time

import pytest
import torch

pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")

from vllm_serving import PROMPTS, Run, Served, greedy

from sparsify import SparseDelta, SparsifyError
from sparsify.integrations.vllm import VLLMPublisher, VLLMServer, VLLMTasks

UPDATES = 200


def test_deltas_by_name_and_openais_api(server, folder, tmp_path):
    tasks, base = VLLMTasks(server.url), Run(folder).answers()
    runs = {name: Run(folder, strategy=strategy).step().step() for name, strategy in [("a", "id3"), ("b", "random")]}
    assert server.answers() == base
    for name, run in runs.items():
        SparseDelta.from_model(run.model).save(tmp_path / name)
        tasks.load(name, tmp_path / name)
    for name in ("a", "b", "a"):
        tasks.activate(name)
        assert server.answers() == runs[name].answers() != base
        assert [*server.generate(PROMPTS[0])[1]] == [f"{name} of a,b"]
    with pytest.raises(SparsifyError, match="no delta called 'c' is attached"):
        tasks.activate("c")
    assert tasks.list() == {"a": True, "b": False}
    tasks.deactivate()
    assert server.answers() == base
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
            answers.append((number, *server.generate(PROMPTS[number])[:2]))

    askers = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    for number, (update, _, _) in enumerate(versions):
        publisher(update)
        publisher.wait()
        if not number:
            [asker.start() for asker in askers]
    done.set()
    [asker.join() for asker in askers]
    assert len(answers) > UPDATES // 2
    for number, tokens, (label,) in answers:
        assert tokens == expected[label][number]
    assert len({label for _, _, (label,) in answers}) > UPDATES // 4


@pytest.mark.parametrize("in_flight", ["keep", "abort"])
def test_an_answer_in_flight_goes_on_in_the_new_version_or_ends(server, folder, in_flight):
    run, prompt, count, seen = Run(folder), PROMPTS[0], 48, []
    publisher = VLLMPublisher(None, server.url, in_flight=in_flight)
    publisher(run.publisher.snapshot())
    publisher.wait()
    for attempt in range(100):  # until an update comes in the middle of an answer, however fast the machine is
        before = greedy(run.model, [prompt], count)[0]
        run.step()
        update = run.publisher.update()
        asking = threading.Thread(target=lambda: seen.append(server.generate(prompt, count)))
        asking.start()
        time.sleep(attempt / 250)
        publisher(update)
        publisher.wait()
        asking.join()
        tokens, versions, reason = seen[-1]
        if 0 < [*versions.values(), 0][0] < count:
            break
    first = f"{update.chain}:{update.version - 1}"
    if in_flight == "abort":
        assert (versions, reason, tokens) == ({first: len(tokens)}, "abort", before[: len(tokens)])
    else:
        begun = versions[first]
        assert (versions, reason) == ({first: begun, f"{update.chain}:{update.version}": count}, "length")
        assert tokens[:begun] == before[:begun]
        assert tokens[begun:] == greedy(run.model, [prompt + tokens[:begun]], count - begun)[0]


def test_a_bad_update_over_http_changes_nothing(server):
    label, before = VLLMServer(server.url).call("weight_info", "GET"), server.answers()
    with pytest.raises(SparsifyError, match=r"answers 500: this is no update that can be used: .* `snapshot\(\)`\.$"):
        VLLMServer(server.url).change("bad", data="AAAA")
    assert server.answers() == before
    assert VLLMServer(server.url).call("weight_info", "GET") == label


def test_an_engine_that_is_killed_during_or_between_updates_catches_up_when_it_is_there_again(folder):
    run, server = Run(folder), Served(folder)
    publisher = VLLMPublisher(run.model, server.url, attempts=2, timeout=10)  # without its engine a server hangs
    try:
        for is_during in (True, False):
            engine = server.wait_until_up().engine_process()
            killing = threading.Timer(0.7, engine.kill)
            killing.start()
            while is_during and server.process.poll() is None and engine.is_running():
                publisher.update()
                run.step()
            killing.join()
            publisher.update()
            with pytest.raises(SparsifyError, match=r"does not take it|EngineCore|weight_update"):
                publisher.wait()
            server.close()
            server = Served(folder, server.port).wait_until_up()
            publisher.update()
            publisher.wait()
            assert server.answers() == run.answers()
            run.step()
    finally:
        server.close()
