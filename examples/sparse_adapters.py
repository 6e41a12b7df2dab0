"""Train a few percent of bottleneck adapters: add them, and one more line.

    python examples/sparse_adapters.py --task mrpc --kind pfeiffer --budget 0.04
    python examples/sparse_adapters.py --task mrpc --kind houlsby --strategy dense

In: a GLUE task or JSON Lines, as ``text_classification.py`` reads them. Out: the task's metric, and in ``--out`` two
folders: ``adapter``, in AdapterHub's format, and ``delta``, the trained entries and the head.
"""

from __future__ import annotations

import argparse
import json

from classifiers import HEADS
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
from sparsify.adapters import add_adapters, save_adapters


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_task_arguments(parser)
    adapters = parser.add_argument_group("adapters")
    adapters.add_argument("--kind", default="pfeiffer", help="pfeiffer or houlsby")
    adapters.add_argument("--reduction-factor", type=float, default=2, help="hidden size / bottleneck size")
    method = parser.add_argument_group("method")
    method.add_argument("--strategy", help="dense (plain adapters), id3, sparseadapter, pafi, fish, ...")
    method.add_argument("--budget", type=number, default=0.04, help="entries of the adapters, or a share in (0, 1)")
    add_training_arguments(parser, "default: 1e-3", lr=1e-3)
    return check_arguments(parser, arguments)


def main(arguments: list[str] | None = None) -> dict:
    """Trains and evaluates; the result as a dict, which is also the last line printed."""
    arguments = parse_arguments(arguments)
    task = load_task(arguments)

    # 1. The adapters: now the base is frozen, they and the new head are not.
    model = add_adapters(task.model, arguments.kind, arguments.reduction_factor)
    entries = sum(p.numel() for name, p in model.named_parameters() if ".adapters." in name)

    # 2. One line: the adapters' entries are the candidates, the head stays dense.
    if arguments.strategy != "dense":
        sparsify(
            model,
            arguments.budget,
            arguments.strategy,
            steps=task.steps,
            schedule=arguments.schedule,
            modules_to_save=[head for head in HEADS if hasattr(model, head)],
            calibration=task.calibration_loader if arguments.strategy in CALIBRATED else None,
            seed=arguments.seed,
        )
    print_trainable_parameters(model)

    # 3. Train: any loop will do.
    result = train(model, task, arguments)

    # 4. Save: the adapters as AdapterHub does, and a delta of them with the head.
    result |= {"entries": entries, "updates": entries * task.steps}
    if arguments.out:
        save_adapters(model, arguments.out / "adapter")
    if arguments.strategy != "dense":
        print(summary(model))
        result |= {"entries": summary(model).unmasked, "updates": summary(model).updates}
        if arguments.out:
            SparseDelta.from_model(model).save(arguments.out / "delta")
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main()
