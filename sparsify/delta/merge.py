"""Checks a delta against its base, makes patches of a checkpoint's tensors of it, and merges these into the files.

A merge needs no model, and the memory of one tensor: it goes shard by shard. Each file of weights is copied by the
operating system, and only the changed entries are then written into the copy.
Everything is checked before the first byte is written, and the new folder appears when it is complete, or not at all.
"""

import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from sparsify.common.names import check_names, counted
from sparsify.common.raw_bits import digest
from sparsify.core.devices import put
from sparsify.delta.checkpoint.conversion import Layout
from sparsify.delta.checkpoint.reader import INDEX_NAME, WEIGHTS_NAME, Checkpoint, Stored, read_header, read_json
from sparsify.delta.entries import Base, Config, NamedTensors, StrPath, TensorDelta, TensorDeltas, is_resized
from sparsify.delta.patch_plan import check_fits, check_untied, is_verified, new_values, plan_delta, warn_of_casts
from sparsify.errors import SparsifyError

_IN_FILES = "the checkpoint"
# Files next to the weights that do not describe the merged model: other formats' weights, and the state of a training.
_LEFT_OUT = re.compile(
    r"\..*|.*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|ot|onnx|onnx_data|tflite|gguf|ggml|npz|pkl|pickle)|.*\.index\.json"
    r"|trainer_state\.json|events\.out\.tfevents.*|sparse_delta_config\.json|adapter_config\.json"
)
_MOST_LABELS = 2**16  # a head for them takes no more memory than a vocabulary's


@dataclass(frozen=True)
class CheckReport:
    """The result of a check that found nothing wrong."""

    tensors: int  # number of tensors changed at entries
    entries: int  # number of changed entries
    whole: int = 0  # number of tensors stored whole
    unchecked: tuple[str, ...] = ()  # names of tensors whose values could not be checked: another dtype, not quantized
    missing: tuple[str, ...] = ()  # names of tensors stored whole that a checkpoint lacks; a merge adds them

    @property
    def verified(self) -> bool:
        """Whether the base's values were compared with those of the training, at all entries, and there are some."""
        return self.entries > 0 and not self.unchecked

    def __str__(self) -> str:
        what = f"{counted(self.entries, 'entry', 'entries')} in {counted(self.tensors, 'tensor')}"
        verdict = "the base holds the values that the delta was trained on"
        if not self.entries:
            verdict = "names and shapes fit, and nothing else ties the delta to this base"
        if self.unchecked:
            number = counted(len(self.unchecked), "tensor")
            verdict = f"names and shapes fit; the base has {number} (`{self.unchecked[0]}`) in another dtype than the "
            verdict += "delta was trained on, or not quantized as then, so the values there cannot be checked"
        missing = f", {len(self.missing)} of them not in the base" if self.missing else ""
        whole = f" {counted(self.whole, 'tensor')} stored whole{missing}." if self.whole else ""
        return f"{what}: {verdict}.{whole}"


class WeightPatch(NamedTuple):
    """New values for some entries of one tensor of a checkpoint, or for all of them.

    The fields are those of vLLM's ``CheckpointWeightPatch``, in its order: ``CheckpointWeightPatch(*patch)`` is one.
    """

    name: str  # in the checkpoint, as are shape and dtype
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: Tensor  # (count,) the new values
    indices: Tensor | None = None  # (count,) int64, flat row-major, strictly increasing; None where values are for all


def check_base(tensors: TensorDeltas, whole: NamedTensors, base: Base) -> CheckReport:
    if not isinstance(base, nn.Module):
        return check_checkpoint(tensors, whole, Checkpoint(base))[0]
    plan, _ = plan_delta(tensors, whole, base, warn=False)
    writes = zip(tensors.values(), plan, strict=False)
    unchecked = tuple(write.name for delta, write in writes if not is_verified(delta, write.old))
    return CheckReport(len(tensors), sum(delta.count for delta in tensors.values()), len(whole), unchecked)


