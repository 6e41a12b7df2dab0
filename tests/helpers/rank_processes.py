"""Several gloo processes on the CPU, each of which runs the same function.

``torch.distributed.nn.functional`` keeps the default group that there is when it is imported, here none: otherwise
gloo's threads outlive ``destroy_process_group``, and may abort the process at its end.
"""

import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.nn.functional
from torch import distributed as dist
from torch import multiprocessing


def on_ranks(number, function, *args):
    """Results of ``function(rank, *args)`` on each of ``number`` ranks; ``None`` for a rank that exited early."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (number, folder, function, args), nprocs=number)
        files = [Path(folder) / f"{rank}.pt" for rank in range(number)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def as_torchrun_does(rank):
    """The environment that says how many ranks there are; the process group exists already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")
    warnings.simplefilter("ignore")


def _run(rank, number, folder, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=number)
    torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
