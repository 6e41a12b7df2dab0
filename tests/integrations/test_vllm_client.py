"""The trainer's side of vLLM against its routes, with a stand-in for the engine behind them."""

import base64
import socket
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make_delta, tuned
from engines import Server, llama, same, start, weights
from trainers import make_trainer

from sparsify import SparseDelta, SparsifyCallback, SparsifyError, sparsify
from sparsify.integrations import receiver
from sparsify.integrations.receiver import Receiver, Request
from sparsify.integrations.vllm.client import VLLMPublisher, VLLMServer, VLLMTasks, typed_error
from sparsify.stream.publisher import DeltaPublisher


class Run:
    def __init__(self, **options):
        self.model = sparsify(llama(), 60, "random", **options)

    def step(self):
        self.model.sparse_values.data += torch.rand(60)
        return self

    def expected(self):
        return SparseDelta.from_model(self.model).apply(llama())


@pytest.fixture
def served(tmp_path):
    return start(tmp_path)


def b64(update):
    return base64.b64encode(bytes(update)).decode()


def test_several_servers_are_kept_at_the_last_version(tmp_path):
    run, engines = Run(), [start(tmp_path) for _ in range(2)]
    with Server(engines[0][1]) as one, Server(engines[1][1]) as two:
        publisher = VLLMPublisher(run.model, [one.url, two.url])
        for _ in range(3):
            update = publisher.update()
            publisher.wait()
            assert all(same(engine, run.expected()) for engine, _ in engines)
            assert one.label == two.label == f"{update.chain}:{update.version}"
            run.step()
        for server in (one, two):
            routes = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
            assert server.calls == 3 * routes


def test_the_training_is_not_held_up_by_a_slow_server(served):
    run, (engine, model), gate = Run(), served, threading.Event()
    with Server(model) as server:
        receive = server.receiver.receive
        server.receiver.receive = lambda request: (gate.wait(20), receive(request))
        publisher = VLLMPublisher(run.model, server.url)
        for _ in range(5):
            publisher.update()
            run.step()
        assert server.label == "default"
        last = publisher.update()
        gate.set()
        publisher.wait()
        assert server.label.endswith(f":{last.version}")
        assert server.calls.count("update_weights") == 2, "the versions between are left out"
        assert same(engine, run.expected())


