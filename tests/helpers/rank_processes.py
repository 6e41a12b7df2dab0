"""Several gloo processes on the CPU, each of which runs the same function.

They are forks of a process that has imported the libraries: a rank that imports them itself takes ten seconds for that.
``torch.distributed.nn.functional`` keeps the default group that there is when it is imported, here none: otherwise
gloo's threads outlive ``destroy_process_group``, and may abort the process at its end.
"""

import faulthandler
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed.nn.functional
from torch import distributed as dist
from torch import multiprocessing

multiprocessing.set_forkserver_preload(["peft", "torch.distributed.nn.functional", "torch.distributed.fsdp"])


def on_ranks(number, function, *args, method="forkserver"):
    """Results of ``function(rank, *args)`` on each of ``number`` ranks; ``None`` for a rank that exited early."""
    with tempfile.TemporaryDirectory() as folder:
        run(number, _run, number, folder, function, args, method=method)
        files = [Path(folder) / f"{rank}.pt" for rank in range(number)]
        return [torch.load(file, weights_only=False) if file.exists() else None for file in files]


def start(number, function, *args, method="forkserver"):
    """The ``ProcessContext`` of ``number`` processes, which run ``function(rank, *args)`` in this environment."""
    arguments = (dict(os.environ), function, *args)
    return multiprocessing.start_processes(_in, arguments, number, join=False, start_method=method)


def run(number, function, *args, method="forkserver"):
    """Runs ``function(rank, *args)`` in ``number`` processes to its end, or raises what it raises in one of them."""
    ranks = start(number, function, *args, method=method)
    while not ranks.join():
        pass


def as_torchrun_does(rank):
    """The environment that says how many ranks there are; the process group exists already."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511", ACCELERATE_USE_CPU="true")
    warnings.simplefilter("ignore")


def _in(rank, environment, function, *args):
    faulthandler.enable()  # a rank that crashes says where
    os.environ.update(environment)
    function(rank, *args)


def _run(rank, number, folder, function, args):
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=number)
    torch.save(function(rank, *args), Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()
