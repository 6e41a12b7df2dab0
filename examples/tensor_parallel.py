"""Fine-tune with each layer's weights split over GPUs, or CPU processes, in one copy or several: one more line.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --task mrpc --budget 38000
    torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py --task mrpc --budget 38000 --copies 2

Options, data and loop are those of ``ddp.py``. The ranks of a copy have the same batches, and ``PLAN`` is a BERT's.
"""

from __future__ import annotations

from classifiers import HEADS
from ddp import finish, parse_arguments, share_rows, start, train
from text_classification import load_task
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from sparsify import sparsify

PLAN = {
    **{f"attention.self.{name}": ColwiseParallel() for name in ("query", "key", "value")},
    "attention.output.dense": RowwiseParallel(),
    "intermediate.dense": ColwiseParallel(),
    "output.dense": RowwiseParallel(),
}


def main(arguments: list[str] | None = None) -> None:
    """Trains on every rank; rank 0 prints, the result last as JSON."""
    arguments = parse_arguments(arguments, __doc__, copies=True)
    device = start()
    sizes = (arguments.copies, dist.get_world_size() // arguments.copies)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "parts"))
    task, copy = load_task(arguments), mesh.get_local_rank("copies")
    loaders = share_rows(task, arguments, num_replicas=arguments.copies, rank=copy)

    # 1. One line, after the weights were split.
    head = [name for name in HEADS if hasattr(task.model, name)]
    model = task.model.to(device)
    for block in model.base_model.encoder.layer:
        parallelize_module(block, mesh["parts"], PLAN)
    sparsify(
        model, arguments.budget, arguments.strategy, steps=loaders[2], schedule=arguments.schedule, modules_to_save=head
    )
    parallel = model
    if arguments.copies > 1:
        parallel = DistributedDataParallel(model, process_group=mesh["copies"].get_group())

    # 2. Train: dropout is the same on all ranks of a copy.
    result = train(parallel, loaders, arguments, device, seed=arguments.seed + copy)

    # 3. Save the delta.
    finish(model, result, arguments)


if __name__ == "__main__":
    main()
