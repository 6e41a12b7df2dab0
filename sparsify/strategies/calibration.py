"""Calibration: gradients summed over a few backward passes before training; the model is unchanged afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from sparsify.core.importance import Importance
from sparsify.errors import SparsifyError
from sparsify.strategies.importance import Fisher

LossFunction = Callable[[nn.Module, Any], Tensor]
Calibration = Iterable[Any] | Callable[[nn.Module], object]


def calibrate(
    model: nn.Module, parameters: Sequence[nn.Parameter], importance: Importance, calibration: Calibration,
    loss_fn: LossFunction | None = None,
) -> list[Tensor]:  # fmt: skip
    """Sums each parameter's gradient over batches, at least in float32; for :class:`Fisher`, squares over examples."""
    if isinstance(calibration, (Mapping, str)):
        raise SparsifyError(f"calibration= is a single {type(calibration).__name__}; expected several, as in [batch].")
    number = importance.num_samples if isinstance(importance, Fisher) else None
    with torch.enable_grad(), _summing(model, parameters, squared=number is not None) as totals:
        if callable(calibration):
            calibration(model)
        else:
            if number is not None:
                calibration = islice((example for batch in calibration for example in _examples(batch)), number)
            devices = [parameter.device for parameter in model.parameters()]
            unit = "batch" if number is None else "example"
            for batch in tqdm(calibration, total=number, unit=unit, desc="calibrating", leave=False):
                if isinstance(batch, Mapping):  # to the first device; a model may be on several
                    away = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.device not in devices}
                    batch = {**batch, **{key: value.to(devices[0]) for key, value in away.items()}}
                (loss_fn or _loss_of_model)(model, batch).backward()
    if not any(total.any() for total in totals):
        raise SparsifyError("the calibration gave no candidate a gradient; pass labels, or what calls backward().")
    return totals


def _loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, Mapping):
        raise SparsifyError(f"a calibration batch is a {type(batch).__name__}; expected a dict, or loss_fn=.")
    try:
        output = model(**batch)
    except Exception as error:
        dims = {name: value.dim() for name, value in batch.items() if isinstance(value, Tensor)}
        if dims and dims.get("input_ids", 2) > 1 and dims.get("labels", dims.get("label", 1)) > 0:
            raise  # it does not look like one row of a dataset
        kinds = [f"`{n}` is a {f'Tensor {[*v.shape]}' if n in dims else type(v).__name__}" for n, v in batch.items()]
        raise SparsifyError(
            f"calibration= got single rows of a dataset, and expects batches of tensors: {', '.join(kinds)}. Pass a "
            "DataLoader, such as DataLoader(dataset, batch_size=8, collate_fn=DataCollatorWithPadding(tokenizer))."
        ) from error
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None or loss.numel() != 1:
        raise SparsifyError(f"the model made no loss of a batch with {[*batch]}; put labels into it, or pass loss_fn=.")
    return loss


def _examples(batch: Any) -> list[Any]:
    """Splits a batch into batches of one; values other than tensors of the batch's length are in each of them."""
    if not isinstance(batch, Mapping):
        raise SparsifyError(
            f"a calibration batch is a {type(batch).__name__}; expected a dict of tensors, or a function."
        )
    size = next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)
    cut = [key for key, value in batch.items() if isinstance(value, Tensor) and value.dim() and len(value) == size]
    return [{key: v[i : i + 1] if key in cut else v for key, v in batch.items()} for i in range(size)]


@contextmanager
def _summing(model: nn.Module, parameters: Sequence[nn.Parameter], *, squared: bool) -> Iterator[list[Tensor]]:
    """Sums to which each gradient, or its square, is added as soon as it is computed, and then freed; in eval mode."""
    totals = {p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters}

    def add(parameter: Any) -> None:
        grad, parameter.grad = parameter.grad, None
        grad = (grad.to_dense() if grad.is_sparse else grad).to(totals[parameter].dtype)
        totals[parameter] += grad.square() if squared else grad

    modes = {module: module.training for module in model.modules()}
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in parameters]
    try:
        model.eval()
        model.zero_grad()
        yield list(totals.values())
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
        for parameter, grad in grads.items():
            parameter.grad = grad
