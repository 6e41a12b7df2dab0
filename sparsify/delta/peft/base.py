"""The base that an adapter belongs to: its tensors, and its modules, which tell linear layers from the rest.

In: a model, or the path of a checkpoint. Out: a :class:`Source`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from sparsify.common.names import near_names, plain_name, tied_names
from sparsify.delta.checkpoint.conversion import check_counts, is_class_for, modules_within
from sparsify.delta.checkpoint.reader import open_base
from sparsify.delta.patch_plan import check_has_values
from sparsify.errors import BaseMismatchError, SparsifyError, brief

Base = nn.Module | str | os.PathLike[str]


class Source(NamedTuple):
    """A base: its tensors by name, and its modules, which a checkpoint's config tells."""

    tensors: Mapping[str, Tensor]
    modules: dict[str, nn.Module]
    same: dict[str, list[str]]  # see `tied_names`
    closed: bool  # whether there is nothing else than these: a checkpoint may lack the head that was trained

    @classmethod
    def of(cls, base: Base, architecture: object = None) -> Source:
        """A base, and for a checkpoint the class that was trained, where a delta names one of transformers'."""
        tensors = open_base(base)
        model = base if isinstance(base, nn.Module) else _skeleton(Path(base), architecture, len(tensors))
        modules = {
            plain_name(f"{name}.weight").rpartition(".")[0]: module
            for name, module in model.named_modules(remove_duplicate=False)
            if name
        }
        return cls(tensors, modules, tied_names(model), isinstance(base, nn.Module))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the base, as a model that was loaded in ``dtype`` would hold it."""
        if name not in self.tensors:
            hint = near_names(name, self.tensors)
            remedy = "Give the base that the delta was trained on" + ("." if self.closed else ", as a model.")
            raise BaseMismatchError(f"the base has no tensor `{name}`{hint}. {remedy}")
        tensor = self.tensors[name]
        check_has_values(name, tensor)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _skeleton(path: Path, architecture: object, num_tensors: int) -> nn.Module:
    """The model of a checkpoint, without its weights: only its config says which weights are linear layers'.

    The class that was trained may have a head on top of the checkpoint's own, and its tensors other names for that.
    """
    import transformers

    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise SparsifyError(
            f"`{folder}` has no config.json that would say which of its tensors are weights of nn.Linear layers, the "
            "only ones that PEFT's sparse adapters change: give the base as a model."
        )
    try:
        check_counts(folder, num_tensors)
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        names = [name for name in (architecture, *(config.architectures or ())) if isinstance(name, str)]
        model_class = next(
            (cls for name in names if is_class_for(cls := getattr(transformers, name, None), config)), None
        )
        if model_class is None:
            raise TypeError(
                f"{' and '.join(names) or 'no class'} is no model of transformers for {type(config).__name__}"
            )
        with torch.device("meta"), modules_within(num_tensors):
            model: Any = model_class(config)
        model.tie_weights()
    except Exception as error:  # third parties' code for hundreds of models, some of whose messages list them all
        raise SparsifyError(
            f"the model of `{folder / 'config.json'}` cannot be built without its weights ({type(error).__name__}: "
            f"{brief(error)}): give the base as a model."
        ) from error
    return cast(nn.Module, model)


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or tensor lies in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)
