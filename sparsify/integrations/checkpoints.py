"""Checkpoint folders of the Trainer: the trained state in place of the model, and whether a folder is complete.

    checkpoint-N/model.safetensors      the trained state, under the names of the model's state dict; its metadata
                                        lists the files that belong to the checkpoint
    checkpoint-N/adapter_*              the delta as an adapter, by which from_pretrained() loads base and delta
    checkpoint-N/optimizer.pt, ...      the Trainer's own files, trainer_state.json the last of them

The Trainer looks for a model's weights under this name: it resumes with the hooks on ``load_state_dict`` alone.
"""

import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsify.api import get_engine
from sparsify.delta.peft_files import write_adapter
from sparsify.errors import SparsifyError
from sparsify.training.quantized import save_pretrained
from sparsify.training.state import write_trained_state as write_state

WEIGHTS, TRAINER_STATE, OPTIMIZER, SCHEDULER = "model.safetensors", "trainer_state.json", "optimizer.pt", "scheduler.pt"
# other names under which the Trainer finds weights: sharded, pickled, of an adapter
_OTHER_WEIGHTS = ("model.safetensors.index.json", "pytorch_model*", "adapter_model.*", "*/adapter_model.*")


def write_trained_state(model: nn.Module, folder: Path, args: Any, state_dict: dict[str, Tensor] | None = None) -> None:
    write_state(get_engine(model), model, folder / WEIGHTS, state_dict, files=" ".join(_expected_files(args)))


def has_trained_state(folder: Path) -> bool:
    return _metadata(folder).get("sparsify") == "trained state"


def problem_with(folder: Path) -> str | None:
    """Returns what is missing from a checkpoint folder, as the end of a sentence; ``None`` if it is complete."""
    try:
        json.loads((folder / TRAINER_STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"has no complete {TRAINER_STATE}, which is written last"
    if not (folder / WEIGHTS).is_file():
        return None if any(any(folder.glob(name)) for name in _OTHER_WEIGHTS) else f"has no {WEIGHTS}"
    try:
        metadata = _metadata(folder)
    except SafetensorError:
        return f"has a {WEIGHTS} that is cut short"
    broken = [name for name in metadata.get("files", "").split() if not zipfile.is_zipfile(folder / name)]
    return f"has no complete {', '.join(broken)}" if broken else None


def set_aside_incomplete(output_dir: Path) -> None:
    """Renames incomplete checkpoint folders, from which the Trainer would resume, with a warning."""
    for folder in sorted(output_dir.glob("checkpoint-*")):
        is_checkpoint = folder.is_dir() and folder.name.removeprefix("checkpoint-").isdecimal()
        if is_checkpoint and (problem := problem_with(folder)):
            aside = folder.with_name(f"_incomplete-{folder.name}")  # which the Trainer neither finds nor uploads
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
            now = f"It is called {aside.name} now, and resume_from_checkpoint=True takes the one before it."
            warnings.warn(f"`{folder}` {problem}: its writer was interrupted. {now}", stacklevel=2)


def save_checkpoint(model: Any, args: Any, state: Any, save_directory: Any, *arguments: Any, **options: Any) -> Any:
    """Is ``model.save_pretrained`` during training: the trained state into checkpoints, else an ordinary model."""
    folder = Path(save_directory)
    inside = Path(args.output_dir).absolute() in folder.absolute().parents
    if not inside or folder.name != f"checkpoint-{state.global_step}":
        return save_pretrained(model, save_directory, *arguments, **options)
    is_peft, engine = hasattr(model, "peft_config") and hasattr(model, "base_model"), get_engine(model)
    if is_peft:
        save_pretrained(model, save_directory, *arguments, **options)  # PEFT's adapter files
    if options.get("is_main_process", True):
        write_trained_state(model, folder, args, options.get("state_dict"))
        # the delta of a sharded model would have to be gathered, and the hub would keep these files beside the model
        if not (is_peft or engine.sharded or args.push_to_hub):
            try:
                write_adapter(folder, engine.exporter(model).delta())
            except SparsifyError as error:  # the run goes on, and resumes
                warnings.warn(f"from_pretrained() will not take `{folder}`: {error}", stacklevel=2)
    return None


def load_checkpoint(trainer: Any, folder: Any, *arguments: Any) -> Any:
    """Is ``trainer._load_from_checkpoint`` of sentence-transformers' trainers, which makes a model of the folder."""
    if not has_trained_state(Path(folder)):
        return type(trainer)._load_from_checkpoint(trainer, folder, *arguments)
    return trainer.model.load_state_dict(load_file(Path(folder, WEIGHTS)))


def _expected_files(args: Any) -> list[str]:
    """Files of ``torch.save`` that a Trainer with these arguments writes into each checkpoint, on this node."""
    if args.save_only_model:
        return []
    files = [SCHEDULER] if args.fsdp or args.deepspeed else [OPTIMIZER, SCHEDULER]
    if args.world_size <= 1:
        return [*files, "rng_state.pth"]
    here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # set by torchrun; the first rank of a node writes
    return files + [f"rng_state_{args.process_index + rank}.pth" for rank in range(here)]


def _metadata(folder: Path) -> dict[str, str]:
    """The metadata of a checkpoint's weights, empty without any; ``SafetensorError`` for a truncated file."""
    if not (folder / WEIGHTS).is_file():
        return {}
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return file.metadata() or {}
