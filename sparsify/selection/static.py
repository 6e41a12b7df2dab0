"""Entries selected without a training step: by the weights, by a calibration's gradients, or given by the user."""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import plain_name
from sparsify.common.shards import full_values
from sparsify.core.importance import Importance
from sparsify.core.tensor import MaskedTensor
from sparsify.core.topk import BLOCK_ENTRIES, TopK, at_least_float32
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor
from sparsify.strategies.importance import GSNR, SNIP, Fisher, Random
from sparsify.strategies.strategy import Prune, Strategy, divide, share_out

LossFunction = Callable[[nn.Module, Any], Tensor]
Calibration = Iterable[Any] | Callable[[nn.Module], object]


def select_static(
    model: nn.Module, tensors: Sequence[ModelTensor], strategy: Strategy, budget: int, dtype: torch.dtype, seed: int,
    calibration: Calibration | None = None, loss_fn: LossFunction | None = None,
) -> Tensor:  # fmt: skip
    """Selects what ``Static`` or ``Prune`` trains in a plain model: (budget,) int64 global ids, ascending."""
    importance: Any = strategy.importance
    selection: Any = strategy.selection  # Static, or Prune
    whole = [tensor for tensor in tensors if isinstance(selection, Prune) and not selection.removes_from(tensor.shape)]
    ranked = [tensor for tensor in tensors if tensor not in whole and importance.covers(tensor.name)]
    device = tensors[0].parameter.device
    ids = [_candidates(tensor).nonzero().squeeze(1).to(device) + tensor.offset for tensor in whole]
    kept = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *ids])
    _check_budget(ranked, strategy, budget, kept.numel())
    totals: dict[MaskedTensor, Tensor] = {}
    if calibration is not None:
        parameters: Any = [tensor.parameter for tensor in ranked]
        totals = dict(zip(ranked, calibrate(model, parameters, importance, calibration, loss_fn), strict=True))
    groups = divide(budget - kept.numel(), strategy, ranked)
    if selection.allocation == "uniform":
        counts = share_out(groups[0][1], [tensor.num_candidates for tensor in ranked])
        groups = [([tensor], count) for tensor, count in zip(ranked, counts, strict=True)]
    parts = []
    for group, count in groups:
        if count:
            cap = spread_cap([tensor.shape for tensor in group], count) if selection.allocation == "spread" else None
            own_seed = f"{seed}:{group[0].name}"  # or layers of one size would have the same random entries
            found = rank_by_scores(group, importance, TopK(count, dtype, device), own_seed, totals, cap=cap)
            if found.numel() < count:
                raise SparsifyError(_too_few(group, importance, count, found.numel(), cap))
            parts.append(found)
    return torch.cat([kept, *parts]).sort().values


def check_new(tensors: Sequence[MaskedTensor], strategy: Strategy, new: Container[str]) -> None:
    selection = strategy.selection
    if not isinstance(selection, Prune) or selection.pretrained:
        return
    pruned = [tensor.name for tensor in tensors if selection.removes_from(tensor.shape)]
    if old := [name for name in pruned if name not in new]:
        problem = f"{strategy.importance} with {selection} sets every entry that is not selected to zero, and "
        problem += f"{len(old):,} of the {len(pruned):,} matrices to prune are not known to be new, such as `{old[0]}`"
        remedy = "Add adapters or a LoRA first, or name new modules in fresh_modules=[...]. To prune pretrained weights"
        anyway = f"Strategy({strategy.importance}, {replace(selection, pretrained=True)})"
        raise SparsifyError(f"{problem}. {remedy} all the same, pass {anyway}.")


@contextmanager
def pruned(tensors: Sequence[MaskedTensor], selection: Any, ids: Tensor) -> Iterator[None]:
    """Sets what ``Prune`` removes, all entries but these global ids (n,), to zero; undone where the block fails."""
    prunes = [own for own in tensors if isinstance(selection, Prune) and selection.removes_from(own.shape)]
    with uninterrupted() if prunes else nullcontext(), ExitStack() as undo:
        for tensor in prunes:
            weight, indices, removed = tensor.parameter.detach(), ids - tensor.offset, _candidates(tensor)
            undo.callback(weight.copy_, weight.clone())
            removed[indices[(indices >= 0) & (indices < tensor.numel)].to(removed.device)] = False
            weight.masked_fill_(removed.view(tensor.shape), 0)
        yield
        undo.pop_all()