def check_checkpoint(
    tensors: TensorDeltas, whole: NamedTensors, checkpoint: Checkpoint
) -> tuple[CheckReport, dict[str, Layout]]:
    """Checks a delta against a checkpoint, of which only the pages with entries are read; also gives the layouts."""
    check_names(tensors, whole)
    layouts = {name: _find_layout(name, delta, checkpoint) for name, delta in tensors.items()}
    bases = (checked_values(name, delta, checkpoint, layouts[name])[0] for name, delta in tensors.items())
    checks = zip(tensors.items(), bases, strict=True)
    unchecked = tuple(name for (name, delta), base in checks if not is_verified(delta, base))
    for name in (name for name in whole if name in checkpoint):
        layout = layouts[name] = checkpoint.layout(name)
        shape = whole[name].shape if is_resized(whole[name].shape, layout.shape) else layout.shape  # a merge resizes
        check_fits(name, whole[name], shape, checkpoint.dtype(layout), _IN_FILES)
    for name in (name for name in layouts if name not in checkpoint.stored):
        check_untied(name, checkpoint.conversion.tied.get(name, [name])[0], _IN_FILES)
    owners: dict[tuple[object, ...], str] = {}  # of stored windows
    for name, window in ((name, window) for name, layout in layouts.items() for window in layout.windows):
        first = owners.setdefault((window.key, window.place.storage_offset()), name)
        check_untied(name, first, f"{_IN_FILES} (`{window.key}`)")
    missing = tuple(name for name in whole if name not in layouts)
    entries = sum(delta.count for delta in tensors.values())
    return CheckReport(len(tensors), entries, len(whole), unchecked, missing), layouts


def checked_values(name: str, delta: TensorDelta, checkpoint: Checkpoint, layout: Layout) -> tuple[Tensor, Tensor]:
    """The base's and the trained values (count,) of one tensor; raises where the checkpoint is not the delta's base."""
    check_fits(name, delta, layout.shape, checkpoint.dtype(layout), _IN_FILES)
    old = checkpoint.take(layout, delta.indices)
    return old, new_values(name, delta, old, _IN_FILES)


def _find_layout(name: str, delta: TensorDelta, checkpoint: Checkpoint) -> Layout:
    layout = checkpoint.layout(name)
    # transformers may rename another tensor to a stored name, which therefore counts only where the values match
    if name not in checkpoint.stored:
        return layout
    fits = tuple(layout.shape) == delta.shape and checkpoint.dtype(layout) == delta.dtype
    if fits and digest(checkpoint.take(layout, delta.indices)) == delta.base_sha256:
        return layout
    return next(iter(checkpoint.conversion.find(name)), layout)


def make_patches(tensors: TensorDeltas, whole: NamedTensors, checkpoint: StrPath | None) -> Iterator[WeightPatch]:
    check_names(tensors, whole)
    opened, places = None, {}
    if checkpoint is not None:
        opened = Checkpoint(checkpoint)
        _, layouts = check_checkpoint(tensors, whole, opened)
        for name in whole.keys() & layouts.keys():  # an engine keeps its shapes
            check_fits(name, whole[name], layouts[name].shape, opened.dtype(layouts[name]), _IN_FILES)
        places = {name: opened.copies(name, layout) for name, layout in layouts.items()}
    elif added := [name for name, delta in tensors.items() if delta.kind == "add"]:
        remedy = "give the base's checkpoint, `patches(checkpoint)`."
        raise SparsifyError(f"tensor `{added[0]}` is stored as differences, and a patch holds values: {remedy}")
    parts: dict[str, TensorDelta | Tensor] = {**tensors, **whole}
    return chain.from_iterable(patches_of(name, part, opened, places.get(name, [])) for name, part in parts.items())


def patches_of(
    name: str, part: TensorDelta | Tensor, checkpoint: Checkpoint | None, places: Sequence[Layout]
) -> Iterator[WeightPatch]:
    """Patches of a tensor in each of the places where a checkpoint stores it, or of the model's where there is none."""
    if checkpoint is None or not places:
        values, indices = (part.detach().flatten(), None) if isinstance(part, Tensor) else (part.values, part.indices)
        yield WeightPatch(name, tuple(part.shape), part.dtype, values, indices)
        return
    if isinstance(part, TensorDelta):
        _, values = checked_values(name, part, checkpoint, places[0])
        for found in (found for layout in places for found in layout.locate(part.indices)):
            shape = checkpoint.stored[found.key].shape
            yield WeightPatch(found.key, shape, values.dtype, values[found.entries], found.indices)
        return
    dtype = checkpoint.dtype(places[0])
    for window in (window for layout in places for window in layout.windows):
        stored = torch.empty(checkpoint.stored[window.key].shape, dtype=dtype, device="cpu")
        window.view(stored).copy_(part.detach()[window.box])
        indices = None
        if window.place.numel() < stored.numel():
            indices = window.view(torch.arange(stored.numel(), device="cpu")).flatten().sort().values
        values = stored.flatten() if indices is None else stored.take(indices)
        yield WeightPatch(window.key, tuple(stored.shape), dtype, values, indices)


