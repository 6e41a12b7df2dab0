"""Writes a delta as an adapter: picks PEFT's setting, pads each layer to it, and makes the two files.

In: entries and whole tensors, and their base. Out: a folder, and a :class:`PeftAdapter` that says what it cost.
"""

from __future__ import annotations

import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from sparsify.delta.entries import TensorDelta
from sparsify.delta.format import check_names
from sparsify.delta.patch_plan import TensorPatch, counted, own_copy, plan_dense, plan_entries
from sparsify.delta.peft.base import Base, Source, inside
from sparsify.delta.peft.methods import CONFIG_NAME, METHODS, PREFIX, WEIGHTS_NAME, SparseMethod
from sparsify.errors import SparsifyError

_NAMED_AT_MOST = 5
_CONFIG_CLASSES = {"shira": "ShiraConfig", "supertuning": "SupertuningConfig"}


@dataclass(frozen=True)
class PeftAdapter:
    """A written adapter, and what PEFT's format costs it.

    Attributes:
        folder: where it is.
        method: ``"shira"`` or ``"supertuning"``.
        settings: the setting of PEFT's config that fixes how many places every layer has.
        layers: layers with entries.
        entries: the delta's entries.
        corrections: entries that have a second place, for what the dtype of the first cannot hold.
        padding: places that nothing needs.
        saved_modules: modules stored whole.
        num_bytes: of the file with the weights.

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
        places = self.entries + self.corrections + self.padding
        lines = [
            f"{self.folder}: PEFT {self.method}, {settings}, {counted(self.entries, 'entry', 'entries')} in "
            f"{counted(self.layers, 'layer')}, {self.num_bytes:,} bytes",
            f"  padding: {counted(self.padding, 'place')} ({self.padding / places:.1%}".replace("%", " %")
            + ") that the layers with fewer entries have to have",
        ]
        if self.corrections:
            lines.append(f"  corrections: {counted(self.corrections, 'place')} for what the dtype rounds off")
        if self.saved_modules:
            first, more = self.saved_modules[:_NAMED_AT_MOST], len(self.saved_modules[_NAMED_AT_MOST:])
            lines.append(f"  stored whole: {', '.join(first)}" + (f" and {more:,} more" if more else ""))
        return "\n".join(lines)


def write_adapter(
    folder: str | os.PathLike[str],
    method: str,
    tensors: Mapping[str, TensorDelta],
    whole: Mapping[str, Tensor],
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
    source = Source.of(base, config.get("architecture"))
    edits = {name: plan_entries(name, part, source.tensor(name, part.dtype)) for name, part in tensors.items()}
    saved = _saved_modules(whole, source.modules)
    layers = {name: edit for name, edit in edits.items() if not inside(name, saved)}
    _check_weights(layers, source, METHODS[method])
    fit = _fit(METHODS[method], layers)
    parts = _sparse_tensors(METHODS[method], layers, fit)
    for module in saved:
        parts |= _whole_module(module, whole, edits, source)
    peft_config = _make_config(method, fit.settings, list(layers), saved, config, base, source.modules)
    entries = sum(edit.old.numel() for edit in layers.values())
    return PeftAdapter(
        folder=Path(folder),
        method=method,
        settings=fit.settings,
        layers=len(layers),
        entries=entries,
        corrections=fit.used - entries,
        padding=sum(fit.places.values()) - fit.used,
        saved_modules=tuple(saved),
        num_bytes=_write_folder(Path(folder), peft_config, parts),
    )


def _saved_modules(whole: Iterable[str], modules: Mapping[str, nn.Module]) -> list[str]:
    """The outermost modules that hold tensors stored whole, each of which PEFT can tell from all others."""
    owners = sorted({name.rpartition(".")[0] for name in whole})
    if owners and not owners[0]:
        own = _listed({name: "of the model itself" for name in whole if "." not in name})
        raise SparsifyError(
            f"{own} cannot be stored whole by PEFT, which does so only with modules inside of the model: write an "
            "ordinary checkpoint (`apply`, then `save_pretrained`)."
        )
    saved = [owner for owner in owners if not inside(owner, [other for other in owners if other != owner])]
    for owner in saved:
        # PEFT saves every module whose name ends in this one.
        if others := [name for name in modules if name.endswith(owner) and name != owner]:
            raise SparsifyError(
                f"`{owner}` is stored whole, and PEFT would take `{others[0]}` for it, too, since that ends in the "
                "same letters: write an ordinary checkpoint (`apply`, then `save_pretrained`)."
            )
    return saved


def _check_weights(names: Iterable[str], source: Source, method: SparseMethod) -> None:
    """Raises unless all tensors with entries are weights that PEFT's adapter can change, and there is one."""
    names = list(names)
    remedy = (
        "freeze them before training (`requires_grad_(False)` before `sparsify`), or write an ordinary checkpoint "
        "(`apply`, then `save_pretrained`)."
    )
    if not names:
        raise SparsifyError(
            f"the delta has no entries in a linear layer's weight, and PEFT's {method.name} adapter has to have one: "
            "write an ordinary checkpoint (`apply`, then `save_pretrained`)."
        )
    unfit = {name: reason for name in names if (reason := _why_not(name, source))}
    if unfit:
        raise SparsifyError(
            f"PEFT's {method.name} adapter changes weights of nn.Linear and nothing else, which "
            f"{len(unfit)} of the delta's {counted(len(names), 'tensor')} are not: {_listed(unfit)}. Nothing was "
            f"written: {remedy}"
        )


