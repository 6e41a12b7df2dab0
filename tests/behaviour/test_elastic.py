"""A rank that dies: the others end with an error and no wrong step; after torchrun's restart, the result is the same.

As a script, under torchrun: trains on from the last checkpoint in a folder, and loses a rank in its first attempt.
"""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rank_models import BUDGET, STEPS, own_part, shard, words
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sparsify import get_engine, sparsify, trained_state

RANKS = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "TP": 2}
DOOMED, SECONDS = 3, 30
pytestmark = pytest.mark.slow


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def raising(*_):
    raise RuntimeError("an error of its own")


def train(engine=None, place=None, die=None, folder=None):
    """Yields entries and values after each step; in one of them the last rank may die in forward, backward or step."""
    (model, batches), ranks, rank = words(), RANKS.get(engine, 1), dist.get_rank() if engine else 0
    if engine == "TP":
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    parallel = sparsify(model, BUDGET, steps=STEPS)
    if engine == "DDP":
        parallel = DistributedDataParallel(model)
    elif engine == "HSDP":
        shard(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    elif engine == "FSDP2":
        shard(model)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    for step in range(go_on(model, optimizer, folder) if folder else 0, STEPS):
        if (step, rank) == (DOOMED, ranks - 1) and die is not None:
            hooks = {"forward": model.norm.register_forward_hook, "backward": model.norm.register_full_backward_hook}
            hooks.get(place, optimizer.register_step_pre_hook)(die)
        optimizer.zero_grad()
        batch = batches[step] if engine in (None, "TP") else own_part(batches[step], rank)
        parallel(**batch).backward()
        optimizer.step()
        state = trained_state(model)
        if folder and rank == 0:
            torch.save((step + 1, state, optimizer.state_dict()), folder / "incomplete")
            (folder / "incomplete").rename(folder / "checkpoint")
        yield step, get_engine(model).entries.ids.clone(), model.sparse_values.detach().clone()


def go_on(model, optimizer, folder):
    """Loads the checkpoint, if there is one; returns how many steps it has."""
    if not (folder / "checkpoint").exists():
        return 0
    steps, state, moments = torch.load(folder / "checkpoint")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
    optimizer.load_state_dict(moments)
    return steps


def lose_a_rank(rank, folder, engine, *doom):
    torch.set_num_threads(1)
    meeting, timeout = f"file://{folder}/meeting", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS[engine], timeout=timeout)
    done = []
    try:
        done.extend(train(engine, *doom))
    except Exception as error:
        torch.save((str(error), done[-1]), folder / f"{rank}.pt")
        raise


@pytest.mark.parametrize(("place", "die"), [("forward", killed), ("backward", raising), ("step", killed)])
@pytest.mark.parametrize("engine", RANKS)
def test_the_others_end_with_an_error_and_no_wrong_step(engine, place, die, tmp_path):
    processes = multiprocessing.spawn(lose_a_rank, (tmp_path, engine, place, die), RANKS[engine], join=False).processes
    for process in processes:
        process.join(2 * SECONDS)
    assert all(process.exitcode for process in processes), "a rank hangs, or goes on"
    alone = list(train())
    for rank in range(len(processes) - 1):
        message, last = torch.load(tmp_path / f"{rank}.pt")
        assert re.search(r"got no answer from|Connection (closed|reset) by peer", message), message  # gloo's own
        assert last[0] in (DOOMED - 1, DOOMED)
        torch.testing.assert_close(last, alone[last[0]])


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_restart_by_torchrun_ends_as_the_run_that_lost_no_rank(engine, tmp_path):
    environment, results = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}, []
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo looks for the ranks of the first attempt
    for place in ("nowhere", "backward"):
        (folder := tmp_path / place).mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", __file__, engine, place, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stderr
        results.append(torch.load(folder / "result"))
    assert [len(result) for result in results] == [STEPS, STEPS - DOOMED]
    torch.testing.assert_close(results[1], results[0][DOOMED:], rtol=0, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine, place, folder = *sys.argv[1:3], Path(sys.argv[3])
    dies = place != "nowhere" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    done = list(train(engine, place, killed if dies else None, folder))
    if dist.get_rank() == 0:
        torch.save(done, folder / "result")
    dist.destroy_process_group()
