"""From a base's name and a delta to the model: one call.

In: the base's name, and a delta with what it recorded about the model it was trained in. Out: the model, in eval mode,
with the trained values. What a delta records is taken for what it says, not for what to run: a class is looked up in
transformers by name, and of the model's config only the labels are taken.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.adapters.extensions import extend
from sparsify.common.names import named_tensors
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError, brief

# Arguments of from_pretrained that a delta's load has, too, and those that say where the base is.
_SHARED_WITH_HUB = ("token", "cache_dir", "local_files_only")
_OF_THE_BASE = (*_SHARED_WITH_HUB, "revision", "subfolder", "force_download", "proxies", "gguf_file")
PEFT_REPLACED = "original_module"  # the part of a name under which PEFT keeps what modules_to_save stand in for
_COPY = re.compile(r"\.modules_to_save\.[^.]+(?=\.)")  # what PEFT puts into the names of what it trains whole
_BASE_DTYPES = ("float64", "float32", "bfloat16", "float16")
_LOAD_REPORTS = ("LOAD REPORT", "newly initialized", "Some weights of")  # transformers 5, and 4


def load_model(
    base: str | os.PathLike[str] | None,
    delta: SparseDelta | str | os.PathLike[str],
    *,
    model_class: Any = None,
    **kwargs: Any,
) -> nn.Module:
    """Loads a base with transformers and puts a delta onto it.

    The class, the number and names of the labels, and LoRA or other adapters are those that were trained. A tensor that
    neither the base nor the delta has is an error, not a random one. The base's values are checked by the delta's
    hashes.

    Args:
        base: the base's id on the hub, or a folder; ``None`` for the one that the delta records. Where it is the
            recorded one, its revision is the recorded one, too, unless ``revision`` is given.
        delta: a delta, the path of one, or the id of its repository on the hub. For another revision of the
            repository than its main branch, give ``SparseDelta.load(repo, revision=...)``.
        model_class: what to call ``from_pretrained`` on, such as ``AutoModelForCausalLM`` or a class of your own; by
            default the recorded class, if it is one of transformers'.
        kwargs: for ``from_pretrained``: ``device_map``, ``attn_implementation``, ``token``, ... ``dtype`` is that of
            the base in training, unless given; in another one the base cannot be checked.

    Returns:
        The model in eval mode.

    Raises:
        BaseMismatchError: when the base is not the one that the delta was trained on.
        SparsifyError: when the base or the delta is not to be had, or the class is unknown.

    Example:
        >>> import tempfile
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from sparsify import SparseDelta
        >>> sizes = dict(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     BertForSequenceClassification(BertConfig(**sizes)).save_pretrained(folder)
        ...     model = load_model(folder, SparseDelta({}, config={"architecture": "BertForSequenceClassification"}))
        >>> type(model).__name__, model.training
        ('BertForSequenceClassification', False)
    """
    _check_arguments(base, delta, model_class)
    if not isinstance(delta, SparseDelta):
        delta = SparseDelta.load(delta, **{key: kwargs[key] for key in _SHARED_WITH_HUB if key in kwargs})
    name, revision = _find_base(base, delta.config)
    if revision is not None:
        kwargs.setdefault("revision", revision)
    if model_class is None:
        model_class = _recorded_class(delta.config.get("architecture"))
        _check_family(model_class, name, kwargs)
    if "torch_dtype" not in kwargs:
        kwargs.setdefault("dtype", _trained_dtype(delta))
    model = _from_pretrained(model_class, name, delta, kwargs)
    return delta.apply(model)


def _check_arguments(base: object, delta: object, model_class: Any) -> None:
    """Raises for what looks like a base, a delta or a class, and is none yet, or no longer."""
    if isinstance(base, nn.Module):
        raise SparsifyError(
            f"`load_model` loads the base, and got a {type(base).__name__} that is loaded: use `delta.apply(model)`."
        )
    if isinstance(delta, DeltaSum):
        raise SparsifyError(
            "a sum of deltas waits for its base: take its value first, `load_model(base, delta.on(base))`, with the "
            "base as a folder."
        )
    if model_class is not None and not hasattr(model_class, "from_pretrained"):
        raise SparsifyError(
            f"model_class={model_class!r:.100}; expected a class with `from_pretrained`, such as AutoModelForCausalLM."
        )


def _recorded_class(name: object) -> Any:
    """The class of transformers that a delta names."""
    import transformers

    remedy = "pass `model_class=...`, such as AutoModelForSequenceClassification, or the class it was trained in."
    if name is None:
        raise SparsifyError(f"the delta does not record which class it was trained in: {remedy}")
    found = getattr(transformers, name, None) if isinstance(name, str) and name.isidentifier() else None
    base_class = transformers.PreTrainedModel
    if not isinstance(found, type) or not issubclass(found, base_class) or found is base_class:
        raise SparsifyError(
            f"the delta was trained in {name!r:.100}, which is no model class of transformers: {remedy}"
        )
    return found


def _check_family(model_class: Any, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises where the class that a delta names is of another family of models than the base.

    transformers would build it all the same, in that family's own default size, which for some is tens of gigabytes.
    """
    from transformers import PretrainedConfig

    if "config" in kwargs:
        return
    try:
        found, _ = PretrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in _OF_THE_BASE if key in kwargs})
    except Exception:  # whatever it is, `from_pretrained` meets it too, and says more
        return
    own = model_class.config_class
    if isinstance(found, dict) and (own is None or not _is_of(own, found)):
        raise SparsifyError(
            f"the delta was trained in {model_class.__name__}, and the base `{brief(name)}` is of another family of "
            f"models ({brief(found.get('model_type'))}): pass the base that the delta was trained on, or "
            "`model_class=...` if this is the one."
        )