def merge(tensors: TensorDeltas, whole: NamedTensors, config: Config, base: StrPath, out: StrPath) -> Path:
    source, out = _check_folders(base, out)
    checkpoint = Checkpoint(source)
    report, layouts = check_checkpoint(tensors, whole, checkpoint)
    dtypes = [(name, tensors[name].dtype, checkpoint.dtype(layouts[name])) for name in report.unchecked]
    warn_of_casts(dtypes, "the checkpoint")
    places = {name: checkpoint.copies(name, layout) for name, layout in layouts.items()}
    new = {name: whole[name] for name in report.missing}
    pairs = [(name, layout) for name, own in places.items() for layout in own if name in whole]
    resized = {layout.keys[0]: whole[name] for name, layout in pairs if layout.shape != whole[name].shape}
    sizes = {key: (checkpoint.stored[key].shape[0], len(tensor)) for key, tensor in resized.items()}
    model_config = _updated_config(source / "config.json", config, whole, sizes)
    if "__metadata__" in new:
        raise SparsifyError("a checkpoint cannot have a tensor that is called `__metadata__`: rename the module.")
    file_names = [file.name for file in checkpoint.files]
    if new:
        number = len(file_names) + 1
        file_names = [f"model-{position:05d}-of-{number:05d}.safetensors" for position in range(1, number + 1)]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as parent:
        folder = Path(parent) / out.name
        folder.mkdir()
        if resized:
            checkpoint = _resized(checkpoint, resized, Path(parent))
            places = {name: [at for at in own if at.keys[0] not in resized] for name, own in places.items()}
        _copy_descriptions(source, folder)
        copies = {file: folder / name for file, name in zip(checkpoint.files, file_names, strict=False)}
        _write_shards({**tensors, **whole}, checkpoint, places, copies)
        if file_names != [WEIGHTS_NAME]:
            _write_index(checkpoint, new, copies, folder / file_names[-1])
        if model_config is not None:
            _write_json(folder / "config.json", model_config)
        if out.exists():
            out.rmdir()
        folder.rename(out)
    return out


def recorded_labels(config: Config, whole: NamedTensors) -> dict[str, Any]:
    """A delta's labels, and nothing else of its record, as keys of a config, if a dense tensor has as many of them."""
    recorded = config.get("model_config")
    head = recorded if isinstance(recorded, dict) else {}
    number, names, problem = (head.get(key) for key in ("num_labels", "id2label", "problem_type"))
    sizes = {size for tensor in whole.values() if tensor.numel() for size in tensor.shape}
    if type(number) is not int or number not in sizes or number > _MOST_LABELS:
        return {}
    given = names if isinstance(names, dict) else {}
    id2label = {index: str(given.get(str(index), f"LABEL_{index}")) for index in range(number)}
    labels: dict[str, Any] = {"id2label": id2label, "label2id": {label: index for index, label in id2label.items()}}
    return {**labels, "problem_type": problem} if isinstance(problem, str) else labels


def _resized(checkpoint: Checkpoint, tensors: NamedTensors, folder: Path) -> Checkpoint:
    """The checkpoint with stored tensors replaced by others of another size; the files with these go into a folder."""
    changed, files = Checkpoint(checkpoint.path), {checkpoint.stored[key].file for key in tensors}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            values = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            own = {key: tensors[key].to(old.dtype).contiguous() for key, old in values.items() if key in tensors}
            safetensors.torch.save_file({**values, **own}, folder / file.name, opened.metadata())
    changed.files = tuple(folder / file.name if file in files else file for file in checkpoint.files)
    changed.stored = {name: stored for file in changed.files for name, stored in read_header(file).items()}
    return changed


