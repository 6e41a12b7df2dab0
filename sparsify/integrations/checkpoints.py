"""A Trainer's checkpoint folders: the trained state in place of the model, and whether a folder is complete.

    checkpoint-N/model.safetensors      the trained state, under the names of the model's state dict; its metadata say
                                        which files have to be beside it
    checkpoint-N/optimizer.pt, ...      what the Trainer itself writes: optimizer.pt, scheduler.pt, scaler.pt,
                                        rng_state.pth, training_args.bin and, last of all, trainer_state.json

The file has the name under which the Trainer looks for a model's weights, so that resuming, and loading the best
checkpoint, need nothing of ours but the hooks on ``load_state_dict``.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sparsify.api import get_unmasker
from sparsify.delta.format import replace_file
from sparsify.training.state import placeholder, trained_state_of

WEIGHTS, TRAINER_STATE, OPTIMIZER, SCHEDULER = "model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt"
# the others under which the Trainer finds weights: sharded, pickled, of an adapter
_OTHER_WEIGHTS = (
    "model.safetensors.index.json",
    "pytorch_model.bin*",
    "adapter_model.*",
    "*/adapter_model.*",
    "pytorch_model_fsdp*",
)
_SET_ASIDE = "_incomplete-"  # before the name of a folder; the Trainer neither finds nor uploads it then


def write_trained_state(
    model: nn.Module, folder: Path, files: Iterable[str], state_dict: dict[str, Tensor] | None = None
) -> None:
    """Writes a model's trained state as a checkpoint's weights; a whole file, whenever the process may die.

    Args:
        model: a sparsified model, or one that holds it.
        folder: the checkpoint's.
        files: names of the files that have to be beside it for the checkpoint to be complete.
        state_dict: where the values are taken from; ``None``: the model's own.
    """
    engine = get_unmasker(model)
    state = {name: value.contiguous() for name, value in trained_state_of(engine, model, state_dict).items()}
    metadata = {"format": "pt", "sparsify": "trained state", "files": " ".join(files)}
    replace_file(folder / WEIGHTS, safetensors.torch.save(state | placeholder(engine), metadata))


def has_trained_state(folder: Path) -> bool:
    """Whether a checkpoint's weights are a trained state."""
    return _metadata(folder).get("sparsify") == "trained state"


def problem_with(folder: Path) -> str | None:
    """What a checkpoint folder lacks, as the end of a sentence; ``None`` if it is complete."""
    try:
        json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"has no complete {TRAINER_STATE}, which is written last"
    if not (folder / WEIGHTS).is_file():
        others = any(True for pattern in _OTHER_WEIGHTS for _ in folder.glob(pattern))
        return None if others else f"has no {WEIGHTS}"
    try:
        metadata = _metadata(folder)
    except SafetensorError:
        return f"has a {WEIGHTS} that is cut short"
    broken = [name for name in metadata.get("files", "").split() if not zipfile.is_zipfile(folder / name)]
    return f"has no complete {', '.join(broken)}" if broken else None


def set_aside_incomplete(output_dir: Path) -> None:
    """Renames checkpoint folders that were not written to their end, or are half deleted, and says so.

    The Trainer takes the folder of the highest step for the last checkpoint, whatever is in it.
    """
    for folder in sorted(output_dir.glob("checkpoint-*")):
        if not folder.is_dir() or not folder.name.removeprefix("checkpoint-").isdecimal():
            continue
        if problem := problem_with(folder):
            aside = folder.with_name(_SET_ASIDE + folder.name)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            warnings.warn(
                f"`{folder}` {problem}: its writer was interrupted. It is called {aside.name} now, and "
                "resume_from_checkpoint=True takes the one before it.",
                stacklevel=2,
            )


class CheckpointWriter:
    """Stands in for ``model.save_pretrained`` while a Trainer trains: its checkpoints get the trained state only.

    All other folders get what they always do.

    Args:
        model: what the Trainer trains, a transformers or PEFT model.
        args: the Trainer's arguments.
        state: the Trainer's state, which says how many steps are done.
    """

    def __init__(self, model: nn.Module, args: Any, state: Any) -> None:
        self.model, self.args, self.state = model, args, state

    def __call__(self, save_directory: Any, *arguments: Any, **options: Any) -> Any:
        folder = Path(save_directory)
        if not self.is_checkpoint(folder):
            return self._save_pretrained(save_directory, *arguments, **options)
        if hasattr(self.model, "peft_config") and hasattr(self.model, "base_model"):
            self._save_pretrained(save_directory, *arguments, **options)  # the adapter alone, as PEFT has it
        if options.get("is_main_process", True):
            write_trained_state(self.model, folder, expected_files(self.args), options.get("state_dict"))
        return None

    def is_checkpoint(self, folder: Path) -> bool:
        """Whether this is the folder of the Trainer's checkpoint at the step that was just done."""
        inside = Path(self.args.output_dir).absolute() in folder.absolute().parents
        return inside and folder.name == f"checkpoint-{self.state.global_step}"

    def _save_pretrained(self, *arguments: Any, **options: Any) -> Any:
        return type(self.model).save_pretrained(self.model, *arguments, **options)  # type: ignore[attr-defined]


def expected_files(args: Any) -> list[str]:
    """Files of ``torch.save`` that a Trainer with these arguments writes into each of its checkpoints, on this node."""
    if args.save_only_model:
        return []
    files = [SCHEDULER] if args.fsdp or args.deepspeed else [OPTIMIZER, SCHEDULER]
    if args.world_size <= 1:
        return [*files, "rng_state.pth"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's; the first rank of a node is the one that writes
    return files + [f"rng_state_{args.process_index + rank}.pth" for rank in range(here)]


def _metadata(folder: Path) -> dict[str, str]:
    """Of a checkpoint's weights; empty where there are none.

    Raises:
        SafetensorError: when the file is cut short.
    """
    if not (folder / WEIGHTS).is_file():
        return {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return file.metadata() or {}
