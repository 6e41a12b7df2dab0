"""Writes a delta as an adapter of PEFT: finds the smallest setting that fits, pads each layer to it, writes two files.

In: entries and whole tensors, and their base. Out: a folder, and a :class:`PeftAdapter` that reports its size.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors.torch
import torch
from torch import Tensor, nn

from sparsify.common.names import check_names, listed, plain_name, tied_names
from sparsify.delta.checkpoint.conversion import model_without_weights
from sparsify.delta.checkpoint.reader import Checkpoint, base_tensor, open_base
from sparsify.delta.entries import Base, NamedTensors, StrPath, TensorDeltas
from sparsify.delta.patch_plan import PlannedWrite as TensorPatch
from sparsify.delta.patch_plan import check_fits as check_dense
from sparsify.delta.patch_plan import check_has_values, counted, own_copy, plan_entries
from sparsify.delta.peft.methods import CONFIG_NAME, METHODS, PREFIX, WEIGHTS_NAME, Method, find_differences
from sparsify.errors import SparsifyError

Edits: TypeAlias = Mapping[str, TensorPatch]  # by tensor name
_REMEDY = "write an ordinary checkpoint (`apply`, then `save_pretrained`)."


@dataclass(frozen=True)
class PeftAdapter:
    """A written adapter, and the places that PEFT's format takes for it.

    Attributes:
        folder: the folder that was written.
        method: ``"shira"`` or ``"supertuning"``.
        settings: the setting of PEFT's config that fixes the number of places in every layer.
        layers: number of layers with entries.
        entries: number of the delta's entries.
        corrections: number of entries with a second place, for the rest that the dtype of the first cannot hold.
        padding: number of unused places.
        saved_modules: modules stored whole.
        num_bytes: size of the file with the weights.

    Example:
        >>> print(PeftAdapter(Path("a"), "shira", {"r": 2}, 3, 100, 0, 20, ("classifier",), 1_500))
        a: PEFT shira, r=2, 100 entries in 3 layers, 1,500 bytes
          padding: 20 places (16.7 %) that the layers with fewer entries have to have
          stored whole: classifier
    """

    folder: Path
    method: str
    settings: dict[str, Any]
    layers: int
    entries: int
    corrections: int
    padding: int
    saved_modules: tuple[str, ...]
    num_bytes: int

    def __str__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in self.settings.items())
        share = 100 * self.padding / (self.entries + self.corrections + self.padding)
        padding = f"{counted(self.padding, 'place')} ({share:.1f} %)"
        lines = [
            f"{self.folder}: PEFT {self.method}, {settings}, {counted(self.entries, 'entry', 'entries')} in "
            f"{counted(self.layers, 'layer')}, {self.num_bytes:,} bytes",
            f"  padding: {padding} that the layers with fewer entries have to have",
        ]
        if self.corrections:
            lines.append(f"  corrections: {counted(self.corrections, 'place')} for what the dtype rounds off")
        if self.saved_modules:
            lines.append(f"  stored whole: {listed(self.saved_modules)}")
        return "\n".join(lines)


def write_adapter(
    folder: StrPath,
    method: str,
    tensors: TensorDeltas,
    whole: NamedTensors,
    config: Mapping[str, Any],
    base: Base | None,
) -> PeftAdapter:
    """Writes a delta as an adapter that plain PEFT loads; see :meth:`sparsify.SparseDelta.to_peft`."""
    if not isinstance(method, str) or method not in METHODS:
        raise SparsifyError(f"method={method!r:.100}; expected one of {', '.join(map(repr, METHODS))}.")
    if base is None:
        raise SparsifyError(
            "PEFT's adapters hold differences from the base, and a delta holds trained values: give the base, as in "
            "`to_peft(folder, base=model)`, or the path of its checkpoint."
        )
    check_names(tensors, whole)
    source = _Source.of(base, config.get("architecture"))
    edits = {name: plan_entries(name, part, source.tensor(name, part.dtype)) for name, part in tensors.items()}
    saved = _saved_modules(whole, source.modules)
    layers = {name: edit for name, edit in edits.items() if not _inside(name, saved)}
    _check_weights(layers, source, method)
    sums = {}  # by layer: the entry that each difference belongs to (used,), and the differences (used,)
    for name, edit in layers.items():
        try:
            sums[name] = find_differences(METHODS[method], edit.old, edit.new)
        except SparsifyError as error:
            raise SparsifyError(f"tensor `{name}`: {error}; nothing was written.") from error
    settings, places = _fit(METHODS[method], layers, {name: owners.numel() for name, (owners, _) in sums.items()})
    stored: dict[str, Tensor] = {}
    for name, edit in layers.items():
        stored |= _sparse_tensors(name, edit, sums[name], places[name], METHODS[method])
    for module in saved:
        stored |= _whole_module(module, whole, edits, source)
    peft_config = _make_config(
        method,
        sorted(name.removesuffix(".weight") for name in layers),
        source,
        base_model_name_or_path=config.get("base_model_name_or_path") or source.path,
        revision=config.get("base_model_revision"),
        modules_to_save=saved or None,
        **settings,
    )
    entries = sum(edit.old.numel() for edit in layers.values())
    used = sum(owners.numel() for owners, _ in sums.values())
    return PeftAdapter(
        folder=Path(folder),
        method=method,
        settings=settings,
        layers=len(layers),
        entries=entries,
        corrections=used - entries,
        padding=sum(places.values()) - used,
        saved_modules=tuple(saved),
        num_bytes=_write_folder(Path(folder), peft_config, stored),
    )


class _Source(NamedTuple):
    """A base: its tensors by name, and its modules, which for a checkpoint follow from its config."""

    tensors: Mapping[str, Tensor]
    modules: dict[str, nn.Module]
    ties: dict[str, list[str]]  # see `tied_names`
    path: str | None  # of a checkpoint, which may lack the head that was trained

    @classmethod
    def of(cls, base: Base, architecture: object) -> _Source:
        """A base; ``architecture`` is the trained class, whose tensors may have other names than a checkpoint's own."""
        tensors = open_base(base)
        model: Any = base
        if isinstance(tensors, Checkpoint):
            try:
                model = model_without_weights(tensors.folder, len(tensors), architecture)
            except SparsifyError as error:
                raise SparsifyError(
                    f"PEFT's sparse adapters change weights of nn.Linear layers only, and which of the base's these "
                    f"are is not known, since {error}: give the base as a model."
                ) from error
        names = ((plain_name(f"{name}.weight").rpartition(".")[0], module)
                 for name, module in model.named_modules(remove_duplicate=False) if name)  # fmt: skip
        path = None if isinstance(base, nn.Module) else os.fspath(base)
        return cls(tensors, dict(names), tied_names(model), path)

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the base, as a model that was loaded in ``dtype`` would hold it."""
        tensor = base_tensor(name, self.tensors)
        check_has_values(name, tensor)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _saved_modules(whole: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The outermost modules that hold tensors stored whole; raises where PEFT would take another module for one."""
    owners = sorted({name.rpartition(".")[0] for name in whole})
    if owners and not owners[0]:
        own = listed([f"`{name}` (of the model itself)" for name in whole if "." not in name])
        raise SparsifyError(
            f"{own} cannot be stored whole by PEFT, which does so only with modules inside of the model: {_REMEDY}"
        )
    saved = [owner for owner in owners if not _inside(owner, owners)]
    for owner in saved:  # PEFT saves every module whose name ends in this one
        if others := [name for name in modules if name.endswith(owner) and name != owner]:
            also = f"PEFT would take `{others[0]}` for it, too, since that ends in the same letters"
            raise SparsifyError(f"`{owner}` is stored whole, and {also}: {_REMEDY}")
    return saved