def _updated_config(
    path: Path, config: Config, whole: NamedTensors, sizes: Mapping[str, tuple[int, int]]
) -> Config | None:
    """The ``config.json`` with the class, labels and numbers of tokens (old and new, by stored tensor), or ``None``."""
    updates, architecture = recorded_labels(config, whole), config.get("architecture")
    if isinstance(architecture, str) and architecture.isidentifier():
        updates["architectures"] = [architecture]
    if not (updates or sizes) or not whole or not path.is_file():
        return None
    document = read_json(path)
    for key, (old, new) in sizes.items():
        part = document.get(key.split(".")[0])  # such as the decoder, in the config of a composite model
        own = part if isinstance(part, dict) else document
        own.update(json.loads(re.sub(rf'"vocab_size": {old}\b', f'"vocab_size": {new}', json.dumps(own))))
    return {**document, **updates}


def _write_shards(
    parts: Mapping[str, Any], checkpoint: Checkpoint, places: Mapping[str, Sequence[Layout]], copies: dict[Path, Path]
) -> None:
    total = sum(file.stat().st_size for file in checkpoint.files)
    with tqdm(desc="merging", total=total, unit="B", unit_scale=True, disable=None) as progress:
        for file, copy in copies.items():
            shutil.copyfile(file, copy)
            targets = {key: at._replace(file=copy) for key, at in checkpoint.stored.items() if at.file == file}
            for name, layouts in places.items():
                if any(key in targets for layout in layouts for key in layout.keys):
                    for patch in patches_of(name, parts[name], checkpoint, layouts):
                        if patch.name in targets:
                            _write(targets[patch.name], patch)
            progress.update(copy.stat().st_size)


def _write(stored: Stored, patch: WeightPatch) -> None:
    """Writes a patch into a stored tensor's file, by way of its memory, which is unmapped with its last reference."""
    if patch.values.numel():
        data = np.memmap(stored.file, dtype=np.uint8, mode="r+", offset=stored.begin, shape=(stored.nbytes,))
        memory = torch.from_numpy(data).view(patch.dtype)
        if patch.indices is None:
            memory.copy_(patch.values)
        else:
            put(memory, patch.indices, patch.values)


def _write_index(checkpoint: Checkpoint, new: NamedTensors, copies: Mapping[Path, Path], last: Path) -> None:
    """Writes the index of the files and, into the last one, the tensors that the base does not have."""
    weight_map = {key: copies[stored.file].name for key, stored in checkpoint.stored.items()}
    if new:
        own = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in new.items()}
        safetensors.torch.save_file(own, last, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(new, last.name)
    stored = checkpoint.stored.values()
    numel = sum(math.prod(s.shape) for s in stored) + sum(t.numel() for t in new.values())
    nbytes = sum(s.nbytes for s in stored) + sum(t.nbytes for t in new.values())
    index = {"metadata": {"total_parameters": numel, "total_size": nbytes}}
    _write_json(last.with_name(INDEX_NAME), {**index, "weight_map": dict(sorted(weight_map.items()))})


def _copy_descriptions(source: Path, folder: Path) -> None:
    """Copies the files that describe the model, folders of only such files, and those of ``modules.json``'s modules."""
    modules = read_json(source / "modules.json", list) if (source / "modules.json").is_file() else []
    own = [module.get("path") for module in modules if isinstance(module, dict)]
    for path in source.iterdir():
        # no links to folders, which may lead anywhere, also back here; nor pipes
        is_folder = path.is_dir() and not path.is_symlink()
        files = [file for file in (path.rglob("*") if is_folder else [path]) if file.is_file()]
        if path.name in own or not any(_LEFT_OUT.fullmatch(part.name) for part in (path, *files)):
            for file in files:
                copy = folder / file.relative_to(source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, copy)


def _check_folders(base: Any, out: StrPath) -> tuple[Path, Path]:
    if isinstance(base, nn.Module):
        remedy = "give the folder of its checkpoint, or `apply` the delta to the model and `save_pretrained` it."
        raise SparsifyError(f"`merge` works on files, and got a {type(base).__name__} as the base: {remedy}")
    source, out = Path(base), Path(out).resolve()  # a link to a folder, or ".", cannot be renamed over
    if not source.is_dir():
        raise SparsifyError(f"`{source}` is not a folder: give the one with the base's `config.json` and weights.")
    if out == source.resolve():
        raise SparsifyError(f"`{out}` is the base itself, which a merge leaves as it is: give another folder to write.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SparsifyError(f"`{out}` is there already and is not an empty folder: delete it, or give another one.")
    return source, out


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
