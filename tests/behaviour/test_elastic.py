"""A rank that dies: the others end with an error and no wrong step, and torchrun's restart ends as if nothing had been.

As a script, under torchrun: trains on from the last checkpoint of a folder, and loses a rank in its first attempt.
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
from torch.distributed import checkpoint as checkpoints
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sparsify import get_engine, sparsify, trained_state
from sparsify.common.shards import is_fully_sharded

ENGINES = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "TP": 2}  # and their ranks
PLACES, DOOMED, SECONDS = ("forward", "backward", "step"), 3, 30
TOLD = "got no answer from|Connection closed by peer|Connection reset by peer"  # by sparsify, and by gloo
pytestmark = pytest.mark.slow


def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)


def raising(*_):
    raise RuntimeError("an error of its own")


def train(engine=None, place=None, die=None, folder=None):
    """Yields steps done, ids and values after each step, in which the last rank may die at a place."""
    (model, batches), ranks = words(), ENGINES.get(engine, 1)
    if engine == "TP":
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    parallel = sparsify(model, BUDGET, steps=STEPS)
    if engine == "DDP":
        parallel = DistributedDataParallel(model)
    elif engine in ("FSDP2", "HSDP"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")) if engine == "HSDP" else None
        shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW([model.sparse_values], lr=1e-2)
    first, rank = go_on(model, optimizer, folder), dist.get_rank() if engine else 0
    for step in range(first, STEPS):
        if (step, rank) == (DOOMED, ranks - 1) and die is not None:
            hooks = model.norm.register_forward_hook, model.norm.register_full_backward_hook
            hooks = dict(zip(PLACES, (*hooks, optimizer.register_step_pre_hook), strict=True))
            hooks[place](die)
        optimizer.zero_grad()
        batch = batches[step] if engine in (None, "TP") else own_part(batches[step], rank)
        parallel(**batch).backward()
        optimizer.step()
        leave(model, optimizer, folder, step + 1)
        yield step + 1, get_engine(model).entries.ids.clone(), model.sparse_values.detach().clone(), first


def states(model, optimizer):
    return dict(zip(("model_state_dict", "optim_state_dict"), get_state_dict(model, optimizer), strict=True))


def leave(model, optimizer, folder, steps):
    """Writes a checkpoint, shards by torch's own; it is complete with its last file, as long as any rank may die."""
    if folder and is_fully_sharded(model):
        checkpoints.save(states(model, optimizer), checkpoint_id=folder / str(steps))
    elif folder and dist.get_rank() == 0:
        torch.save((trained_state(model), optimizer.state_dict()), folder / "incomplete")
        (folder / "incomplete").rename(folder / f"{steps}.pt")


def go_on(model, optimizer, folder):
    """Loads the last complete checkpoint; returns how many steps it has."""
    found = [*folder.glob("*.pt"), *(path.parent for path in folder.glob("*/.metadata"))] if folder else []
    last = max(found, key=lambda path: int(path.stem), default=None)
    if last is not None and is_fully_sharded(model):
        state = states(model, optimizer)
        checkpoints.load(state, checkpoint_id=last)
        set_state_dict(model, optimizer, **state)
    elif last is not None:
        state, moments = torch.load(last)
        model.load_state_dict(state, strict=False)
        optimizer.load_state_dict(moments)
    return int(last.stem) if last else 0


def lose_a_rank(rank, folder, engine, *doom):
    torch.set_num_threads(1)
    meeting, timeout = f"file://{folder}/meeting", timedelta(seconds=SECONDS)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=ENGINES[engine], timeout=timeout)
    done = None
    try:
        for done in train(engine, *doom):
            pass
    except Exception as error:
        torch.save((str(error), done), folder / f"{rank}.pt")
        raise


@pytest.mark.parametrize(("place", "die"), [("forward", killed), ("backward", raising), ("step", killed)])
@pytest.mark.parametrize("engine", ENGINES)
def test_the_others_end_with_an_error_and_no_wrong_step(engine, place, die, tmp_path):
    ranks, alone = ENGINES[engine], list(train())
    processes = multiprocessing.spawn(lose_a_rank, (tmp_path, engine, place, die), ranks, join=False).processes
    for process in processes:
        process.join(2 * SECONDS)
    assert all(process.exitcode for process in processes), "a rank hangs, or has not noticed"
    for rank in range(ranks - 1):
        message, (steps, ids, delta, _) = torch.load(tmp_path / f"{rank}.pt")
        assert re.search(TOLD, message), message
        assert steps in (DOOMED, DOOMED + 1)
        assert torch.equal(ids, alone[steps - 1][1])
        torch.testing.assert_close(delta, alone[steps - 1][2])


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
    (*straight, begun), (*restarted, resumed) = results
    assert (begun, resumed) == (0, DOOMED)
    torch.testing.assert_close(restarted, straight, rtol=0, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine, place, folder = *sys.argv[1:3], Path(sys.argv[3])
    dies = place in PLACES and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    *_, last = train(engine, place, killed if dies else None, folder)
    if dist.get_rank() == 0:
        torch.save(last, folder / "result")
    dist.destroy_process_group()
