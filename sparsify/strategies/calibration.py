"""Gradients before training, for strategies that choose by them once: summed up over a few backward passes.

In: the model as it is and some data. Out: for every candidate a tensor of its size, all that is kept of the passes:
the sum of the gradients, of their squares (Fisher), or the Hessian times the gradient (GraSP).
The model is left as it was: its modes, its gradients, and, in evaluation mode, its statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsify.errors import SparsifyError
from sparsify.strategies.importance import Fisher, GradientImportance, GraSP

LossFunction = Callable[[nn.Module, Any], Tensor]
Calibration = Iterable[Any] | Callable[[nn.Module], object]


def calibrate(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    importance: GradientImportance,
    calibration: Calibration,
    loss_fn: LossFunction | None = None,
) -> list[Tensor]:
    """Runs the backward passes and sums up what the importance needs of them.

    Args:
        model: runs in evaluation mode.
        parameters: the candidates.
        importance: :class:`Fisher` looks at examples one by one and sums squared gradients, up to ``num_samples`` of
            them; :class:`GraSP` gets H g, of the loss and its gradient summed over the batches; for any other the
            gradients of whole batches are summed.
        calibration: batches (dicts for the model's forward), or a function of the model that runs backward itself,
            once for each example or batch.
        loss_fn: the loss (scalar) of (model, batch); default: ``model(**batch).loss``.

    Returns:
        For each parameter, in its shape, float32 or float64.

    Raises:
        SparsifyError: when these are rows in place of batches, there is no loss, or no gradient reaches a candidate.
    """
    if isinstance(calibration, (Mapping, str)):
        raise SparsifyError(
            f"calibration= is a single {type(calibration).__name__}; expected an iterable of batches, such as a "
            "DataLoader or [batch]."
        )
    if isinstance(importance, GraSP):
        totals = _hessian_gradient_product(model, parameters, calibration, loss_fn or _loss_of_model)
    else:
        totals = _sum_of_gradients(model, parameters, importance, calibration, loss_fn or _loss_of_model)
    if not any(total.any() for total in totals):
        raise SparsifyError(
            "the calibration gave no candidate a gradient; expected batches that the model makes a loss of, "
            "or a function of the model that calls backward()."
        )
    return totals


def _sum_of_gradients(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    importance: GradientImportance,
    calibration: Calibration,
    loss_fn: LossFunction,
) -> list[Tensor]:
    totals = _zeros_like(parameters)
    examples = importance.num_samples if isinstance(importance, Fisher) else None
    with (
        _progress(examples) as bar,
        _as_it_was(model),
        _sum_up(parameters, totals, squared=examples is not None, done=bar.update),
        torch.enable_grad(),
    ):
        if callable(calibration):
            calibration(model)
        else:
            _run_batches(model, calibration, loss_fn, examples)
    return totals


def _hessian_gradient_product(
    model: nn.Module, parameters: Sequence[nn.Parameter], calibration: Calibration, loss_fn: LossFunction
) -> list[Tensor]:
    """H g with H and g those of the sum of the batches' losses: twice through the batches, one graph at a time.

    H is linear in the loss, so H g is the sum over batches of the gradient of (gradient of the batch) . g, with the
    whole g of the first round held constant.
    """
    if callable(calibration):
        raise SparsifyError(
            f"{GraSP()} got a function as its calibration, but has to differentiate each loss twice; expected an "
            "iterable of batches, with loss_fn= where the loss is not model(**batch).loss."
        )
    device = next(model.parameters()).device
    batches = list(calibration)
    gradient, product = _zeros_like(parameters), _zeros_like(parameters)
    # the fused attention kernels have no second derivative, plain matrix products do
    with _progress(None) as bar, _as_it_was(model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        for batch in batches:
            _add(gradient, _gradients(loss_fn(model, _to(batch, device)), parameters))
            bar.update(1)
        for batch in batches:
            grads = _gradients(loss_fn(model, _to(batch, device)), parameters, create_graph=True)
            along = sum((grad.to(g.dtype) * g).sum() for grad, g in zip(grads, gradient, strict=True) if grad.grad_fn)
            if isinstance(along, Tensor):
                _add(product, _gradients(along, parameters))
            bar.update(1)
    return product


def _gradients(loss: Tensor, parameters: Sequence[nn.Parameter], *, create_graph: bool = False) -> tuple[Tensor, ...]:
    """The gradient of every parameter, zeros where the loss does not depend on it."""
    return torch.autograd.grad(loss, parameters, create_graph=create_graph, materialize_grads=True)


def _add(totals: list[Tensor], more: Sequence[Tensor]) -> None:
    for total, part in zip(totals, more, strict=True):
        total += part.detach().to(total.dtype)


def _zeros_like(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]


def _run_batches(model: nn.Module, batches: Iterable[Any], loss_fn: LossFunction, examples: int | None) -> None:
    device = next(model.parameters()).device
    left = examples
    for batch in batches:
        batch = _to(batch, device)
        for part in [batch] if left is None else _examples(batch)[:left]:
            loss_fn(model, part).backward()
            left = None if left is None else left - 1
        if left == 0:
            return


def _loss_of_model(model: nn.Module, batch: Any) -> Tensor:
    if not isinstance(batch, Mapping):
        raise SparsifyError(
            f"a calibration batch is a {type(batch).__name__}; expected a dict for model(**batch), or pass loss_fn=."
        )
    try:
        output = model(**batch)
    except Exception as error:
        if not _is_row(batch):
            raise
        values = ", ".join(f"`{name}` is {_described(value)}" for name, value in batch.items())
        raise SparsifyError(
            f"calibration= got single rows of a dataset, and expects batches of tensors: {values}. Pass a DataLoader, "
            "such as DataLoader(dataset, batch_size=8, collate_fn=DataCollatorWithPadding(tokenizer))."
        ) from error
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None or loss.numel() != 1:
        raise SparsifyError(
            f"{type(model).__name__} made no loss of a calibration batch with {', '.join(map(str, batch))}; "
            "put labels into it, or pass loss_fn=."
        )
    return loss


def _is_row(batch: Mapping[str, Any]) -> bool:
    """Whether a batch that the model failed on looks like one row of a dataset."""
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    tokens, labels = tensors.get("input_ids"), tensors.get("labels", tensors.get("label"))
    return not tensors or (tokens is not None and tokens.dim() < 2) or (labels is not None and not labels.dim())


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _examples(batch: Any) -> list[Any]:
    """A batch as batches of one; what is no tensor of the batch's length goes along as it is."""
    if not isinstance(batch, Mapping):
        raise SparsifyError(
            f"a calibration batch is a {type(batch).__name__}; expected a dict of tensors, to be cut into single "
            "examples, or a function of the model that runs backward for each of them."
        )
    sizes = [value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()]
    size = sizes[0] if sizes else 1

    def part(value: Any, i: int) -> Any:
        return value[i : i + 1] if isinstance(value, Tensor) and value.dim() and value.shape[0] == size else value

    return [{key: part(value, i) for key, value in batch.items()} for i in range(size)]


def _to(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, Mapping):
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    return batch


@contextmanager
def _sum_up(
    parameters: Sequence[nn.Parameter], totals: list[Tensor], *, squared: bool, done: Callable[[int], object]
) -> Iterator[None]:
    """Takes every gradient as soon as it is there, so that never all of them are."""
    passes = [0] * len(parameters)  # that reached each parameter; the largest number is that of all passes so far
    seen = 0

    def take(index: int, parameter: Tensor) -> None:
        nonlocal seen
        grad, parameter.grad = parameter.grad, None
        assert grad is not None
        grad = (grad.to_dense() if grad.is_sparse else grad).to(totals[index].dtype)
        totals[index] += grad.square() if squared else grad
        passes[index] += 1
        if passes[index] > seen:
            seen = passes[index]
            done(1)

    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda p, index=index: take(index, p))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes and gradients are those of before."""
    modes = {module: module.training for module in model.modules()}
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    model.eval()
    for parameter in grads:
        parameter.grad = None
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for parameter, grad in grads.items():
            parameter.grad = grad


def _progress(examples: int | None) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=examples, desc="calibrating", unit="example" if examples else "batch", leave=False)
