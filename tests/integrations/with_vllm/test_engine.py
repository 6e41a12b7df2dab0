"""vLLM itself, on a CPU, follows a training: `environment.sh` makes the environment for it."""

import os

import pytest

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind", VLLM_LOGGING_LEVEL="ERROR")
pytest.importorskip("vllm.entrypoints.llm", exc_type=ImportError, reason="needs vLLM: see environment.sh")

from types import SimpleNamespace

from vllm_serving import CONFIGS, InProcess, Run, save

from sparsify import SparsifyError


@pytest.fixture
def serve(tmp_path):
    engines = []

    def start(name, **options):
        folder = save(name, tmp_path / "base")
        engines.append(InProcess(folder, **options))
        return folder, engines[-1]

    yield start
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_answers_are_the_trainers_at_every_version(serve, name):
    folder, engine = serve(name)
    run = Run(folder, modules_to_save=["lm_head"] if name == "Llama" else None)
    seen = [engine.answers()]
    engine.send(run.publisher.snapshot())
    for _ in range(5):
        assert engine.answers() == run.answers() == seen[-1]
        engine.send(run.step().publisher.update())
        seen.append(run.answers())
    assert engine.answers() == seen[-1]
    assert len({str(answers) for answers in seen}) > 3, "the answers change"


def test_two_ranks_share_a_model_and_an_update_is_on_both_or_on_none(serve):
    folder, engine = serve("Qwen2", tensor_parallel_size=2)
    run = Run(folder)
    first, second, third = (run.publisher.snapshot(), *(run.step().publisher.update() for _ in range(2)))
    engine.send(first)
    for update, problem in [(bytes(second)[:-9], "DeltaFormatError"), (third, "MissingUpdateError: this update makes")]:
        with pytest.raises(Exception, match=problem):
            engine.send(update)
    for update in (second, third):
        engine.send(update)
    assert engine.answers() == run.answers()


def test_damaged_doubled_reordered_and_foreign_updates_change_nothing(serve, tmp_path):
    folder, engine = serve("Llama")
    run = Run(folder)
    other = Run(save("Llama", tmp_path / "other", rms_norm_eps=1e-3))
    other.base.model.embed_tokens.weight.data += 1
    foreign = Run(folder)
    engine.send(run.publisher.snapshot())
    update, later = run.step().publisher.update(), run.step().publisher.update()
    engine.send(update)
    before = engine.answers()
    damaged = bytearray(bytes(later))
    damaged[-3] ^= 1
    for message, problem in [
        (bytes(damaged), "DeltaFormatError: this is no update that can be used"),
        (b"", "DeltaFormatError"),
        (update, "StaleUpdateError: this is version 1 of this run"),
        (run.publisher.update(), "MissingUpdateError: this update makes version 3 from version 2"),
        (foreign.step().publisher.update(), "MissingUpdateError.* of another run"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            engine.send(message)
        assert engine.answers() == before
    engine.send(later)
    assert engine.answers() == run.answers()


def test_models_whose_weights_are_not_the_checkpoints_are_refused_at_the_start():
    from sparsify.integrations.vllm.engine import check_supported

    def check(quantization=None, use_mla=False, enable_eplb=False, data_parallel_size=1):
        parallel = SimpleNamespace(enable_eplb=enable_eplb, data_parallel_size=data_parallel_size)
        model = SimpleNamespace(quantization=quantization, use_mla=use_mla)
        check_supported(SimpleNamespace(model_config=model, parallel_config=parallel))

    check()
    for option, problem in [
        ({"quantization": "fp8"}, r"the model is quantized \(fp8\): serve it unquantized"),
        ({"use_mla": True}, "multi-head latent attention keeps products of weights"),
        ({"enable_eplb": True}, "EPLB moves experts between ranks"),
        ({"data_parallel_size": 2}, "start a server for each"),
    ]:
        with pytest.raises(SparsifyError, match=problem):
            check(**option)
