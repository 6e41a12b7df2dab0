"""From a base's name and a delta to the model: one call.

In: the base's name, and a delta with what it recorded about the model it was trained in. Out: the model, in eval mode,
with the trained values. What a delta records is taken for what it says, not for what to run: a class is looked up in
transformers by name, and of the model's config only the labels are taken.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.algebra import DeltaSum
from sparsify.delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError
from sparsify.extensions import extend
from sparsify.names import named_tensors

# Arguments of from_pretrained that a delta's load has, too.
_SHARED_WITH_HUB = ("token", "cache_dir", "local_files_only")
PEFT_REPLACED = "original_module"  # the part of a name under which PEFT keeps what modules_to_save stand in for
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
    model_class = model_class if model_class is not None else _recorded_class(delta.config.get("architecture"))
    name, revision = _find_base(base, delta.config)
    if revision is not None:
        kwargs.setdefault("revision", revision)
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
    of_entries = {tensor.dtype for tensor in delta.tensors.values() if tensor.drawn is None}
    recorded = delta.config.get("base_dtypes")
    if not of_entries and isinstance(recorded, list):
        of_entries = {getattr(torch, name) for name in recorded if name in _BASE_DTYPES}
    of_whole = {tensor.dtype for tensor in delta.whole.values() if tensor.is_floating_point()}
    return min(of_entries or of_whole, key=lambda dtype: (dtype.itemsize, str(dtype)), default="auto")


def _from_pretrained(model_class: Any, name: str, delta: SparseDelta, kwargs: dict[str, Any]) -> nn.Module:
    """The base in the class that was trained; raises where neither it nor the delta has one of its tensors."""
    from huggingface_hub.errors import HFValidationError  # what transformers 4 says of a folder that is not there

    labels = {} if "config" in kwargs else _head_config(delta)
    try:
        with _load_report_held_back():
            model, info = model_class.from_pretrained(
                name, **{"ignore_mismatched_sizes": True, **labels, **kwargs}, output_loading_info=True
            )
    except (OSError, HFValidationError) as error:
        reason = " ".join(str(error).split()).rstrip(".")[:300]
        raise SparsifyError(
            f"the base `{name}` cannot be loaded ({reason}): pass its id on the hub or its folder, "
            "`load_model(base, delta)`."
        ) from error
    drawn = _drawn_at_random(model, info)
    shapes = {name: tuple(tensor.shape) for name, tensor in delta.whole.items()}
    shapes |= {name: tensor.shape for name, tensor in delta.tensors.items() if tensor.drawn is not None}
    model = extend(model, delta.config, shapes).eval()
    _check_complete(model, drawn, shapes, name)
    return model


def _head_config(delta: SparseDelta) -> dict[str, Any]:
    """The recorded labels as arguments of ``from_pretrained``.

    The number of labels decides how much memory a head takes, so it is believed only as far as the delta brings the
    head along: a tensor with values (an empty one may claim any shape) that has as many rows, say.
    """
    recorded = delta.config.get("model_config")
    if not isinstance(recorded, dict):
        return {}
    number, labels, problem = (recorded.get(key) for key in ("num_labels", "id2label", "problem_type"))
    if not isinstance(number, int) or not any(t.numel() and number in t.shape for t in delta.whole.values()):
        return {}
    given = labels if isinstance(labels, dict) else {}
    names = {index: str(given.get(str(index), f"LABEL_{index}")) for index in range(number)}
    head: dict[str, Any] = {"id2label": names, "label2id": {label: index for index, label in names.items()}}
    return {**head, "problem_type": problem} if isinstance(problem, str) else head


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