def rank_by_scores(
    tensors: Sequence[MaskedTensor], importance: Importance, topk: TopK, seed: str,
    totals: Mapping[MaskedTensor, Tensor] | None = None, *, masked_only: bool = False, cap: int | None = None,
) -> Tensor:  # fmt: skip
    """Global ids (n,) of the best entries with a finite score, at most ``cap`` of a row or a column of a matrix."""
    ranked = [tensor for tensor in tensors if importance.covers(tensor.name) and tensor.rows is None]
    excluded = [each.not_candidates.sort().values if masked_only else each.never_candidates for each in ranked]
    if isinstance(importance, Random):
        return draw(ranked, excluded, topk.size, seed).to(topk.threshold.device)
    for tensor, own in zip(ranked, excluded, strict=True):
        scores = _scores(tensor, importance, totals[tensor] if totals else None)
        if cap is not None and len(tensor.shape) > 1:
            whole = torch.cat([*scores]).index_fill_(0, own, -torch.inf)
            scores = in_blocks(spread(whole.view(tensor.shape[0], -1), cap))
        offer_scores(topk, scores, tensor.offset, own)
    return topk.winners().ids


def draw(tensors: Sequence[MaskedTensor], excluded: Sequence[Tensor], number: int, seed: str) -> Tensor:
    """Global ids (n,), at most ``number``, drawn uniformly, of all entries but those excluded, in a random order.

    The excluded ones of each tensor are flat indices, ascending. A seed draws the same entries on every device.
    """
    generator = torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:8], "little"))
    sizes = (tensor.numel - own.numel() for tensor, own in zip(tensors, excluded, strict=True))
    ends, ids = [*accumulate(sizes, initial=0)], []
    with torch.device("cpu"):  # whatever the default device is
        drawn = _sample(min(number, ends[-1]), ends[-1], generator)
        parts = drawn.split(torch.searchsorted(drawn, torch.tensor(ends)).diff().tolist())
        for tensor, own, first, part in zip(tensors, excluded, ends[:-1], parts, strict=True):
            gaps = own.cpu() - torch.arange(own.numel())  # places before each excluded entry
            ids.append(part - first + torch.searchsorted(gaps, part - first, right=True) + tensor.offset)
        return torch.cat(ids)[torch.randperm(drawn.numel(), generator=generator)]


def _sample(number: int, total: int, generator: torch.Generator) -> Tensor:
    """Draws integers below ``total``: (number,) int64, ascending; in no more time where the total is larger."""
    if number > total // 2:
        kept = torch.ones(total, dtype=torch.bool)
        kept[_sample(total - number, total, generator)] = False
        return kept.nonzero().squeeze(1)
    first = torch.randint(max(1, total), (number,), generator=generator).unique()
    late = first[:0]
    while missing := number - first.numel() - late.numel():  # what is drawn twice is drawn again
        late = torch.cat([late, torch.randint(total, (missing,), generator=generator)]).unique()
        late = late[first[torch.searchsorted(first, late).clamp_(max=first.numel() - 1)] != late]
    return torch.cat([first, late]).sort().values


def _scores(tensor: MaskedTensor, importance: Importance, total: Tensor | None) -> Iterator[Tensor]:
    """Scores in blocks, by the weights alone or by a calibration's sum, where a score of 0 does not count."""
    if total is None:
        yield from (importance.score(block, None) for block in in_blocks(tensor.weight))
        return
    for weight, block in zip(in_blocks(tensor.weight), in_blocks(full_values(total)), strict=True):
        # Fisher's total is the score already; for any other importance it is a gradient
        scores = block if isinstance(importance, Fisher) else importance.score(weight, block)
        yield scores.where((block != 0) & (scores > 0), -torch.inf)


