"""Two ranks through accelerate and the Hugging Face Trainer: DDP, and FSDP2 by accelerate's plugin."""

import contextlib
import io

import pytest
import torch
from models import build
from oracle import unmasked_sets
from rank_processes import as_torchrun_does, on_ranks
from torch import distributed as dist

from sparsify import SparseDelta, get_engine, sparsify, summary
from sparsify.common.ranks import num_ranks
from sparsify.integrations.checkpoints import problem_with
from sparsify.integrations.distributed import check_ranks

BUDGET = 60


def result_of(model):
    if num_ranks() > 1:
        check_ranks(model)
    return unmasked_sets(model), get_engine(model).values.detach().clone()


def interrupted_and_resumed(rank, folder):
    """A run, and one that goes on from its last complete checkpoint; whether they are the same, and their files."""
    as_torchrun_does(rank)
    from trainers import assert_same, make_model, make_trainer, outcome

    outcomes = []
    for checkpoint in (None, True):
        with contextlib.redirect_stdout(io.StringIO()):
            trainer = make_trainer(
                make_model(modules_to_save=["classifier"]), folder, per_device_train_batch_size=2, ddp_backend="gloo",
                ddp_find_unused_parameters=False,
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=checkpoint)
        assert trainer.args.world_size == 2
        check_ranks(trainer.model)
        outcomes.append(outcome(trainer))
        dist.barrier()
        if rank == 0 and not checkpoint:
            (folder / "checkpoint-8" / "rng_state_1.pth").unlink()
            assert "no complete rng_state_1.pth" in problem_with(folder / "checkpoint-8")
        dist.barrier()
    assert_same(*outcomes)
    return sorted(path.name for path in folder.iterdir()), sorted(p.name for p in (folder / "checkpoint-8").iterdir())


@pytest.mark.slow
def test_a_run_on_two_ranks_is_resumed_bit_for_bit_from_the_last_complete_checkpoint(tmp_path):
    first, second = on_ranks(2, interrupted_and_resumed, tmp_path)
    assert first == second
    folders, files = first
    assert folders == ["_incomplete-checkpoint-8", "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert files == [
        "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt",
        "trainer_state.json", "training_args.bin",
    ]  # fmt: skip


def by_the_trainer(rank, folder):
    from trainers import make_trainer, rows_of

    model = sparsify(build("bert")[0], BUDGET, "id3")  # without dropout
    trainer = make_trainer(
        model, folder, rows_of(), per_device_train_batch_size=4 // num_ranks(), gradient_accumulation_steps=2,
        save_strategy="no", max_grad_norm=0.0,  # the Trainer scales this model's loss by the number of ranks
    )  # fmt: skip
    trainer.train()
    return result_of(model)


def by_accelerate(rank):
    """FSDP2; accelerate supports it on GPUs only, so its state is set by hand."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import DistributedType
    from trainers import rows_of

    model = sparsify(build("llama")[0], BUDGET, "id3", steps=3)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, ignored_modules=[torch.nn.ParameterList([model.sparse_values])],
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
    )  # fmt: skip
    plugin.set_mixed_precision("bf16")
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
    loader = torch.utils.data.DataLoader(rows_of("llama"), batch_size=4)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    names = set(accelerator.get_state_dict(model))
    entries = SparseDelta.from_model(model).num_entries
    return result_of(model), type(model).__name__, names, entries, summary(model, verify=True).verification.ok


def through_libraries(rank, folder):
    as_torchrun_does(rank)
    return by_the_trainer(rank, folder), by_accelerate(rank)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return on_ranks(2, through_libraries, str(tmp_path_factory.mktemp("trainer")))


@pytest.mark.slow
def test_two_ranks_of_the_trainer_are_one_with_twice_the_batch(two, tmp_path):
    sets, delta = by_the_trainer(0, str(tmp_path))
    for (own_sets, own_delta), _ in two:
        assert own_sets == sets
        torch.testing.assert_close(own_delta, delta, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_fsdp2_by_accelerates_plugin_in_bfloat16(two):
    for _, (result, kind, names, entries, verified) in two:
        assert kind == "FSDPLlamaForCausalLM"
        assert sum(map(len, result[0].values())) == entries == BUDGET
        assert {"sparse_values", "lm_head.weight"} <= names
        assert verified
    assert torch.equal(two[0][1][0][1], two[1][1][0][1])
