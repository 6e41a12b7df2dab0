"""Maps a model's names at run time to the tensors in a checkpoint that transformers renames or fuses at load.

In: the names and shapes of the tensors in a checkpoint, and the folder with its ``config.json``. Out: for a name of the
model's state dict at run time, a :class:`~sparsify.delta.checkpoint.fused_layout.Layout` of its entries.

The rules are transformers' own. The model is built without weights, and the conversions that ``from_pretrained`` would
run on tensors (renaming, stacks of experts, chunks of fused projections) are run on layouts. Other conversions
(permuting, interleaving, dequantizing) are an error by name. Transformers 4 only renames tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import count
from pathlib import Path
from threading import get_ident
from typing import Any

from sparsify.common.names import tied_names
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.errors import SparsifyError, brief

_COUNTED = re.compile("layer|depth|expert|label")  # in names of settings that are numbers of modules


class Conversion:
    """A checkpoint's tensors as ``from_pretrained`` would name and arrange them. Imports transformers."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        """From the stored tensors' shapes by name, and the folder of ``config.json``; raises if that has no model."""
        model = model_without_weights(folder, len(shapes))
        self._prefix: str = model.base_model_prefix
        self._tied = tied_names(model)
        self._layouts, self._unmappable = _convert(model, shapes)

    @property
    def names(self) -> list[str]:
        """Names at run time of all the tensors."""
        return [*self._layouts, *self._unmappable]

    def first_name(self, name: str) -> str:
        """A tied tensor's first name in the checkpoint; any other tensor's own name."""
        return next((tied for tied in self._tied.get(name, ()) if tied in self._layouts), name)

    def has(self, name: str) -> bool:
        """Whether the checkpoint has a tensor of this name at run time."""
        return any(alias in self._layouts or alias in self._unmappable for alias in self._aliases(name))

    def find(self, name: str) -> list[Layout]:
        """Finds a tensor's layouts: several where a tied tensor is stored under several names, none if it is missing.

        ``name`` is that at run time, in a model that may have a head that the checkpoint's lacks, or lack its.
        """
        found = []
        for alias in self._aliases(name):
            if alias in self._unmappable:
                raise SparsifyError(
                    f"transformers converts tensor `{name}` at load in a way that single entries cannot be followed "
                    f"through ({self._unmappable[alias]}), so it has no place of its own in the checkpoint's files: "
                    "load the model with `from_pretrained`, `apply` the delta, and `save_pretrained`."
                )
            if alias in self._layouts:
                found.append(self._layouts[alias])
        return list({tuple(layout.keys): layout for layout in found}.values())

    def _aliases(self, name: str) -> Iterator[str]:
        """The name, those that it is tied to, and each with and without the prefix of the model under the head."""
        for plain in self._with_and_without_prefix(name):
            for tied in self._tied.get(plain, (plain,)):
                yield from self._with_and_without_prefix(tied)

    def _with_and_without_prefix(self, name: str) -> tuple[str, ...]:
        prefix = f"{self._prefix}."
        if not self._prefix:
            return (name,)
        return (name, name.removeprefix(prefix) if name.startswith(prefix) else prefix + name)


def model_without_weights(folder: Path, num_tensors: int, architecture: object = None) -> Any:
    """Builds the model of a folder's ``config.json`` on the meta device; runs no code from the folder.

    The number of tensors in the checkpoint bounds the model. ``architecture`` names the class to build, if transformers
    has it for this config; else it is the config's own. Raises where there is no config, or no model can be built.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise SparsifyError(f"`{folder}` has no `config.json` that says what model it is")
    import torch
    import transformers

    try:
        _check_counts(file, num_tensors)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = [name for name in (architecture, *(config.architectures or ())) if isinstance(name, str)]
        classes: Any = [getattr(transformers, name, None) for name in names]
        with torch.device("meta"), _modules_within(num_tensors):
            for model_class in classes:
                if _is_class_for(model_class, config):
                    return model_class(config)
            return transformers.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # third parties' code for hundreds of models
        reason = f"{type(error).__name__}: {brief(error)}"
        raise SparsifyError(f"transformers cannot build the model of `{file}` ({reason})") from error


