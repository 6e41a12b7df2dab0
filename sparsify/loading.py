"""Loads a base and puts a delta onto it, in one call.

The delta's record is not trusted: a class is looked up in transformers by name, of a config only the labels are taken.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.adapters.extensions import check_rebuilt, rebuild
from sparsify.common.names import base_name, input_table, named_tensors
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.entries import DTYPES, StrPath
from sparsify.delta.format import FILE_NAME
from sparsify.delta.merge import recorded_labels
from sparsify.delta.quantized_delta import PACKED_FOLDER
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import BaseMismatchError, SparsifyError, brief

# arguments of from_pretrained that SparseDelta.load shares, and those that locate the base
_SHARED_WITH_HUB = ("token", "cache_dir", "local_files_only")
_OF_THE_BASE = (*_SHARED_WITH_HUB, "revision", "subfolder", "force_download", "proxies", "gguf_file")
_PEFT_REPLACED = "original_module"  # in names of tensors that PEFT replaces by those of modules_to_save
_LOAD_REPORTS = ("LOAD REPORT", "newly initialized", "Some weights of")  # transformers 5, and 4


def load_model(
    base: StrPath | None, delta: SparseDelta | StrPath, *, model_class: Any = None, **kwargs: Any
) -> nn.Module:
    """Loads a base with transformers and puts a delta onto it.

    The class, the labels, the number of tokens, and LoRA or other adapters are those that were trained. A tensor that
    neither the base nor the delta has is an error, never initialised at random. The delta's hashes check the base.

    Args:
        base: the base's id on the hub, or a folder; ``None`` for the recorded one. The recorded base is loaded in the
            recorded revision, unless ``revision`` is given.
        delta: a delta, its path, or the id of its repository on the hub, in its main branch; for another revision give
            ``SparseDelta.load(repo, revision=...)``.
        model_class: class with ``from_pretrained``, such as ``AutoModelForCausalLM`` or your own; by default the
            recorded class, if it is one of transformers'.
        kwargs: for ``from_pretrained``: ``device_map``, ``attn_implementation``, ``token``, ... ``dtype`` is by default
            that of the base in training; in another one the base cannot be checked.

    Returns:
        The model in eval mode.

    Raises:
        BaseMismatchError: when the base is not the one that the delta was trained on.
        SparsifyError: when the base or the delta cannot be loaded, or the class is unknown.

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
    check_rebuilt(delta.config)
    recorded, revision = delta.config.get("base_model_name_or_path"), delta.config.get("base_model_revision")
    name = recorded if base is None else os.fspath(base)
    if not isinstance(name, str) or not name:
        remedy = "pass the base's id on the hub or its folder, `load_model(base, delta)`."
        raise SparsifyError(f"the delta does not record its base, or only a folder of another machine: {remedy}")
    if name == recorded and isinstance(revision, str):
        kwargs.setdefault("revision", revision)
    if os.path.isfile(os.path.join(name, FILE_NAME)) and os.path.isdir(packed := os.path.join(name, PACKED_FOLDER)):
        name = packed  # as save_pretrained() wrote a quantized model in training
    if model_class is None:
        model_class = _recorded_class(delta.config.get("architecture"))
        _check_family(model_class, name, kwargs)
    if "torch_dtype" not in kwargs:
        kwargs.setdefault("dtype", _trained_dtype(delta))
    return delta.apply(_from_pretrained(model_class, name, delta, kwargs))


def _check_arguments(base: object, delta: object, model_class: Any) -> None:
    if isinstance(base, nn.Module):
        kind = type(base).__name__
        raise SparsifyError(f"`load_model` loads the base, and got a {kind} that is loaded: use `delta.apply(model)`.")
    if isinstance(delta, DeltaSum):
        raise SparsifyError("a sum of deltas has no values without its base: give `load_model(base, delta.on(base))`.")
    if model_class is not None and not hasattr(model_class, "from_pretrained"):
        expected = "expected a class with `from_pretrained`; otherwise `delta.apply(SentenceTransformer(base))`, say."
        raise SparsifyError(f"model_class={model_class!r:.100}; {expected}")


def _recorded_class(name: object) -> Any:
    import transformers

    remedy = "pass `model_class=...`, such as AutoModelForSequenceClassification, or the class it was trained in."
    if name is None:
        raise SparsifyError(f"the delta does not record which class it was trained in: {remedy}")
    found, base_class = getattr(transformers, str(name), None), transformers.PreTrainedModel
    if not isinstance(found, type) or not issubclass(found, base_class) or found is base_class:
        raise SparsifyError(f"it was trained in {name!r:.100}, which is no model class of transformers: {remedy}")
    return found