def _why_not(name: str, source: Source) -> str | None:
    """Why a sparse adapter of PEFT cannot change a tensor, in a word or two, or None where it can."""
    layer, _, attribute = name.rpartition(".")
    module = source.modules.get(layer)
    if not layer:
        return "of the model itself, not of a layer in it"
    if module is None:
        return "not in the config's architecture"
    # PEFT puts F.linear in the place of a layer's forward; an attention that reads a weight past its layer sees none.
    plain = type(module).forward is nn.Linear.forward and type(module).__name__ != "NonDynamicallyQuantizableLinear"
    if not plain or attribute != "weight":
        return f"{type(module).__name__}'s {attribute}"
    if others := [other for other in source.same.get(name, []) if other != name]:
        return f"tied to `{others[0]}`"
    return None


class _Fit(NamedTuple):
    """How a delta fills PEFT's places.

    Attributes:
        settings: of PEFT's config.
        places: how many every layer gets.
        sums: for every layer, which entry each difference belongs to (used,), and the differences (used,).
    """

    settings: dict[str, Any]
    places: dict[str, int]
    sums: dict[str, tuple[Tensor, Tensor]]

    @property
    def used(self) -> int:
        return sum(owners.numel() for owners, _ in self.sums.values())


def _fit(method: SparseMethod, edits: Mapping[str, TensorPatch]) -> _Fit:
    """The smallest setting in which all layers' differences have a place; raises where a layer is too small for it."""
    sums = {}
    for name, edit in edits.items():
        try:
            sums[name] = method.differences(edit.old, edit.new)
        except SparsifyError as error:
            raise SparsifyError(f"tensor `{name}`: {error}; nothing was written.") from error
    settings = method.fit({name: (sums[name][0].numel(), edit.shape) for name, edit in edits.items()})
    places = {name: method.places(settings, edit.shape) for name, edit in edits.items()}
    small = {
        name: f"{edit.shape[0]:,} x {edit.shape[1]:,}, asked for {places[name]:,}"
        for name, edit in edits.items()
        if places[name] > math.prod(edit.shape)
    }
    if small:
        fullest = max(edits, key=lambda name: sums[name][0].numel() / sum(edits[name].shape))
        raise SparsifyError(
            f"PEFT's {method.name} adapter gives every layer r * (in + out) places, and `{fullest}` needs "
            f"r={settings['r']} for its {counted(sums[fullest][0].numel(), 'entry', 'entries')}: more places than "
            f"{counted(len(small), 'layer')} can have: {_listed(small)}. Nothing was written: use "
            'method="supertuning", which gives every layer the same share of its size, or train fewer entries there.'
        )
    return _Fit(settings, places, sums)


