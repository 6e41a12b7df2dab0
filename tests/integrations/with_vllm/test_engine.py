"""vLLM's engine in this process, on a CPU, follows a training; ``environment.sh`` makes the environment for it."""

import os
from types import SimpleNamespace

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")
pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")

from vllm_serving import CONFIGS, InProcess, Run, save

from sparsify import SparsifyError


@pytest.fixture
def serve(tmp_path):
    engines = []

    def start(name, **options):
        engines.append(InProcess(save(name, tmp_path), **options))
        return engines[-1], Run(tmp_path, modules_to_save=["lm_head"] if name == "Llama" else None)

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_are_the_trainers_at_every_version(serve, name):
    engine, run = serve(name)
    seen = [engine.answers()]
    engine.send(run.publisher.snapshot())
    for _ in range(5):
        assert engine.answers() == run.answers() == seen[-1]
        engine.send(run.step().publisher.update())
        seen.append(run.answers())
    assert engine.answers() == seen[-1]
    assert len(set(map(str, seen))) > 3, "the answers change"


def test_no_update_waits_for_the_loader(serve):
    engine, run = serve("Qwen3Moe")
    served = engine.llm.llm_engine.model_executor.driver_worker.worker.get_model()
    served.load_weights = None
    engine.send(run.step().publisher.update().snapshot())
    assert engine.answers() == run.answers()


def test_damaged_doubled_reordered_and_foreign_updates_change_nothing(serve, tmp_path):
    engine, run = serve("Llama")
    engine.send(run.publisher.snapshot())
    update, later, last = (run.step().publisher.update() for _ in range(3))
    engine.send(update)
    before, damaged = engine.answers(), bytearray(bytes(later))
    damaged[-3] ^= 1
    other_base = Run(save("Llama", tmp_path / "other", seed=1)).step().publisher.update().snapshot()
    for message, problem in [
        (damaged, "DeltaFormatError: this is no update that can be used"),
        (update, "StaleUpdateError: this is version 1 of this run"),
        (last, "MissingUpdateError: this update makes version 3 from version 2"),
        (Run(tmp_path).step().publisher.update(), "MissingUpdateError.* of another run"),
        (other_base, "BaseMismatchError: tensor `.*` does not hold the values that the delta was"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            engine.send(message)
        assert engine.answers() == before
    engine.send(later)
    engine.send(last)
    assert engine.answers() == run.answers()


def test_an_update_is_on_both_of_two_ranks_or_on_none(serve):
    engine, run = serve("Qwen2", tensor_parallel_size=2)
    first, second, third = (run.publisher.snapshot(), *(run.step().publisher.update() for _ in range(2)))
    engine.send(first)
    for update, problem in [(bytes(second)[:-9], "DeltaFormatError"), (third, "MissingUpdateError: this update makes")]:
        with pytest.raises(Exception, match=problem):
            engine.send(update)
    engine.send(second)
    engine.send(third)
    assert engine.answers() == run.answers()


def test_models_with_other_weights_than_the_checkpoints_are_refused_at_the_start():
    from sparsify.integrations.vllm.engine import check_supported

    for setting, problem in [
        ({"quantization": "fp8"}, r"the model is quantized \(fp8\): serve it unquantized"),
        ({"use_mla": True}, "multi-head latent attention keeps products of weights"),
        ({"enable_eplb": True}, "EPLB moves experts between ranks"),
        ({"data_parallel_size": 2}, "start a server for each"),
    ]:
        defaults = {"quantization": None, "use_mla": False, "enable_eplb": False, "data_parallel_size": 1}
        both = SimpleNamespace(**defaults | setting)
        with pytest.raises(SparsifyError, match=problem):
            check_supported(SimpleNamespace(model_config=both, parallel_config=both))
