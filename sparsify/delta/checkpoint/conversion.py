"""Maps a model's names at run time to the tensors in a checkpoint that transformers renames or fuses at load.

The model is built without weights, and transformers' own conversions of tensors are run on layouts. Those that layouts
cannot follow (permuting, interleaving, dequantizing) are an error by name. Transformers 4 only renames tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from sparsify.common.names import tied_names
from sparsify.delta.checkpoint.fused_layout import Layout
from sparsify.errors import SparsifyError, brief

_COUNTED = re.compile("layer|depth|expert|label")  # in names of settings that are numbers of modules


class Conversion:
    """A checkpoint's tensors as ``from_pretrained`` would name and arrange them; none where there is a ``problem``.

    ``layouts`` are by name at run time; in place of one that cannot be followed are the names of operations.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
        self.layouts: dict[str, Layout | str] = {}
        self.problem, self._prefix, self._tied = "", "", dict[str, list[str]]()
        try:
            model = _model_without_weights(folder, len(shapes))
            self._prefix, self._tied = model.base_model_prefix, tied_names(model)
            self.layouts = _convert(model, shapes)
        except SparsifyError as error:
            self.problem = str(error)

    def aliases(self, name: str) -> list[str]:
        """A tensor's names in ``layouts``, the first of tied ones first, with and without the prefix under the head."""
        tied = [tied for plain in self._prefixed(name) for tied in self._tied.get(plain, (plain,))]
        return [alias for plain in tied for alias in self._prefixed(plain) if alias in self.layouts]

    def find(self, name: str) -> list[Layout]:
        """A tensor's layouts: several where a tied tensor is stored under several names, none if it is missing."""
        found: dict[tuple[str, ...], Layout] = {}
        for alias in self.aliases(name):
            layout = self.layouts[alias]
            if isinstance(layout, str):
                how = f"in a way that single entries cannot be followed through ({layout})"
                remedy = "load the model with `from_pretrained`, `apply` the delta, and `save_pretrained`."
                raise SparsifyError(f"transformers converts tensor `{name}` at load {how}: {remedy}")
            found.setdefault(tuple(layout.keys), layout)
        return list(found.values())

    def _prefixed(self, name: str) -> tuple[str, ...]:
        prefix = f"{self._prefix}."
        other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
        return (name, other) if self._prefix else (name,)


def _model_without_weights(folder: Path, num_tensors: int) -> Any:
    """Builds the model of a folder's ``config.json`` on the meta device; runs no code from the folder."""
    file = folder / "config.json"
    if not file.is_file():
        raise SparsifyError(f"`{folder}` has no `config.json` that says what model it is")
    import torch
    import transformers

    try:
        _check_counts(json.loads(file.read_text(encoding="utf-8")), num_tensors)
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        classes: Any = [getattr(transformers, name, None) for name in config.architectures or ()]
        with torch.device("meta"):
            for model_class in classes:
                is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
                # a class of another family would be built in its own default size
                if is_model and isinstance(config, model_class.config_class or ()):
                    return model_class(config)
            return transformers.AutoModel.from_config(config, trust_remote_code=False)
    except Exception as error:  # third parties' code for hundreds of models
        raise SparsifyError(f"transformers cannot build the model of `{file}` ({brief(error)})") from error


def _check_counts(config: object, num_tensors: int) -> None:
    """Raises where a config counts far more layers, experts or labels than there are tensors."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, int) and value > 50_000 + 10 * num_tensors and _COUNTED.search(key):
            raise SparsifyError(f"`{brief(key, 100)}` is {brief(value, 30)} for {num_tensors:,} tensors: it is damaged")
        _check_counts(value, num_tensors)


def _convert(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Layout | str]:
    """Layouts, or names of operations, as transformers' ``convert_and_load_state_dict_in_model`` makes tensors."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
    except ImportError:  # transformers 4 only renames
        from transformers.modeling_utils import VLMS  # type: ignore[attr-defined]

        classes = [cls.__name__.lower() for cls in type(model).__mro__]
        # ``from_pretrained`` maps no other models' names
        mapping = model._checkpoint_conversion_mapping if any(n in cls for cls in classes for n in VLMS) else None
        names = model._get_key_renaming_mapping(list(shapes), mapping)  # by stored name, some of them legacy names
        return {names[key]: Layout.stored(key, shape) for key, shape in shapes.items()}

    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    layouts: dict[str, Layout | str] = {}
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
    for name, converter in converting.items():
        try:
            converted = converter.convert(name, model=model, config=model.config)
            layouts |= {target: value[0] if isinstance(value, list) else value for target, value in converted.items()}
        except Exception:  # an operation that layouts do not have may raise any error
            operations = ", ".join(type(operation).__name__ for operation in converter.operations)
            first, *_ = converter.target_patterns
            layouts |= {name.replace(first, target): operations for target in converter.target_patterns}
    return layouts
