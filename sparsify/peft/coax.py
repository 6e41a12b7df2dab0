"""What PEFT has no place for: a method from outside, by a member of its enum ``PeftType``, and plain deltas.

A delta's own folder or repository has none of an adapter's two files. PEFT looks for them first, and what it finds, or
raises for anything else, is as without this: two functions and a class that its modules import are replaced there by
ones that call the originals. None of its classes is changed.
"""

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import peft
from huggingface_hub import hf_hub_download
from peft import PeftConfig, load_peft_weights

from sparsify.delta import format as delta_format
from sparsify.delta.peft_files import KEY, PEFT_TYPE, PREFIX, from_blob, settings_of, to_blob
from sparsify.errors import SparsifyError

if tuple(map(int, peft.__version__.split(".")[:2])) < (0, 21):  # a method cannot choose what is saved
    problem = f"sparsify.peft needs PEFT 0.21 or later, and this is {peft.__version__}"
    raise SparsifyError(f"{problem}: `pip install -U peft`, or call sparsify() on the model itself.")

_types: Any = peft.PeftType
if PEFT_TYPE not in _types.__members__:  # adds it to the enum of strings, as its body would
    _member = str.__new__(_types, PEFT_TYPE)
    _member._name_ = _member._value_ = PEFT_TYPE
    type.__setattr__(_types, PEFT_TYPE, _member)
    _types._member_map_[PEFT_TYPE] = _types._value2member_map_[PEFT_TYPE] = _member
    _types._member_names_.append(PEFT_TYPE)


def _or_delta(function: Callable[..., Any], make: Callable[[Path], Any]) -> Any:
    """A function of PEFT that reads a file of an adapter; where it raises, it is made of a delta, if one is there."""

    @wraps(function)
    def read(path: Any, *args: Any, **options: Any) -> Any:
        try:
            return function(path, *args, **options)
        except Exception:
            file = Path(path, options.get("subfolder") or "", delta_format.FILE_NAME)
            own = {name: value for name, value in options.items() if name not in ("device", "key_mapping")}
            with suppress(Exception):  # PEFT's error is raised again
                file = file if file.is_file() else Path(hf_hub_download(path, file.name, **own))
            if not file.is_file() or file.with_name(peft.utils.CONFIG_NAME).exists():
                raise
        return make(file)

    return read


def _make_config(file: Path) -> int:
    """Returns the descriptor of an open file, which PEFT closes."""
    config: dict[str, Any] = {}
    with suppress(Exception), file.open("rb") as opened:  # PEFT would hide it; the weights are read next
        config = delta_format.read_header(opened)[1]["config"]
    with tempfile.TemporaryFile() as made:
        made.write(json.dumps(settings_of(config)).encode())
        made.seek(0)
        return os.dup(made.fileno())


def _make_weights(file: Path) -> dict[str, Any]:
    delta = delta_format.read(file)
    delta_format.check_not_extended(delta[2], "an adapter")
    return {KEY: to_blob(*delta)}


_read_weights = _or_delta(load_peft_weights, _make_weights)


@wraps(load_peft_weights)
def _load_weights(*args: Any, **options: Any) -> Any:
    """Reads an adapter, and a delta's dense tensors by themselves, too: PEFT's task classes look for a head there."""
    weights = _read_weights(*args, **options)
    whole = from_blob(weights[KEY].cpu())[1] if KEY in weights else {}
    return {PREFIX + name: tensor for name, tensor in whole.items()} | weights


class _AutoConfig(PeftConfig):
    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        config: Any = PeftConfig.from_pretrained(*args, **kwargs)
        if config.peft_type == PEFT_TYPE and not config.base_model_name_or_path:
            raise SparsifyError(f"`{args[0]}` records no base: give PeftModel.from_pretrained(base, path) one.")
        return config


peft.config.hf_hub_download = _or_delta(hf_hub_download, _make_config)  # type: ignore[attr-defined]
peft.peft_model.load_peft_weights = _load_weights  # type: ignore[attr-defined]
peft.auto.PeftConfig = _AutoConfig  # type: ignore[attr-defined]