def _check_weights(names: Collection[str], source: _Source, method: str) -> None:
    """Raises unless all tensors with entries are weights that PEFT's adapter can change, and there is one."""
    if not names:
        raise SparsifyError(
            f"the delta has no entries in a linear layer's weight, and PEFT's {method} adapter needs one: {_REMEDY}"
        )
    if unfit := [f"`{name}` ({reason})" for name in names if (reason := _why_not(name, source))]:
        raise SparsifyError(
            f"PEFT's {method} adapter changes weights of nn.Linear and nothing else, which {len(unfit)} of the delta's "
            f"{counted(len(names), 'tensor')} are not: {listed(unfit)}. Nothing was written: freeze them before "
            f"training (`requires_grad_(False)` before `sparsify`), or {_REMEDY}"
        )


def _why_not(name: str, source: _Source) -> str | None:
    """The reason why a sparse adapter of PEFT cannot change a tensor, in a few words; None where it can."""
    layer, _, attribute = name.rpartition(".")
    module = source.modules.get(layer)
    if not layer:
        return "of the model itself, not of a layer in it"
    if module is None:
        return "not in the config's architecture"
    # PEFT replaces a layer's forward by F.linear, which an attention that reads the weight itself does not call
    plain = type(module).forward is nn.Linear.forward and type(module).__name__ != "NonDynamicallyQuantizableLinear"
    if not plain or attribute != "weight":
        return f"{type(module).__name__}'s {attribute}"
    if others := [other for other in source.ties.get(name, []) if other != name]:
        return f"tied to `{others[0]}`"
    return None


