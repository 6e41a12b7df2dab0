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

from sparsify.checkpoint import open_base
from sparsify.edits import check_has_values
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.names import near_names, plain_name, tied_names

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
        model = base if isinstance(base, nn.Module) else _skeleton(Path(base), architecture)
        modules = {
            plain_name(f"{name}.weight").rpartition(".")[0]: module
            for name, module in model.named_modules(remove_duplicate=False)
            if name
        }
        return cls(open_base(base), modules, tied_names(model), isinstance(base, nn.Module))

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the base, as a model that was loaded in ``dtype`` would hold it."""
        if name not in self.tensors:
            hint = near_names(name, self.tensors)
            remedy = "Give the base that the delta was trained on" + ("." if self.closed else ", as a model.")
            raise BaseMismatchError(f"the base has no tensor `{name}`{hint}. {remedy}")
        tensor = self.tensors[name]
        check_has_values(name, tensor)
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _skeleton(path: Path, architecture: object) -> nn.Module:
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
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        trained = isinstance(architecture, str) and hasattr(transformers, architecture)
        model_class = getattr(transformers, str(architecture) if trained else (config.architectures or ["none"])[0])
        if not issubclass(model_class, transformers.PreTrainedModel):
            raise TypeError(f"{model_class} is no model")
        with torch.device("meta"):
            model: Any = model_class(config)
        model.tie_weights()
    except (ValueError, AttributeError, TypeError, KeyError, OSError) as error:
        raise SparsifyError(
            f"the architecture in `{folder / 'config.json'}` cannot be built ({error}): give the base as a model."
        ) from error
    return cast(nn.Module, model)


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module or tensor lies in one of the modules."""
    return any(name.startswith(f"{module}.") for module in modules)