def _is_of(config_class: Any, found: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` is of the family of a config's class, or has a part that is."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    family = found.get("model_type")
    if family is None:  # as it was before 2020: then its settings have to be those of the class
        of_all = set(PretrainedConfig().to_dict())
        return bool(set(found) - of_all) and set(found) - of_all <= set(config_class().to_dict())
    parts = CONFIG_MAPPING[family].sub_configs.values() if family in CONFIG_MAPPING else ()
    named = [found, *(value for value in found.values() if isinstance(value, dict))]
    return config_class in parts or any(part.get("model_type") == config_class.model_type for part in named)


def _find_base(base: str | os.PathLike[str] | None, config: Mapping[str, Any]) -> tuple[str, str | None]:
    """The base's name, and the recorded revision where it is the recorded base."""
    recorded, revision = config.get("base_model_name_or_path"), config.get("base_model_revision")
    name = recorded if base is None else os.fspath(base)
    if not isinstance(name, str) or not name:
        raise SparsifyError(
            "the delta does not record its base, or only a folder of the machine it was trained on: pass the base's id "
            "on the hub or its folder, `load_model(base, delta)`."
        )
    return name, revision if name == recorded and isinstance(revision, str) else None


def _trained_dtype(delta: SparseDelta) -> torch.dtype | str:
    """The dtype that the base was in; a model that keeps some tensors wider does so by itself."""
    of_entries = {tensor.dtype for tensor in delta.tensors.values() if tensor.initializer is None}
    recorded = delta.config.get("base_dtypes")
    if not of_entries and isinstance(recorded, list):
        of_entries = {getattr(torch, name) for name in recorded if name in _BASE_DTYPES}
    of_whole = {tensor.dtype for tensor in delta.whole.values() if tensor.is_floating_point()}
    return min(of_entries or of_whole, key=lambda dtype: (dtype.itemsize, str(dtype)), default="auto")


def _from_pretrained(model_class: Any, name: str, delta: SparseDelta, kwargs: dict[str, Any]) -> nn.Module:
    """The base in the class that was trained; raises where neither it nor the delta has one of its tensors."""
    from huggingface_hub.errors import HFValidationError  # what transformers 4 says of a folder that is not there

    try:
        labels = {} if "config" in kwargs else _head_config(delta, model_class, name, kwargs)
        with _load_report_held_back():
            model, info = model_class.from_pretrained(
                name, **{"ignore_mismatched_sizes": True, **labels, **kwargs}, output_loading_info=True
            )
    except (OSError, HFValidationError) as error:
        raise SparsifyError(
            f"the base `{brief(name)}` cannot be loaded ({brief(error)}): pass its id on the hub or its folder, "
            "`load_model(base, delta)`."
        ) from error
    except Exception as error:  # third parties' code for hundreds of models, which a delta can name
        raise SparsifyError(
            f"transformers cannot load the base `{brief(name)}` as {getattr(model_class, '__name__', model_class)} "
            f"({type(error).__name__}: {brief(error)}): check base and arguments, or pass `model_class=...`."
        ) from error
    drawn = _drawn_at_random(model, info)
    shapes = {name: tuple(tensor.shape) for name, tensor in delta.whole.items()}
    shapes |= {name: tensor.shape for name, tensor in delta.tensors.items() if tensor.initializer is not None}
    model = extend(model, delta.config, shapes).eval()
    _check_complete(model, drawn, shapes, name)
    return model


def _head_config(delta: SparseDelta, model_class: Any, name: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The recorded labels as arguments of ``from_pretrained``.

    The number of labels decides how much memory a head takes, so it is believed only as far as the delta brings the
    head along: all tensors whose shape it changes, with their values.
    """
    recorded = delta.config.get("model_config")
    if not isinstance(recorded, dict):
        return {}
    number, labels, problem = (recorded.get(key) for key in ("num_labels", "id2label", "problem_type"))
    whole = [tensor for tensor in delta.whole.values() if tensor.numel() and tensor.is_floating_point()]
    if isinstance(number, bool) or not isinstance(number, int) or not any(number in tensor.shape for tensor in whole):
        return {}
    if not _brings_head(delta, number, model_class, name, kwargs):
        return {}
    given = labels if isinstance(labels, dict) else {}
    names = {index: str(given.get(str(index), f"LABEL_{index}")) for index in range(number)}
    head: dict[str, Any] = {"id2label": names, "label2id": {label: index for index, label in names.items()}}
    return {**head, "problem_type": problem} if isinstance(problem, str) else head


def _brings_head(delta: SparseDelta, number: int, model_class: Any, name: str, kwargs: Mapping[str, Any]) -> bool:
    """Whether a delta has every tensor whose size follows from the number of labels, in that size, and one's values.

    Asked of the model without its weights, built for the base's own number of labels and for one more: what grows is
    the head. A drawn tensor may claim any size, so a head is not believed on the word of such alone.
    """
    import transformers

    if not isinstance(model_class, type) or not issubclass(model_class, transformers.PreTrainedModel):
        return True  # a class of the user's choice, such as an Auto class, is not built to find out
    config_class: Any = model_class.config_class
    config = config_class.from_pretrained(name, **{key: kwargs[key] for key in _OF_THE_BASE if key in kwargs})
    own = max(config.num_labels, 1)
    shapes = []
    for labels in (own, own + 1):
        config.num_labels = labels
        with torch.device("meta"):
            model: Any = model_class(config)
        shapes.append({name: tuple(tensor.shape) for name, tensor in named_tensors(model).items()})
    pairs = {name: (shapes[0].get(name, ()), shape) for name, shape in shapes[1].items()}
    head = {
        name: tuple(size + (more - size) * (number - own) for size, more in zip(*pair, strict=False))
        for name, pair in pairs.items()
        if pair[0] != pair[1]
    }
    stored = {_COPY.sub("", name): tuple(tensor.shape) for name, tensor in delta.whole.items()}
    drawn = {_COPY.sub("", name): part.shape for name, part in delta.tensors.items() if part.initializer is not None}
    found = {**drawn, **stored}
    return not head.keys().isdisjoint(stored) and all(found.get(name) == shape for name, shape in head.items())


def _drawn_at_random(model: nn.Module, info: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that the base does not have, by name: nobody has trained their values."""
    tensors = named_tensors(model)
    names = (key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"]))
    return {name: tensors[name] for name in names if name in tensors}


def _check_complete(model: nn.Module, drawn: Mapping[str, Tensor], brought: Iterable[str], base: str) -> None:
    """Raises where a tensor is drawn at random and stays so: nobody has trained such a model."""
    tensors = named_tensors(model)
    settled = {id(tensors[name]) for name in brought if name in tensors}
    settled |= {id(tensor) for name, tensor in tensors.items() if PEFT_REPLACED in name.split(".")}
    if lacking := sorted(name for name, tensor in drawn.items() if id(tensor) not in settled):
        raise BaseMismatchError(
            f"tensor `{lacking[0]}` ({len(lacking)} in all) is neither in the base `{base}`, in this shape, nor in the "
            "delta, and would be drawn at random: pass the base that the delta was trained on, or train with such "
            "modules in modules_to_save=[...]."
        )


@contextmanager
def _load_report_held_back() -> Iterator[None]:
    """Holds back transformers' report of what a checkpoint lacks, which the delta brings; shows it on failure."""
    logger, held = logging.getLogger("transformers.modeling_utils"), []

    def hold(record: logging.LogRecord) -> bool:
        is_report = any(words in record.getMessage() for words in _LOAD_REPORTS)
        if is_report:
            held.append(record)
        return not is_report

    logger.addFilter(hold)
    try:
        yield
    except BaseException:
        logger.removeFilter(hold)
        for record in held:
            logger.handle(record)
        raise
    finally:
        logger.removeFilter(hold)