def spread_cap(shapes: Sequence[torch.Size], number: int) -> int:
    """Twice an even spread over rows and columns: however the best are taken then, ``number`` entries are found."""
    sizes = [(min(shape[0], shape.numel() // shape[0]), shape.numel()) for shape in shapes if len(shape) > 1]
    cap = -(-2 * number // max(1, sum(side for side, _ in sizes)))
    while sum(min(side * cap, numel) for side, numel in sizes) < min(2 * number, sum(numel for _, numel in sizes)):
        cap *= 2  # some tensors are full before
    return cap


def spread(scores: Tensor, cap: int) -> Tensor:
    """Scores (n_out, n_in), -inf where an entry's row or column has, from the best one down, ``cap`` others already."""
    flat, width = scores.flatten(), scores.shape[1]
    kept, room = torch.full_like(flat, -torch.inf), [torch.full((n,), cap, device=flat.device) for n in scores.shape]
    for ids in flat.argsort(descending=True, stable=True).split(BLOCK_ENTRIES):
        ids = ids[flat[ids] > -torch.inf]
        while (ids := ids[(room[0][ids // width] > 0) & (room[1][ids % width] > 0)]).numel():
            lines = ids // width, ids % width
            sure = (_earlier(lines[0]) < room[0][lines[0]]) & (_earlier(lines[1]) < room[1][lines[1]])
            kept[ids[sure]] = flat[ids[sure]]
            for left, own in zip(room, lines, strict=True):
                left -= own[sure].bincount(minlength=left.numel())
            ids = ids[~sure]
    return kept.view_as(scores)


def _earlier(lines: Tensor) -> Tensor:
    """For each entry (n,), how many before it have the same line."""
    ordered, order = lines.sort(stable=True)
    before = torch.arange(order.numel(), device=order.device) - torch.searchsorted(ordered, ordered)
    return torch.empty_like(order).scatter_(0, order, before)


def _candidates(tensor: MaskedTensor) -> Tensor:
    candidates = torch.ones(tensor.numel, dtype=torch.bool, device=tensor.parameter.device)
    candidates[tensor.never_candidates] = False
    return candidates


def _check_budget(ranked: Sequence[ModelTensor], strategy: Strategy, budget: int, kept: int) -> None:
    available = sum(tensor.num_candidates for tensor in ranked)
    if not available:
        problem = "finds nothing to prune: no candidate that it covers has two dimensions"
        expected = "expected trainable matrices, such as an adapter's projections."
        raise SparsifyError(f"{strategy.importance} with {strategy.selection} {problem}; {expected}")
    if not kept < budget <= kept + available:
        vectors = f"biases, norms and other vectors are trained whole and take {kept:,} entries of it"
        expected = f"expected {kept + 1:,} to {kept + available:,}, or freeze the vectors before."
        raise SparsifyError(f"budget={budget:,} with {strategy.selection}: {vectors}; {expected}")


def _too_few(tensors: Sequence[MaskedTensor], importance: Importance, wanted: int, found: int, cap: int | None) -> str:
    share = f"budget={wanted:,}" if len(tensors) > 1 else f"`{tensors[0].name}` is to get {wanted:,} entries"
    score = "score above 0 in the calibration" if importance.uses_gradient else "finite score"
    score += f", with at most {cap} in a row or column" if cap else ""
    zeros = [tensor.name for tensor in tensors if isinstance(importance, SNIP) and not tensor.weight.any()]
    remedy = "correct it if it is yours, give the calibration more examples, or lower the budget."
    if zeros:
        remedy += f" SNIP scores abs(weight x grad), and {len(zeros)} of {len(tensors)} tensors are all zeros, such as "
        remedy += f"`{zeros[0]}`; start them from something else (PEFT's LoRA: init_lora_weights=False)."
    problem = f"the importance {importance.name!r} gave only {found:,} entries a {score}"
    return f"{share}, but {problem} (NaN and infinite ones do not count); {remedy}"


def find_given(tensors: Sequence[MaskedTensor], support: Mapping[str, Tensor], budget: int | float | None) -> Tensor:
    """Global ids (n,), ascending, of a set given as bool masks or flat indices, by tensor name in the plain model."""
    by_name = {plain_name(tensor.name): tensor for tensor in tensors}
    ids = [torch.empty(0, dtype=torch.int64, device="cpu")]
    for name, given in support.items():
        tensor, problem = by_name.get(plain_name(name)), None
        if tensor is None:
            other = next(iter(by_name))
            raise SparsifyError(f"the given set has `{name}`, which is no candidate of this model, as `{other}` is.")
        entries = torch.as_tensor(given, device="cpu").detach()
        if entries.dtype == torch.bool and entries.shape == tensor.shape:
            entries = entries.flatten().nonzero().squeeze(1)
        if entries.dtype == torch.bool:
            problem = f"a mask for `{name}` of shape {tuple(entries.shape)}, expected {tuple(tensor.shape)}"
        elif entries.is_floating_point() or entries.is_complex() or entries.dim() != 1:
            problem = f"{entries.dtype} for `{name}`; expected a bool mask or flat indices"
        elif ((entries < 0) | (entries >= tensor.numel)).any():
            problem = f"indices of `{name}` outside its {tensor.numel:,} entries"
        elif torch.isin(entries, tensor.never_candidates.cpu()).any():
            problem = f"entries of `{name}` in its padding row, which is never trained"
        if problem is not None:
            raise SparsifyError(f"the given set has {problem}.")
        ids.append(entries.to(torch.int64) + tensor.offset)
    found = torch.cat(ids).unique()
    if not found.numel():
        raise SparsifyError("the given set is empty; expected masks or indices with at least one entry.")
    if budget is not None and (isinstance(budget, bool) or budget != found.numel()):
        raise SparsifyError(f"budget={budget!r} with a given set of {found.numel():,} entries; pass budget=None.")
    return found


def offer_scores(topk: TopK, blocks: Iterable[Tensor], offset: int, excluded: Tensor) -> None:
    """Offers all entries of one tensor but the excluded ones (k,), ascending, by their scores, block by block."""
    start = 0
    for scores in blocks:
        ends = excluded.new_tensor([start, start + scores.numel()])
        first, last = torch.searchsorted(excluded, ends).tolist()
        if first < last:
            scores = scores.index_fill(0, excluded[first:last] - start, -torch.inf)
        near = (scores >= topk.threshold.to(scores.device, scores.dtype)).nonzero().squeeze(1)
        topk.add(near + (offset + start), *[scores[near]] * 3)
        start += scores.numel()


def in_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Splits a tensor of any shape into flat blocks (n,) to be scored at once, in float32 or float64."""
    return (at_least_float32(block) for block in tensor.reshape(-1).split(BLOCK_ENTRIES))


def calibrate(
    model: nn.Module, parameters: Sequence[nn.Parameter], importance: Importance, calibration: Calibration,
    loss_fn: LossFunction | None = None,
) -> list[Tensor]:  # fmt: skip
    """Sums each parameter's gradient, for :class:`Fisher` an example's square; for :class:`GSNR`, compares batches."""
    if isinstance(calibration, (Mapping, str)):
        raise SparsifyError(f"calibration= is a single {type(calibration).__name__}; expected several, as in [batch].")
    number = importance.num_samples if isinstance(importance, Fisher) else None
    powers = [2] if number is not None else [1, 2] if isinstance(importance, GSNR) else [1]
    with torch.enable_grad(), _summing(model, parameters, powers) as sums:
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
    if not any(own[0].any() for own in sums):
        raise SparsifyError("the calibration gave no candidate a gradient; pass labels, or what calls backward().")
    if not isinstance(importance, GSNR):
        return [total for (total,) in sums]
    ratios = [total.abs_().div_(squares.clamp_(min=1e-30).sqrt_()) for total, squares in sums]
    if not any((ratio > 1.001).any() for ratio in ratios):
        raise SparsifyError("the calibration was of one batch; GSNR compares batches: pass several, such as 32.")
    return ratios


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
        problem = f"calibration= got single rows of a dataset, and expects batches of tensors: {', '.join(kinds)}"
        loader = "DataLoader(dataset, batch_size=8, collate_fn=DataCollatorWithPadding(tokenizer))"
        raise SparsifyError(f"{problem}. Pass a DataLoader, such as {loader}.") from error
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None or loss.numel() != 1:
        raise SparsifyError(f"the model made no loss of a batch with {[*batch]}; put labels into it, or pass loss_fn=.")
    return loss


def _examples(batch: Any) -> list[Any]:
    """Splits a batch into batches of one; values other than tensors of the batch's length are in each of them."""
    if not isinstance(batch, Mapping):
        raise SparsifyError(f"a calibration batch is a {type(batch).__name__}; expected a dict, or a function.")
    size = next((value.shape[0] for value in batch.values() if isinstance(value, Tensor) and value.dim()), 1)
    cut = [key for key, value in batch.items() if isinstance(value, Tensor) and value.dim() and len(value) == size]
    return [{key: v[i : i + 1] if key in cut else v for key, v in batch.items()} for i in range(size)]


@contextmanager
def _summing(model: nn.Module, parameters: Sequence[nn.Parameter], powers: list[int]) -> Iterator[list[list[Tensor]]]:
    """Sums to which powers of each gradient are added as soon as it is computed, and then freed; in eval mode."""
    dtypes = {parameter: torch.promote_types(parameter.dtype, torch.float32) for parameter in parameters}
    sums = {parameter: [torch.zeros_like(parameter, dtype=own) for _ in powers] for parameter, own in dtypes.items()}

    def add(parameter: Any) -> None:
        grad, parameter.grad = parameter.grad, None
        grad = (grad.to_dense() if grad.is_sparse else grad).to(dtypes[parameter])
        for total, power in zip(sums[parameter], powers, strict=True):
            total += grad if power == 1 else grad.square()

    modes = {module: module.training for module in model.modules()}
    grads = {parameter: parameter.grad for parameter in model.parameters()}
    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in parameters]
    try:
        model.eval()
        model.zero_grad()
        yield list(sums.values())
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
        for parameter, grad in grads.items():
            parameter.grad = grad
