"""Fine-tune with the optimizer's state and gradients split over GPUs, or CPU processes: DeepSpeed's ZeRO, stage 2.

    torchrun --standalone --nproc-per-node 2 examples/zero.py --task mrpc --budget 38000

Needs ``pip install deepspeed``. Options and data are those of ``ddp.py``. What is split is small here, since only the
entries have a state: it is for those whose training runs under DeepSpeed already.
"""

from __future__ import annotations

import deepspeed
import torch
from classifiers import HEADS
from ddp import accuracy, finish, parse_arguments, share_rows, start
from text_classification import load_task, parameter_groups
from transformers import get_scheduler

from sparsify import optimizer_stepped, sparsify

CONFIG = {
    "zero_optimization": {"stage": 2},  # or 1; stage 3 splits the weights: use fsdp.py
    "gradient_clipping": 0.0,  # DeepSpeed's own default is 1
}


def main(arguments: list[str] | None = None) -> None:
    """Trains on every rank; rank 0 prints, the result last as JSON."""
    arguments = parse_arguments(arguments, __doc__)
    device = start()
    task = load_task(arguments)
    training, validation, steps = share_rows(task, arguments)

    # 1. One line, before DeepSpeed.
    head = [name for name in HEADS if hasattr(task.model, name)]
    model = task.model.to(device)
    sparsify(
        model, arguments.budget, arguments.strategy, steps=steps, schedule=arguments.schedule, modules_to_save=head
    )

    # 2. Train: DeepSpeed's optimizer moves a copy of what is trained, so that its steps are to be counted.
    optimizer = torch.optim.AdamW(parameter_groups(model, arguments), weight_decay=0.0)
    scheduler = get_scheduler(arguments.lr_schedule, optimizer, num_warmup_steps=0, num_training_steps=steps)
    config = CONFIG | {"train_micro_batch_size_per_gpu": arguments.batch_size}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    done, epoch = 0, 0
    while done < steps:
        training.sampler.set_epoch(epoch)
        engine.train()
        for _, batch in zip(range(steps - done), training, strict=False):
            engine.backward(engine(**{name: tensor.to(device) for name, tensor in batch.items()}).loss)
            engine.step()
            optimizer_stepped(model)
            done += 1
        epoch += 1

    # 3. Save the delta.
    finish(model, {"accuracy": accuracy(model, validation, device), "steps": done}, arguments)


if __name__ == "__main__":
    main()
