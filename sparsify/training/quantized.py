"""Models with quantized weights: what cannot be done to them, saving, their Trainer, and making ordinary ones of them.

``save_pretrained`` writes, while quantized weights are trained, since nothing can be merged into them:

    base/                          the packed base, as transformers writes it
    sparse_delta.safetensors       what was trained; ``load_model(folder, folder)`` puts it onto that base
    model.safetensors              the trained state, from which the Trainer resumes
    adapter_*                      the delta as an adapter, by which from_pretrained() loads base and delta
"""

import functools
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sparsify.common.names import ENGINE
from sparsify.common.quantized import is_quantized
from sparsify.core.module import masked_tensors
from sparsify.delta import hub
from sparsify.delta.checkpoint.reader import WEIGHTS_NAME
from sparsify.delta.peft_files import write_adapter
from sparsify.delta.quantized_delta import LOSING, PACKED_FOLDER, QUANTIZER, refuse_to_lose
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.strategy import Prune, Strategy
from sparsify.training.plan import STATE
from sparsify.training.state import write_trained_state
from sparsify.training.weights import BaseWeights

SAVE = "save_pretrained"  # attribute of a transformers model


def check_possible(tensors: Sequence[ModelTensor], strategy: Strategy) -> None:
    pruned = isinstance(strategy.selection, Prune)
    for tensor in tensors if pruned or strategy.calibrates else ():
        if tensor.is_quantized or (tensor.is_parallel if pruned else tensor.is_partial):
            kind = f"quantized ({tensor.scheme})" if tensor.is_quantized else "tensor-parallel"
            what = "cannot be pruned" if pruned else "has no dense gradient to calibrate by"
            remedy = "take another strategy, such as id3 or pafi, or leave such layers out with exclude_modules."
            raise SparsifyError(f"`{tensor.name}` is {kind} and {what}; {remedy}")


def check_unchanged(tensors: Sequence[ModelTensor]) -> None:
    if changed := [tensor for tensor in tensors if tensor.is_quantized and bool(tensor.delta.any())]:
        text = f"`{changed[0].name}` and {len(changed) - 1} more trained weights are quantized ({changed[0].scheme}), "
        text += "and cannot be written into. Keep SparseDelta.from_model(model), then call desparsify(model, dequantize"
        raise SparsifyError(f"{text}=True), which makes ordinary linear layers of them; or load the base afresh.")


def give_up_packed(model: nn.Module, weights: Sequence[tuple[ModelTensor, Tensor]]) -> None:
    """Turns quantized layers of a plain model into ``nn.Linear`` with these weights, in the dtype of the others."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point() and not is_quantized(p)]
    for tensor, weight in weights:
        weight, packed = weight.to(dtypes[0] if dtypes else weight.dtype), tensor.parameter
        for module in [each for each in model.modules() if each._parameters.get(tensor.attribute) is packed]:
            module.__class__ = nn.Linear
            module._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            for state in ("quant_state", "state"):  # bitsandbytes keeps scales there
                module.__dict__.pop(state, None)
    quantizer: Any = getattr(model, QUANTIZER, None) if weights else None
    if quantizer is not None and not any(is_quantized(parameter) for parameter in model.parameters()):
        quantizer.remove_quantization_config(model)  # transformers' own, as after its dequantize()
    config: Any = getattr(quantizer, "quantization_config", None)
    if hasattr(config, "llm_int8_skip_modules") and getattr(model, "is_quantized", False):  # bitsandbytes'
        plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}  # as it is to be loaded
        config.llm_int8_skip_modules = sorted(plain | {*(config.llm_int8_skip_modules or ())})


def save_pretrained(model: Any, save_directory: Any, *arguments: Any, **options: Any) -> None:
    """Is ``model.save_pretrained`` of a model in training, with transformers' arguments."""
    engine, save = vars(model).get(ENGINE), functools.partial(type(model).save_pretrained, model)
    if not _is_packed(model) or engine.paused:
        return save(save_directory, *arguments, **options)
    options |= zip(("is_main_process", "state_dict"), arguments, strict=False)
    if options.get("push_to_hub"):
        raise SparsifyError("push_to_hub=True would upload the packed base alone: call model.push_to_hub(repo_id).")
    folder, state_dict, delta = Path(save_directory), options.pop("state_dict", None), engine.exporter(model).delta()
    with BaseWeights(engine.weights, model):
        save(folder / PACKED_FOLDER, **options)
    if options.get("is_main_process", True):
        (folder / "config.json").unlink(missing_ok=True)  # by which the adapter's base would be the folder
        hub.save(folder, *delta)
        write_adapter(folder, delta, str((folder / PACKED_FOLDER).absolute()))
        write_trained_state(engine, model, folder / WEIGHTS_NAME, state_dict)
        text = "trained values cannot be written into quantized weights: the folder that was saved has the packed base "
        text += f'in "{PACKED_FOLDER}" and a delta. load_model(folder, folder) gives the trained model, and so does '
        text += "from_pretrained(folder) where PEFT is installed, sparsify imported and the folder in its place; "
        text += "desparsify(model, dequantize=True), before save_pretrained(), makes an ordinary one."
        warnings.warn(text, stacklevel=2)
    return None


def _is_packed(model: nn.Module) -> bool:
    return ENGINE in vars(model) and any(tensor.is_quantized for tensor in vars(model)[ENGINE].tensors)


# The Trainer refuses a quantized model that is not PEFT's, unless its quantizer says that the model can be trained as
# it is. While a model is sparsified its quantizer is of a class that is derived from its own and says so, and by way of
# which transformers saves and dequantizes, too.
def mark_trainable(model: nn.Module, *, trainable: bool = True) -> None:
    """Makes the Trainer accept a quantized model, and save what it trains, or no more; any other is left alone."""
    vars(model).pop(SAVE, None)
    is_packed = _is_packed(model)
    if trainable and is_packed and hasattr(model, SAVE):
        vars(model)[SAVE] = functools.partial(save_pretrained, model)
    modules = model.modules() if is_packed else [model]
    for quantizer in [vars(module)[QUANTIZER] for module in modules if QUANTIZER in vars(module)]:
        kind: Any = type(quantizer)
        plain_class = kind.__base__ if kind.__module__ == __name__ else kind
        quantizer.__class__ = _trainable_class(plain_class) if trainable else plain_class


@functools.cache
def _trainable_class(plain_class: type) -> type:
    own = {"__module__": __name__, "is_qat_trainable": True, "is_trainable": True}
    own |= dict(zip(LOSING, (_state_dict_and_metadata, refuse_to_lose), strict=True))
    own["__reduce__"] = lambda quantizer: (_rebuild, (plain_class,), vars(quantizer))
    return type(f"Sparsified{plain_class.__name__}", (plain_class,), own)


def _state_dict_and_metadata(quantizer: Any, model: nn.Module, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """As the plain quantizer's, but for what was added to the model, with which torchao's files could not be read."""
    tensors = [tensor for module in model.modules() for tensor in masked_tensors(module).values()]
    if any(tensor.is_quantized and not tensor.collector.paused for tensor in tensors):
        refuse_to_lose()
    plain_class: Any = type(quantizer).__base__
    state_dict, metadata = plain_class.get_state_dict_and_metadata(quantizer, model, *arguments, **options)
    if "tensor_names" in metadata:
        metadata = {name: text for name, text in metadata.items() if name not in STATE}
        metadata["tensor_names"] = json.dumps([n for n in json.loads(metadata["tensor_names"]) if n not in STATE])
    return state_dict, metadata


def _rebuild(plain_class: type) -> Any:
    return object.__new__(_trainable_class(plain_class))
