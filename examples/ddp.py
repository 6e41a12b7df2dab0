"""Fine-tune on several GPUs, or on as many CPU processes: DistributedDataParallel with one more line.

    torchrun --standalone --nproc-per-node 2 examples/ddp.py --task mrpc --budget 38000

In: a GLUE task or JSON Lines, as ``text_classification.py`` reads them; ``--batch-size`` is a rank's. Out: the
accuracy after every epoch, the bytes sent to select the same entries, and in ``--out`` the delta. ``fsdp.py`` and
``tensor_parallel.py`` import the loop from here.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from classifiers import HEADS
from text_classification import (
    add_task_arguments,
    add_training_arguments,
    check_arguments,
    load_task,
    number,
    parameter_groups,
)
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import get_scheduler

from sparsify import SparseDelta, sparsify, summary


def parse_arguments(arguments: list[str] | None, doc: str | None, copies: bool = False) -> argparse.Namespace:
    """The options of all scripts for several ranks; ``--copies`` where the ranks have one model between them."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if copies:
        parser.add_argument("--copies", type=int, default=1, help="of the model, each on as many ranks")
    add_task_arguments(parser)
    method = parser.add_argument_group("method")
    method.add_argument("--strategy", help="default: what sparsify() takes where none is named")
    method.add_argument("--budget", type=number, default=38_000, help="entries, or a share in (0, 1)")
    add_training_arguments(parser, "default: 1e-3", lr=1e-3)
    return check_arguments(parser, arguments)


def start() -> torch.device:
    """Joins the other ranks; returns this rank's device."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def share_rows(task, arguments: argparse.Namespace, **share: int) -> tuple[DataLoader, DataLoader, int]:
    """This rank's training and validation batches, by a sampler's options, and the number of optimizer steps."""
    sampler = DistributedSampler(task.train_rows, seed=arguments.seed, drop_last=True, **share)  # as many on every rank
    collate = task.train_loader.collate_fn
    training = DataLoader(task.train_rows, arguments.batch_size, sampler=sampler, collate_fn=collate)
    rows = task.validation_loader.dataset
    own_rows = DistributedSampler(rows, shuffle=False, **share)  # repeats a row or two, so that every rank has as many
    validation = DataLoader(rows, arguments.batch_size, sampler=own_rows, collate_fn=collate)
    return training, validation, arguments.steps or arguments.epochs * len(training)


def train(
    model: torch.nn.Module,
    loaders: tuple[DataLoader, DataLoader, int],
    arguments: argparse.Namespace,
    device: torch.device,
    seed: int | None = None,
) -> dict:
    """A plain loop over all parameters that require grad; returns the last accuracy. ``seed`` is that of dropout."""
    training, validation, steps = loaders
    # a group each, since the flat delta and, under FSDP2, sharded heads are tensors of different kinds
    optimizer = torch.optim.AdamW(parameter_groups(model, arguments), weight_decay=0.0)
    scheduler = get_scheduler(arguments.lr_schedule, optimizer, num_warmup_steps=0, num_training_steps=steps)
    torch.manual_seed(arguments.seed + dist.get_rank() if seed is None else seed)
    done, epoch = 0, 0
    while done < steps:
        training.sampler.set_epoch(epoch)
        model.train()
        for batch in training:
            model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            if done == steps:
                break
        epoch += 1
        result = {"accuracy": accuracy(model, validation, device), "steps": done}
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {result}")
    return result


@torch.no_grad()
def accuracy(model: torch.nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of all ranks' rows whose label is predicted."""
    model.eval()
    counts = torch.zeros(2, device=device)  # right, all
    for batch in loader:
        own = {name: tensor.to(device) for name, tensor in batch.items()}
        right = model(**own).logits.argmax(-1) == own["labels"]
        counts += torch.tensor([right.sum(), right.numel()], device=device)
    dist.all_reduce(counts)
    return round(float(counts[0] / counts[1]), 4)


def finish(model: torch.nn.Module, result: dict, arguments: argparse.Namespace) -> None:
    """Makes the delta on all ranks, since each of them may have a part of the weights; one writes it and prints."""
    delta = SparseDelta.from_model(model)
    if dist.get_rank() == 0:
        print(summary(model))
        if arguments.out:
            delta.save(arguments.out)
        print(json.dumps({**result, "ranks": dist.get_world_size(), "entries": delta.num_entries}))
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Trains on every rank; rank 0 prints, the result last as JSON."""
    arguments = parse_arguments(arguments, __doc__)
    device = start()

    # 1. The same model on every rank: load_task() seeds before the new head is drawn.
    task = load_task(arguments)
    loaders = share_rows(task, arguments)

    # 2. One line, before DDP.
    head = [name for name in HEADS if hasattr(task.model, name)]
    model = task.model.to(device)
    sparsify(
        model, arguments.budget, arguments.strategy, steps=loaders[2], schedule=arguments.schedule, modules_to_save=head
    )
    parallel = DistributedDataParallel(model)

    # 3. Train: any loop will do.
    result = train(parallel, loaders, arguments, device)

    # 4. Save the delta.
    finish(model, result, arguments)


if __name__ == "__main__":
    main()