def _fit(method: Method, edits: Edits, needed: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, int]]:
    """The smallest setting with the places that every layer needs, and those it gets; raises if one is too small."""
    settings = method.fit({name: (needed[name], edit.shape) for name, edit in edits.items()})
    places = {name: method.places(settings, edit.shape) for name, edit in edits.items()}
    small = [
        f"`{name}` ({edit.shape[0]:,} x {edit.shape[1]:,}, asked for {places[name]:,})"
        for name, edit in edits.items()
        if places[name] > math.prod(edit.shape)
    ]
    if small:
        fullest = max(edits, key=lambda name: needed[name] / sum(edits[name].shape))
        raise SparsifyError(
            f"PEFT's {method.name} adapter gives every layer r * (in + out) places, and `{fullest}` needs "
            f"r={settings['r']} for its {counted(needed[fullest], 'entry', 'entries')}: more places than "
            f"{counted(len(small), 'layer')} can have: {listed(small)}. Nothing was written: use "
            'method="supertuning", which gives every layer the same share of its size, or train fewer entries there.'
        )
    return settings, places


def _sparse_tensors(
    name: str, edit: TensorPatch, sums: tuple[Tensor, Tensor], places: int, method: Method
) -> dict[str, Tensor]:
    """PEFT's tensors for one layer, by PEFT's names: differences, then -0.0 at the first positions without one."""
    assert edit.indices is not None  # a layer's edit is one of entries
    owners, differences = sums
    positions = edit.indices[owners]
    unused = torch.ones(math.prod(edit.shape), dtype=torch.bool)
    unused[positions] = False
    spare = unused.nonzero().flatten()[: places - positions.numel()]
    layer = PREFIX + name.removesuffix("weight")
    return {
        layer + method.values_key: torch.cat([differences, differences.new_full((spare.numel(),), -0.0)]),
        layer + method.indices_key: method.store_positions(torch.cat([positions, spare]), edit.shape),
    }


def _whole_module(module: str, whole: NamedTensors, edits: Edits, source: _Source) -> dict[str, Tensor]:
    """All trained tensors of a module, by PEFT's names."""
    parts = {}
    for name in dict.fromkeys([*whole, *source.tensors]):
        if not _inside(name, [module]):
            continue
        if others := [other for other in source.ties.get(name, []) if not _inside(other, [module])]:
            raise SparsifyError(
                f"`{module}` is stored whole and holds `{name}`, which is tied to `{others[0]}`; PEFT would change "
                f"only one of them: {_REMEDY}"
            )
        if name in whole:
            if source.path is None or name in source.tensors:
                check_dense(name, whole[name], source.tensor(name).shape, source.tensor(name).dtype)
            parts[PREFIX + name] = own_copy(whole[name])
        else:
            dtype = edits[name].new.dtype if name in edits else None
            parts[PREFIX + name] = own_copy(source.tensor(name, dtype))
            if name in edits:
                edits[name].write(parts[PREFIX + name])
    return parts


def _make_config(method: str, layers: list[str], source: _Source, **settings: Any) -> Any:
    """PEFT's own config for the adapter."""
    import peft

    name = METHODS[method].config_class
    config_class = getattr(peft, name, None)
    if config_class is None:
        raise SparsifyError(f"PEFT {peft.__version__} has no `{name}`: upgrade it.")
    if method == "shira":
        # not its random mask: a loader that passes over the stored positions fails instead of making some up
        settings["mask_type"] = "sparse_delta"
    made = config_class(**settings, inference_mode=True)
    ambiguous = any(other.endswith(f".{layer}") for layer in layers for other in source.modules)
    # PEFT matches the names of a list at the end, and a regular expression as a whole
    made.target_modules = "|".join(map(re.escape, layers)) if ambiguous else layers
    return made


def _write_folder(folder: Path, config: Any, parts: Mapping[str, Tensor]) -> int:
    """Writes both files, each completely or not at all; returns the size of the one with the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".peft.") as complete:
        config.save_pretrained(complete)
        safetensors.torch.save_file(dict(parts), Path(complete) / WEIGHTS_NAME, metadata={"format": "pt"})
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            os.replace(Path(complete) / name, folder / name)
    return (folder / WEIGHTS_NAME).stat().st_size


def _inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or tensor is in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)
