"""The trainer's side of vLLM and a worker's against vLLM's routes, with a stand-in for the engine behind them."""

import base64
import subprocess
import sys
import threading
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import make_delta, tuned
from engines import Server, llama, start
from trainers import make_trainer

from sparsify import DeltaPublisher, SparseDelta, SparsifyCallback, SparsifyError, sparsify
from sparsify.integrations import receiver, vllm_plugin
from sparsify.integrations.receiver import Receiver, Request
from sparsify.integrations.vllm import VLLMPublisher, VLLMServer, VLLMTasks


class Run:
    def __init__(self):
        self.model = sparsify(llama(), 60, "random")

    def step(self):
        self.model.sparse_values.data += torch.rand(60)
        return self

    def expected(self):
        return SparseDelta.from_model(self.model).apply(llama())


@pytest.fixture
def served(tmp_path):
    return start(tmp_path / "base")


def send(publisher):
    publisher.update()
    publisher.wait()


def check_refused(publisher, version, problem):
    warning = pytest.warns(UserWarning, match=f"vLLM does not have version {version}: ")
    with warning, pytest.raises(SparsifyError, match=problem):
        send(publisher)


def b64(update):
    return base64.b64encode(bytes(update)).decode()


@pytest.mark.parametrize("lost", ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"])
def test_servers_are_kept_at_the_last_version_and_lost_answers_made_good(tmp_path, lost):
    run, engines = Run(), [start(tmp_path) for _ in range(2)]
    with Server(engines[0][1]) as one, Server(engines[1][1]) as two:
        publisher, two.active = VLLMPublisher(run.model, [one.url, two.url]), True  # left half way by another trainer
        for version in range(3):
            two.lost = lost if version else None
            update = run.step() and publisher.update()
            publisher.wait()
            assert all(engine.holds(run.expected()) for engine, _ in engines)
            assert one.label == two.label == f"{update.chain}:{update.version}"
        assert one.calls == 3 * ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


def test_the_training_is_not_held_up_by_a_slow_server(served):
    run, (engine, model), gate = Run(), served, threading.Event()
    with Server(model) as server:
        receive = server.receiver.receive
        server.receiver.receive = lambda request: (gate.wait(20), receive(request))
        publisher = VLLMPublisher(run.model, server.url)
        updates = [run.step() and publisher.update() for _ in range(5)]
        assert server.label == "default"
        gate.set()
        publisher.wait()
        assert server.label.endswith(f":{updates[-1].version}")
        assert server.calls.count("update_weights") <= 2, "the versions between are left out"
        assert engine.holds(run.expected())


def test_servers_that_come_late_or_start_again_get_a_snapshot_and_an_earlier_run_is_refused(tmp_path):
    run, (_, first), (engine, second) = Run(), start(tmp_path), start(tmp_path)
    with Server(first) as server:
        port, publisher = server.http.server_port, VLLMPublisher(run.model, server.url, attempts=2)
    with pytest.raises(SparsifyError, match="attempts is 0, expected an int of at least 1"):
        VLLMPublisher(run.model, server.url, attempts=0)
    check_refused(publisher, 0, r"does not take it .*refused.*: start it, or look at its log; the next version is sent")
    for model in (first, second):
        with Server(model, port) as server:
            for _ in range(2):
                run.step()
                send(publisher)
            other = VLLMPublisher(Run().model, server.url)
            if model is first:
                continue
            assert engine.holds(run.expected())
            send(other)
            check_refused(publisher, 5, "this is version 5 of an earlier run, and the model holds version 0")


def test_the_callback_publishes_to_servers(tmp_path, served):
    with Server(served[1]) as server:
        trained = sparsify(llama(), 60, "id3")
        publisher = VLLMPublisher(trained, server.url)
        options = {"rows": [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4, "save_strategy": "no", "max_steps": 3}
        make_trainer(trained, tmp_path, callbacks=[SparsifyCallback(publish=publisher)], **options).train()
        publisher.wait()
        assert server.label.endswith(":3")
        assert served[0].holds(SparseDelta.from_model(trained).apply(llama()))


def test_trls_protocol(served):
    trl = pytest.importorskip("trl.experimental.async_grpo.async_grpo_trainer", exc_type=ImportError)
    with Server(served[1]) as server:
        run, publisher = Run(), VLLMPublisher(None, server.url)
        assert all(hasattr(publisher, name) for name in trl.WeightTransferProtocol.__dict__ if name[0] != "_")
        publisher.init_weight_transfer()
        with pytest.raises(SparsifyError, match=r"set its `model` to what sparsify\(...\) returned"):
            publisher.send_weights(iter([]))
        publisher.model = run.model
        for _ in range(2):
            publisher.pause()
            left = iter([("a", 1), ("b", 2)])
            publisher.send_weights(left)
            assert next(left, None) is None, "ranks gather what they take from it"
            publisher.resume()
            assert served[0].holds(run.expected())
            run.step()
        publisher.destroy()


def test_deltas_by_name(tmp_path, served):
    engine, models = served[0], {name: tuned(llama(), seed=seed) for seed, name in enumerate(("french", "maths"))}
    before = engine.bits()
    with Server(served[1]) as server:
        tasks = VLLMTasks(server.url)
        for name, model in models.items():
            SparseDelta.diff(llama(), model, progress=False).save(tmp_path / name)
            tasks.load(name, tmp_path / name)
        for name in ("french", "maths", "french"):
            tasks.activate(name)
            assert engine.holds(models[name])
            assert server.label == f"{name} of french,maths"
        with pytest.raises(SparsifyError, match=r"no delta called 'math' is attached \(near: `maths`\)"):
            tasks.activate("math")
        for wrong in ([], [["french", "maths"]]):
            with pytest.raises(SparsifyError, match=r"names no delta: give names; `deactivate\(\)`"):
                tasks.activate(*wrong)
            assert tasks.list() == {"french": True, "maths": False}
        with pytest.raises(SparsifyError, match=r"the name is 'a b', expected letters"):
            tasks.load("a b", tmp_path)
        tasks.activate("french", "maths")
        assert VLLMTasks(server.url).list() == {"french": True, "maths": True}
        both = SparseDelta.load(tmp_path / "french") + SparseDelta.load(tmp_path / "maths")
        assert engine.holds(both.on(llama()).apply(llama()))
        tasks.unload("maths")
        assert tasks.list() == {"french": False}
        assert engine.holds(before)
        publisher = VLLMPublisher(Run().model, server.url)
        check_refused(publisher, 0, r"serves deltas \(french\): unload them, or use another engine")
        tasks.activate("french")
        tasks.deactivate()
        tasks.unload("french")
        send(publisher)
        with pytest.raises(SparsifyError, match="the engine follows a training run: start another one to serve deltas"):
            tasks.load("maths", tmp_path / "maths")


def test_bad_requests_are_refused(served, monkeypatch):
    publisher, worker = DeltaPublisher(Run().model), Receiver(served[1])
    monkeypatch.setattr(receiver, "MOST_BYTES", 10_000)
    for request, problem in [
        ({"data": "?"}, "DeltaFormatError: the update cannot be read"),
        ({"data": b64(publisher.snapshot())[:-8]}, "DeltaFormatError: this is no update that can be used"),
        ({"data": "A" * 40_000}, "the update has more than 10,000 bytes, of which no more are read"),
        ({"data": "A", "path": __file__}, "an update comes as one of data and path: give one of them"),
        ({"action": "update"}, "an update comes as one of data and path: give one of them"),
        ({"path": "/dev/zero"}, "DeltaFormatError: the update cannot be read .*`/dev/zero` is no file"),
        ({"data": b64(publisher.update())}, "MissingUpdateError: this update makes version 1 from version 0"),
        ({"action": "dance"}, "the action is 'dance', expected one of update, attach, detach, activate, deactivate"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            worker.receive(Request(**request))
    with pytest.raises(SparsifyError, match="in_flight is 'now', expected one of wait, keep, abort"):
        VLLMServer("http://x", in_flight="now")


def test_updates_come_from_files(tmp_path, served):
    run, worker = Run(), Receiver(served[1])
    publisher = DeltaPublisher(run.model)
    for update in (publisher.snapshot, lambda: publisher.update()):
        (tmp_path / "update").write_bytes(bytes(update()))
        worker.receive(Request(path=str(tmp_path / "update")))
        assert served[0].holds(run.expected())
        run.step()


@pytest.mark.parametrize("action", ["update", "attach", "activate"])
def test_what_another_rank_refuses_is_undone(tmp_path, monkeypatch, action):
    engine, model = start(tmp_path / "base", 1, 2)
    make_delta(llama(), every=9).save(tmp_path / "delta")
    worker = Receiver(model, SimpleNamespace(rank=lambda: 1, size=lambda: 2))
    update = b64(DeltaPublisher(Run().step().model).snapshot())
    arguments = {"update": [], "attach": ["a", str(tmp_path / "delta")], "activate": ["a"]}

    def with_other(*, refuses=False, lacks=False):
        monkeypatch.setattr(worker, "_highest", lambda x: x.clamp(min=refuses) if len(x) == 1 else x | (not lacks))

    with_other()
    if action == "activate":
        worker.receive(Request("attach", arguments=arguments["attach"]))
    before, request = engine.bits(), Request(action, update, arguments[action])
    for other in [{"refuses": True}, {"lacks": True}][: 1 + (action != "activate")]:
        with_other(**other)
        with pytest.raises(SparsifyError, match="another rank of the engine refuses it, or no rank has some entries"):
            worker.receive(request)
        assert engine.holds(before)
    with_other()
    worker.receive(request)


def test_sglangs_hook(served, tmp_path, monkeypatch):
    """A stub of the hook: ``custom_loader(model, [(name, tensor)])``, as SGLang 0.5.23 calls it."""
    from sparsify.integrations.sglang import load

    world = SimpleNamespace(world_size=1, cpu_group=None)
    monkeypatch.setitem(sys.modules, "sglang.srt.distributed", SimpleNamespace(get_world_group=lambda: world))
    run, folder = Run(), str(tmp_path / "base")
    publisher = DeltaPublisher(run.model)
    updates = [publisher.snapshot(), *(run.step() and publisher.update() for _ in range(2))]
    pairs = [(folder, torch.frombuffer(bytearray(bytes(update)), dtype=torch.uint8)) for update in updates]
    load(served[0], pairs)
    assert served[0].holds(run.expected())
    with pytest.raises(SparsifyError, match="StaleUpdateError: this is version 2 of this run"):
        load(served[0], pairs[2:])


def test_the_entry_point_costs_nothing_where_there_is_no_vllm():
    (point,) = [each for each in entry_points(group="vllm.general_plugins") if each.name == "sparsify"] or [None]
    assert point is None or point.value == "sparsify.integrations.vllm_plugin:register"
    code = "import sys; from sparsify.integrations import vllm_plugin; vllm_plugin.register()"
    code += "; print({'transformers', 'huggingface_hub', 'peft', 'sparsify.integrations.vllm'} & set(sys.modules))"
    root = Path(receiver.__file__).parents[2]
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert run.stdout == "set()\n"


@pytest.mark.parametrize("is_cpu", [False, True])
def test_on_a_gpu_the_backend_is_registered_and_nothing_of_vllm_changed(monkeypatch, is_cpu):
    registered, update = [], {"check_and_update_config": staticmethod(print)}
    platform = type("Platform", (), {"is_cpu": lambda self: is_cpu, **update})
    factory = SimpleNamespace(register_engine=lambda *names: registered.append(names[0]))
    transfer = SimpleNamespace(WeightTransferEngineFactory=factory)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", transfer)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform()))
    vllm_plugin.register()
    assert registered == ["sparsify"]
    assert (platform.check_and_update_config is print) == (not is_cpu)