def _check_counts(config_file: Path, num_tensors: int) -> None:
    """Raises where a config counts far more layers, experts or labels than there are tensors."""
    level = [json.loads(config_file.read_text(encoding="utf-8"))]
    while level:
        pairs = [pair for item in level if isinstance(item, dict) for pair in item.items()]
        for key, value in pairs:
            if isinstance(value, int) and _COUNTED.search(key) and value > _most_modules(num_tensors):
                counted = f"`{brief(key, 100)}` is {brief(value, 30)}"
                raise SparsifyError(f"{counted} for a checkpoint of {num_tensors:,} tensors: it is damaged")
        level = [value for _, value in pairs]


@contextmanager
def _modules_within(num_tensors: int) -> Iterator[None]:
    """Within the block, building a model of far more modules than a checkpoint has tensors is an error.

    The config is not trusted, and a number in it decides how long the model takes to build.
    """
    from torch.nn.modules.module import register_module_module_registration_hook

    built, thread = count(1), get_ident()

    def check(module: Any, name: str, part: Any) -> None:
        if get_ident() == thread and next(built) > _most_modules(num_tensors):
            raise SparsifyError(
                f"the config asks for more than {_most_modules(num_tensors):,} modules, for a checkpoint of "
                f"{num_tensors:,} tensors: it is damaged"
            )

    handle = register_module_module_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _most_modules(num_tensors: int) -> int:
    """More than any model has: experts that are stored as one tensor may be modules each."""
    return 50_000 + 10 * num_tensors


def _is_class_for(model_class: Any, config: Any) -> bool:
    """Whether it is a model's class for a config; one of another family would be built in its own default size."""
    import transformers

    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    return is_model and model_class.config_class is not None and isinstance(config, model_class.config_class)


def _convert(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, Layout], dict[str, str]]:
    """Layouts by name at run time; and for names whose conversion no layout can follow, its operations.

    Follows ``convert_and_load_state_dict_in_model`` of transformers step by step, dtypes and devices left out.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers 4 only renames
        names = _renamed_by_transformers_4(model, shapes)
        return {names[key]: Layout.stored(key, shape) for key, shape in shapes.items()}, {}

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    layouts: dict[str, Layout] = {}
    converting: dict[str, Any] = {}
    for key in sorted(shapes, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
        if name not in expected and key in expected:  # the rules were for an older layout of the checkpoint
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, expected)
        layout = Layout.stored(key, shapes[key])
        if pattern is None:
            layouts.setdefault(name, layout)
        else:
            converter = converting.setdefault(name, deepcopy(converter_of[pattern]))
            converter.add_tensor(name, key, pattern, layout)
    unmappable: dict[str, str] = {}
    for name, converter in converting.items():
        try:
            converted = converter.convert(name, model=model, config=model.config)
        except Exception:  # an operation that layouts do not have may raise any error
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            first, *_ = converter.target_patterns
            unmappable |= {name.replace(first, target): operations for target in converter.target_patterns}
        else:
            layouts |= {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}
    return layouts, unmappable


def _renamed_by_transformers_4(model: Any, keys: Iterable[str]) -> dict[str, str]:
    """Names at run time by stored name: legacy names, and those of a vision-language model, are mapped to today's."""
    from transformers.modeling_utils import VLMS  # type: ignore[attr-defined]

    classes = [cls.__name__.lower() for cls in type(model).__mro__]
    is_vlm = any(name in cls for cls in classes for name in VLMS)  # ``from_pretrained`` maps no other model's names
    mapping: dict[str, str] = model._get_key_renaming_mapping(
        list(keys), model._checkpoint_conversion_mapping if is_vlm else None
    )
    return mapping