def test_servers_that_come_late_or_start_again_get_a_snapshot(tmp_path):
    run, (_, first), (engine, second) = Run(), start(tmp_path), start(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    publisher = VLLMPublisher(run.model, f"http://127.0.0.1:{port}", attempts=2)
    with pytest.warns(UserWarning, match="vLLM does not have version 0: .* cannot be reached"):
        publisher.update()
        with pytest.raises(SparsifyError, match="cannot be reached .*: start it; the next version is sent as a snaps"):
            publisher.wait()
    for model in (first, second):
        with Server(model, port):
            for _ in range(2):
                run.step()
                publisher.update()
                publisher.wait()
    assert same(engine, run.expected())


@pytest.mark.parametrize("route", ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"])
def test_a_lost_connection_or_answer_is_made_good(served, route):
    run, (engine, model) = Run(), served
    with Server(model) as server:
        publisher = VLLMPublisher(run.model, server.url)
        for lost in range(3):
            if lost:
                server.failures = [(route, ConnectionError())]
            update = publisher.update()
            publisher.wait()
            assert same(engine, run.expected())
            assert server.label == f"{update.chain}:{update.version}"
            run.step()


def test_a_half_way_update_of_another_trainer_is_ended(served):
    run, (engine, model) = Run(), served
    with Server(model) as server:
        server.active = True  # start_weight_update, and then no more
        publisher = VLLMPublisher(run.model, server.url)
        publisher.update()
        publisher.wait()
        assert same(engine, run.expected())
        other = VLLMPublisher(Run().step().model, server.url)  # a later run, which takes over
        other.update()
        other.wait()
        run.step()
        with pytest.warns(UserWarning, match="vLLM does not have version 1"):
            publisher.update()
            with pytest.raises(SparsifyError, match="this is version 1 of an earlier run, and the model holds version 0"):
                publisher.wait()


def test_the_callback_publishes_to_servers(tmp_path):
    engine, model = start(tmp_path / "model")
    with Server(model) as server:
        trained = sparsify(llama(), 60)
        publisher = VLLMPublisher(trained, server.url)
        rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
        options = {"rows": rows, "save_strategy": "no", "max_steps": 3}
        make_trainer(trained, tmp_path, callbacks=[SparsifyCallback(publish=publisher)], **options).train()
        publisher.wait()
        assert server.label.endswith(":3")
        assert same(engine, SparseDelta.from_model(trained).apply(llama()))


def test_trls_protocol(served):
    run, (engine, model) = Run(), served
    trl = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", exc_type=ImportError)
    publisher = VLLMPublisher(None, "http://127.0.0.1:9")
    assert all(hasattr(publisher, name) for name in trl.WeightTransferProtocol.__dict__ if name[0] != "_")
    publisher.init_weight_transfer()
    with pytest.raises(SparsifyError, match=r"set its `model` to what sparsify\(...\) returned"):
        publisher.send_weights(iter([]))
    with Server(model) as server:
        publisher = VLLMPublisher(None, server.url)
        publisher.model = run.model
        for _ in range(2):
            publisher.pause()
            left = iter([("a", 1), ("b", 2)])
            publisher.send_weights(left)
            assert next(left, None) is None, "ranks gather what they take from it"
            publisher.resume()
            assert same(engine, run.expected())
            run.step()
        publisher.destroy()


def test_deltas_by_name(tmp_path, served):
    (engine, model), base = served, llama()
    models = {name: tuned(base, seed=seed, every=9) for seed, name in enumerate(("french", "maths"))}
    for name, other in models.items():
        SparseDelta.diff(base, other, progress=False).save(tmp_path / name)
    before = weights(engine)
    with Server(model) as server:
        tasks = VLLMTasks(server.url)
        assert tasks.list() == {}
        for name in models:
            tasks.load(name, tmp_path / name)
        for name in ("french", "maths", "french"):
            tasks.activate(name)
            assert same(engine, models[name])
            assert server.label == f"{name} of french,maths"
        tasks.activate("french", "maths")
        assert VLLMTasks(server.url).list() == {"french": True, "maths": True}
        with pytest.raises(SparsifyError, match=r"no delta called 'math' is attached \(near: `maths`\)"):
            tasks.activate("math")
        with pytest.raises(SparsifyError, match=r"the name is 'a b', expected letters"):
            tasks.load("a b", tmp_path)
        tasks.unload("maths")
        assert tasks.list() == {"french": False}
        assert all(tensor.equal(before[name]) for name, tensor in engine.named_parameters())
        publisher = VLLMPublisher(Run().model, server.url)
        with pytest.warns(UserWarning, match="does not have version 0"):
            publisher.update()
            with pytest.raises(SparsifyError, match=r"serves deltas \(french\): unload them, or use another engine"):
                publisher.wait()


def test_bad_requests_are_refused(served, monkeypatch):
    model, publisher = served[1], DeltaPublisher(Run().model)
    worker, good = Receiver(model), b64(publisher.snapshot())
    monkeypatch.setattr(receiver, "MOST_BYTES", 10_000)
    for request, problem in [
        ({}, "DeltaFormatError: this is no update that can be used"),
        ({"data": "?"}, "DeltaFormatError: the update is no base64"),
        ({"data": good[:-8]}, "DeltaFormatError: this is no update that can be used"),
        ({"data": "A" * 40_000}, "the update has 30,000 bytes, and at most 10,000 are read"),
        ({"data": b64(publisher.update())}, "MissingUpdateError: this update makes version 1 from version 0"),
        ({"action": "dance"}, "the request is 'dance' of 0 names; expected update, load"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            worker.receive(Request(**request))
    worker.receive(Request(data=good))
    with pytest.raises(SparsifyError, match="the engine follows a training run: start another one to serve deltas"):
        worker.receive(Request("load", ["a"], path="x"))


@pytest.mark.parametrize("action", ["update", "load", "activate"])
def test_what_another_rank_refuses_is_undone(tmp_path, monkeypatch, action):
    engine, model = start(tmp_path / "model", 1, 2)
    make_delta(llama(), every=9).save(tmp_path / "delta")
    worker = Receiver(model, SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    load = Request("load", ["a"], path=str(tmp_path / "delta"))
    update = Request(data=b64(DeltaPublisher(Run().step().model).snapshot()))
    request = {"update": update, "load": load, "activate": Request("activate", ["a"])}[action]

    def others(refuse, lack=False):
        def highest(numbers):
            return numbers.clamp(min=refuse) if len(numbers) == 1 else numbers | (not lack)

        monkeypatch.setattr(worker, "_highest", highest)

    others(refuse=0)
    if action == "activate":
        worker.receive(load)
    before = weights(engine)
    for answers in [{"refuse": 1}] + [{"refuse": 0, "lack": True}] * (action != "activate"):
        others(**answers)
        with pytest.raises(SparsifyError, match="another rank of the engine refuses it, or no rank has some entries"):
            worker.receive(request)
        assert all(tensor.equal(before[name]) for name, tensor in engine.named_parameters())
    others(refuse=0)
    worker.receive(request)


def test_errors_keep_their_class_over_http():
    text = "Call to x failed: Worker failed with error 'MissingUpdateError: this update ...', please check the stack"
    assert type(typed_error(text, "x")).__name__ == "MissingUpdateError"
    assert type(typed_error("RuntimeError: no", "x")) is SparsifyError
    with pytest.raises(SparsifyError, match="in_flight is 'now', expected one of wait, keep, abort"):
        VLLMServer("http://x", "now")


def test_sglangs_hook(served, tmp_path, monkeypatch):
    """A stub of the hook: ``custom_loader(model, [(name, tensor)])``, as SGLang 0.5.23 calls it."""
    from sparsify.integrations.sglang import load

    world = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", SimpleNamespace(get_world_group=lambda: world))
    (engine, _), run, messages = served, Run(), []
    publisher = DeltaPublisher(run.model)
    for update in (publisher.snapshot(), *(run.step() and publisher.update() for _ in range(3))):
        messages.append(torch.frombuffer(bytearray(bytes(update)), dtype=torch.uint8))
    for message in messages:
        load(engine, [(str(tmp_path), message)])
    assert same(engine, run.expected())
    for pairs, problem in [(2 * [(str(tmp_path), messages[2])], "got 2"), ([("", messages[2])], "StaleUpdateError: ")]:
        with pytest.raises(SparsifyError, match=problem):
            load(engine, pairs)
