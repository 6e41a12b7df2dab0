"""Train a quarter of a LoRA: PEFT's adapter, and one more line.

    python examples/sparse_lora.py --task mrpc --budget 0.24
    python examples/sparse_lora.py --task mrpc --strategy dense

In: a GLUE task or JSON Lines, as ``text_classification.py`` reads them. Out: the task's metric, and in ``--out`` two
folders: ``adapter``, which plain PEFT loads, and ``delta``, the trained entries alone.
"""

from __future__ import annotations

import argparse
import json

from peft import LoraConfig, get_peft_model
from text_classification import (
    CALIBRATED,
    add_task_arguments,
    add_training_arguments,
    check_arguments,
    load_task,
    number,
    train,
)

from sparsify import SparseDelta, print_trainable_parameters, sparsify, summary

POOLER = r".*\bpooler\.dense"  # belongs to the head; the paper adapts the encoder's linear layers


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser)
    lora = parser.add_argument_group("LoRA")
    lora.add_argument("--rank", type=int, default=8)
    lora.add_argument("--alpha", type=int, default=8)
    lora.add_argument("--lora-modules", nargs="+", help="names; default: every linear layer of the encoder")
    method = parser.add_argument_group("method")
    method.add_argument("--strategy", help="dense (plain LoRA), id3, pafi, fish, random, ...")
    method.add_argument("--budget", type=number, default=0.24, help="entries of A and B, or a share in (0, 1)")
    add_training_arguments(parser, "default: 1e-3", lr=1e-3)
    return check_arguments(parser, arguments)


def main(arguments: list[str] | None = None) -> dict:
    """Trains and evaluates; the result as a dict, which is also the last line printed."""
    arguments = parse_arguments(arguments)
    task = load_task(arguments)

    # 1. The adapter, as PEFT makes it; SEQ_CLS keeps the new head trainable.
    lora = LoraConfig(
        task_type="SEQ_CLS",
        r=arguments.rank,
        lora_alpha=arguments.alpha,
        target_modules=arguments.lora_modules or "all-linear",
        exclude_modules=None if arguments.lora_modules else POOLER,
    )
    model = get_peft_model(task.model, lora)
    entries = sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)

    # 2. One line: only what PEFT left trainable is a candidate, and its modules_to_save stay dense.
    if arguments.strategy != "dense":
        sparsify(
            model,
            arguments.budget,
            arguments.strategy,
            steps=task.steps,
            schedule=arguments.schedule,
            calibration=task.calibration_loader if arguments.strategy in CALIBRATED else None,
            seed=arguments.seed,
        )
    print_trainable_parameters(model)

    # 3. Train: any loop will do.
    result = train(model, task, arguments)

    # 4. Save: an adapter that plain PEFT loads, and a delta, which load_model puts onto a base.
    result |= {"entries": entries, "updates": entries * task.steps}
    if arguments.out:
        model.save_pretrained(arguments.out / "adapter")
    if arguments.strategy != "dense":
        print(summary(model))
        result |= {"entries": summary(model).unmasked, "updates": summary(model).updates}
        if arguments.out:
            SparseDelta.from_model(model).save(arguments.out / "delta")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
