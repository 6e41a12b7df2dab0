"""The Trainer on two ranks, started as torchrun does it: small checkpoints, resuming, a folder left incomplete."""

import contextlib
import io
import os
import warnings

import pytest
from rank_processes import on_ranks
from torch import distributed as dist

pytest.importorskip("accelerate", reason="the Trainer needs accelerate")


def two_runs(rank, folder):
    """A run, and one that goes on from its last complete checkpoint; whether they are the same, and their files."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")  # looked at, not used: the ranks have met
    from trainers import assert_same, make_model, make_trainer, outcome

    from sparsify.integrations.checkpoints import problem_with
    from sparsify.integrations.distributed import check_ranks

    outcomes = []
    warnings.simplefilter("ignore")
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


def test_a_run_on_two_ranks_is_resumed_bit_for_bit_from_the_last_complete_checkpoint(tmp_path):
    first, second = on_ranks(2, two_runs, tmp_path)
    assert first == second
    folders, files = first
    assert folders == ["_incomplete-checkpoint-8", "checkpoint-2", "checkpoint-4", "checkpoint-6", "checkpoint-8"]
    assert files == [
        "model.safetensors", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth", "scheduler.pt",
        "trainer_state.json", "training_args.bin",
    ]  # fmt: skip