def _sparse_tensors(method: SparseMethod, edits: Mapping[str, TensorPatch], fit: _Fit) -> dict[str, Tensor]:
    """PEFT's tensors for the edits, by PEFT's names."""
    parts = {}
    for name, edit in edits.items():
        assert edit.indices is not None  # these edits are all of entries
        owners, differences = fit.sums[name]
        positions, values = _padded(edit.indices[owners], differences, fit.places[name], math.prod(edit.shape))
        layer = PREFIX + name.removesuffix("weight")
        parts[layer + method.values_key] = values
        parts[layer + method.indices_key] = method.store_positions(positions, edit.shape)
    return parts


def _padded(positions: Tensor, values: Tensor, places: int, numel: int) -> tuple[Tensor, Tensor]:
    """Positions and values (places,): those given (count,), then -0.0 at the first positions not among them."""
    unused = torch.ones(numel, dtype=torch.bool)
    unused[positions] = False
    spare = unused.nonzero().flatten()[: places - positions.numel()]
    return torch.cat([positions, spare]), torch.cat([values, values.new_full((spare.numel(),), -0.0)])


def _whole_module(
    module: str, whole: Mapping[str, Tensor], edits: Mapping[str, TensorPatch], source: Source
) -> dict[str, Tensor]:
    """All tensors of a module as training left them, by PEFT's names."""
    parts = {}
    for name in dict.fromkeys([*whole, *source.tensors]):
        if not inside(name, [module]):
            continue
        if others := [other for other in source.same.get(name, []) if not inside(other, [module])]:
            raise SparsifyError(
                f"`{module}` is stored whole and holds `{name}`, which is tied to `{others[0]}`; PEFT would change "
                "only one of them: write an ordinary checkpoint (`apply`, then `save_pretrained`)."
            )
        if name in whole:
            if source.closed or name in source.tensors:
                plan_dense(name, whole[name], source.tensor(name))  # for its checks
            parts[PREFIX + name] = own_copy(whole[name])
        else:
            dtype = edits[name].new.dtype if name in edits else None
            parts[PREFIX + name] = own_copy(source.tensor(name, dtype))
            if name in edits:
                edits[name].write(parts[PREFIX + name])
    return parts


def _make_config(
    method: str,
    settings: Mapping[str, Any],
    weights: list[str],
    saved: list[str],
    config: Mapping[str, Any],
    base: Base,
    modules: Mapping[str, nn.Module],
) -> Any:
    """PEFT's own config for the adapter."""
    import peft

    config_class = getattr(peft, _CONFIG_CLASSES[method], None)
    if config_class is None:
        raise SparsifyError(f"PEFT {peft.__version__} has no `{_CONFIG_CLASSES[method]}`: upgrade it.")
    name_or_path = config.get("base_model_name_or_path")
    common: dict[str, Any] = {
        "base_model_name_or_path": name_or_path or (None if isinstance(base, nn.Module) else os.fspath(base)),
        "revision": config.get("base_model_revision"),
        "modules_to_save": saved or None,
        "inference_mode": True,
    }
    if method == "shira":
        # Not its random mask: a loader that passes over the stored positions fails instead of making some up.
        common["mask_type"] = "sparse_delta"
    made = config_class(**settings, **common)
    layers = sorted(name.removesuffix(".weight") for name in weights)
    ambiguous = any(other.endswith(f".{layer}") for layer in layers for other in modules)
    # In a list PEFT takes names for endings; a regular expression has to match as a whole.
    made.target_modules = "|".join(map(re.escape, layers)) if ambiguous else layers
    return made


def _write_folder(folder: Path, config: Any, parts: Mapping[str, Tensor]) -> int:
    """Writes both files, each whole or not at all; returns the size of that with the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".peft.") as complete:
        config.save_pretrained(complete)
        safetensors.torch.save_file(dict(parts), Path(complete) / WEIGHTS_NAME, metadata={"format": "pt"})
        for name in (WEIGHTS_NAME, CONFIG_NAME):
            os.replace(Path(complete) / name, folder / name)
    return (folder / WEIGHTS_NAME).stat().st_size


def _listed(reasons: Mapping[str, str]) -> str:
    """The first few names with their reasons, and how many more there are."""
    first = [f"`{name}` ({reason})" for name, reason in list(reasons.items())[:_NAMED_AT_MOST]]
    more = len(reasons) - len(first)
    return ", ".join(first) + (f" and {more:,} more" if more else "")