def _check_family(model_class: Any, name: str, kwargs: Mapping[str, Any]) -> None:
    """Raises where transformers would build a class of another family than the base's, in that family's size."""
    from transformers import CONFIG_MAPPING, PretrainedConfig

    if "config" in kwargs:
        return
    try:
        found, _ = PretrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in _OF_THE_BASE if key in kwargs})
    except Exception:  # `from_pretrained` fails with the same error and a better message
        return
    parts = [found, *found.values()] if isinstance(found, dict) else []  # of a composite model, too
    families = [part["model_type"] for part in parts if isinstance(part, dict) and part.get("model_type")]
    if families and families[0] in CONFIG_MAPPING:  # parts whose family the file does not name
        parts = CONFIG_MAPPING[families[0]].sub_configs.values()  # AutoConfig is of no family
        families += [part.model_type for part in parts if hasattr(part, "model_type")]
    if families and getattr(model_class.config_class, "model_type", None) not in families:
        family = f"the base `{brief(name)}` is of another family of models ({brief(found.get('model_type'))})"
        remedy = "pass the base that the delta was trained on, or `model_class=...` if this is the one."
        raise SparsifyError(f"the delta was trained in {model_class.__name__}, and {family}: {remedy}")


def _trained_dtype(delta: SparseDelta) -> torch.dtype | str:
    """The narrowest dtype that the base was in; a model keeps wider tensors wider by itself."""
    # not a quantized base's, whose dtype is that of its values dequantized
    dtypes = {part.dtype for part in delta.tensors.values() if part.quantization is None}
    recorded = delta.config.get("base_dtypes")
    if not dtypes and isinstance(recorded, list):
        dtypes = {dtype for dtype in DTYPES.values() if str(dtype).removeprefix("torch.") in recorded}
    return min(dtypes, key=lambda dtype: (dtype.itemsize, str(dtype)), default="auto")


def _from_pretrained(model_class: Any, name: str, delta: SparseDelta, kwargs: dict[str, Any]) -> nn.Module:
    """Loads the base in the class that was trained; raises where neither it nor the delta has one of its tensors."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_no_load_report)
    try:
        labels = {} if "config" in kwargs else recorded_labels(delta.config, delta.whole)
        options = {"ignore_mismatched_sizes": True, **labels, **kwargs}
        model, info = model_class.from_pretrained(name, **options, output_loading_info=True)
    except Exception as error:  # third parties' code for hundreds of models
        what = f"{getattr(model_class, '__name__', model_class)} ({type(error).__name__}: {brief(error)})"
        remedy = "check base and arguments (the base's id on the hub or its folder), or pass `model_class=...`."
        raise SparsifyError(f"transformers cannot load the base `{brief(name)}` as {what}: {remedy}") from error
    finally:
        logger.removeFilter(_is_no_load_report)
    resized, tensors = _resize(model, delta.whole), named_tensors(model)
    keys = (key if isinstance(key, str) else key[0] for key in (*info["missing_keys"], *info["mismatched_keys"]))
    missing = {key: tensors[key] for key in keys if key in tensors} | resized
    shapes = {name: tuple(tensor.shape) for name, tensor in delta.whole.items()}
    model = rebuild(model, delta.config, shapes).eval()
    tensors = named_tensors(model)
    settled = {id(tensors[name]) for name in shapes if name in tensors}
    settled |= {id(tensor) for name, tensor in tensors.items() if _PEFT_REPLACED in name.split(".")}
    if lacking := sorted(name for name, tensor in missing.items() if id(tensor) not in settled):
        problem = f"tensor `{lacking[0]}` ({len(lacking)} in all) is neither in the base `{name}`, in this shape, nor"
        remedy = "pass the base that the delta was trained on, or train with such modules in modules_to_save=[...]."
        raise BaseMismatchError(f"{problem} in the delta, and would have random values: {remedy}")
    return model


def _resize(model: Any, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Gives the base as many tokens as the delta's input embeddings have; returns the parameters of the new size."""
    table, before = input_table(model), {name: tensor.shape for name, tensor in named_tensors(model).items()}
    shapes = {base_name(name): tensor.shape for name, tensor in whole.items()}
    found = [shapes[name] for name, tensor in named_tensors(model).items() if tensor is table and name in shapes]
    if table is None or not found or found[0] == table.shape:
        return {}
    model.resize_token_embeddings(found[0][0], mean_resizing=False)
    return {name: p for name, p in model.named_parameters() if p.shape != before.get(name)}


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in _LOAD_REPORTS)
