"""A rank that dies: the others end with an error and no wrong step; after torchrun's restart, the result is the same.

As a script, under torchrun: trains on from the last checkpoint in a folder, and loses a rank in its first attempt.
"""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from rank_models import BUDGET, STEPS, own_part, shard, words
from rank_processes import start
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sparsify import get_engine, sparsify, trained_state

RANKS = {"DDP": 2, "FSDP2": 2, "HSDP": 4, "TP": 2}
DOOMED, SECONDS = 3, 6
pytestmark = pytest.mark.slow


def die(how):
    if "killed" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(2 * SECONDS if "stalling" in how else 0)
    raise RuntimeError("an error of its own")


def train(engine=None, how="", folder=None):
    """Yields entries and values after each step; in one of them the last rank may die in forward, backward or step."""
    (model, batches), ranks, rank = words(), RANKS.get(engine, 1), dist.get_rank() if engine else 0
    if engine == "TP":
        plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
    parallel = sparsify(model, BUDGET, "id3", steps=STEPS)
    get_engine(model).ranks.timeout = SECONDS
    if engine == "DDP":
        parallel = DistributedDataParallel(model)
    elif engine in ("FSDP2", "HSDP"):
        sizes, names = ((2, 2), ("copies", "shards")) if engine == "HSDP" else ((2,), ("shards",))
        shard(model, mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    optimizer, first = torch.optim.AdamW([model.sparse_values], lr=1e-2), 0
    if folder and (folder / "checkpoint").exists():
        first, state, moments = torch.load(folder / "checkpoint")
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))
        optimizer.load_state_dict(moments)
    for step in range(first, STEPS):
        if (step, rank) == (DOOMED, ranks - 1) and how:
            hooks = {"forward": model.norm.register_forward_hook, "backward": model.norm.register_full_backward_hook}
            hooks.get(how.split()[-1], optimizer.register_step_pre_hook)(lambda *_: die(how))
        optimizer.zero_grad()
        parallel(**batches[step] if engine in (None, "TP") else own_part(batches[step], rank)).backward()
        optimizer.step()
        state = trained_state(model)
        if folder and rank == 0:
            torch.save((step + 1, state, optimizer.state_dict()), folder / "incomplete")
            (folder / "incomplete").rename(folder / "checkpoint")
        yield step, get_engine(model).entries.ids.clone(), model.sparse_values.detach().clone()


def lose_a_rank(rank, folder, engine, how):
    meeting, timeout, done = f"file://{folder}/meeting", timedelta(seconds=SECONDS), []
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS[engine], timeout=timeout)
    try:
        done.extend(train(engine, how))
    except Exception as error:
        torch.save((str(error), done[-1]), folder / f"{rank}.pt")
        raise


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        ("DDP", "raising in backward"),
        ("DDP", "stalling in backward"),
        ("FSDP2", "killed in forward"),
        ("FSDP2", "killed in step"),
        ("HSDP", "killed in forward"),
        ("HSDP", "stalling in backward"),
        ("TP", "raising in backward"),
        ("TP", "killed in step"),
    ],
)
def test_the_others_end_with_an_error_and_no_wrong_step(engine, how, tmp_path):
    processes = start(RANKS[engine], lose_a_rank, tmp_path, engine, how).processes
    for process in processes:
        process.join(90)
    assert all(process.exitcode for process in processes), "a rank hangs, or goes on"
    alone = list(train())
    for rank in range(len(processes) - 1):  # are told by sparsify, or by gloo
        message, last = torch.load(tmp_path / f"{rank}.pt")
        assert re.search("got no answer from|Connection (closed|reset) by peer|Timed out", message), message
        assert last[0] in (DOOMED - 1, DOOMED)
        torch.testing.assert_close(last, alone[last[0]])


@pytest.mark.parametrize("engine", ["DDP", "FSDP2"])
def test_a_restart_by_torchrun_ends_as_the_run_that_lost_no_rank(engine, tmp_path):
    environment, results = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}, []
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else gloo looks for the ranks of the first attempt
    for how in ("", "killed in backward"):
        (folder := tmp_path / f"run {how}").mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["--max-restarts", "1", __file__, engine, how, str(folder)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
        assert run.returncode == 0, run.stderr
        assert not how or re.search(r"exitcode: -9\) local_rank: 1 ", run.stderr), "torchrun names the rank that died"
        results.append(torch.load(folder / "result"))
    assert [len(result) for result in results] == [STEPS, STEPS - DOOMED]
    torch.testing.assert_close(results[1], results[0][DOOMED:], rtol=0, atol=0)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    engine, how, folder = sys.argv[1:]
    done = list(train(engine, how if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "", Path(folder)))
    if dist.get_rank() == 0:
        torch.save(done, Path(folder) / "result")
    dist.destroy_process_group()
