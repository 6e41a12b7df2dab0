"""Fine-tune with the weights sharded over GPUs, or CPU processes: FSDP2 with one more line.

    torchrun --standalone --nproc-per-node 2 examples/fsdp.py --task mrpc --budget 38000
    torchrun --standalone --nproc-per-node 4 examples/fsdp.py --task mrpc --budget 38000 --copies 2

Options, data and loop are those of ``ddp.py``; with ``--copies`` each copy is sharded over some of the ranks (HSDP).
"""

from __future__ import annotations

import torch
from classifiers import HEADS
from ddp import finish, parse_arguments, share_rows, start, train
from text_classification import load_task
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sparsify import sparsify


def shard(model: nn.Module, device: torch.device, mesh: DeviceMesh) -> None:
    """Block by block, then the rest; forward and backward in bfloat16 on GPUs."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if device.type == "cuda" else None)
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # The flat delta stays whole on every rank, in float32: it is small.
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params={model.sparse_values})


def main(arguments: list[str] | None = None) -> None:
    """Trains on every rank; rank 0 prints, the result last as JSON."""
    arguments = parse_arguments(arguments, __doc__, copies=True)
    device = start()
    task = load_task(arguments)
    loaders = share_rows(task, arguments)

    # 1. One line, before FSDP2.
    head = [name for name in HEADS if hasattr(task.model, name)]
    model = task.model.to(device)
    sparsify(
        model, arguments.budget, arguments.strategy, steps=loaders[2], schedule=arguments.schedule, modules_to_save=head
    )
    sizes = (arguments.copies, dist.get_world_size() // arguments.copies)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards"))
    shard(model, device, mesh if arguments.copies > 1 else mesh["shards"])

    # 2. Train: any loop will do.
    result = train(model, loaders, arguments, device)

    # 3. Save the delta.
    finish(model, result, arguments)


if __name__ == "__main__":
    main()
