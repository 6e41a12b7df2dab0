"""Runs a random training program with sparsify and with the dense oracle, action by action, and compares the two.

In float64 both sides run by themselves, and choices are equal to the last entry. In shorter dtypes each action is
compared from equal states: the oracle then goes on from the library's choice, gradient and values.
"""

import copy
import io
import pickle
from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from products import FREE
from program_oracle import IMPORTANCES, OPTIMIZERS, ROUNDING, Dense
from torch import nn

from sparsify import Schedule, SparseDelta, base_weights, desparsify, get_engine, sparsify, trained_state
from sparsify.common.shards import full_values, is_fully_sharded
from sparsify.strategies.strategy import Increment, Repeat, Static, Strategy

SELECTIONS = {"repeat": Repeat(), "static": Static()}
# entries from which on a tensor is not small, and is not joined, a product is screened or multiplied in blocks, a pool
# is cut, a scan begins another block; and what it costs to look at parts of a product
TINY = {
    "sparsify.selection.joined.LARGEST": 10,
    "sparsify.selection.joined.LARGEST_AHEAD": 30,
    "sparsify.selection.joined.AT_ONCE": 60,
    "sparsify.selection.screening.SMALLEST_SCREENED": 16,
    "sparsify.selection.screening.MOST_MULTIPLIED": 30,
    "sparsify.core.topk.SMALLEST_CUT": 2,
    "sparsify.core.topk.BLOCK_ENTRIES": 24,
    "sparsify.selection.static.BLOCK_ENTRIES": 24,
    "sparsify.selection.distributed.MOST_AT_ONCE": 150,
    **{f"sparsify.selection.screening.{name}": cost for name, cost in FREE.items()},
    "sparsify.selection.screening.sampling_pays": lambda *_: True,
}


class InterruptedPassError(Exception):
    """What a program throws in the middle of a forward or backward pass."""


class Run:
    """Both sides of a program; each method is an action, done by both and compared, from equal states if ``short``."""

    copies, copy_number = 1, 0  # of a model on several ranks, each with batches of its own

    def __init__(self, program):
        self.program, self.batches = program, program.batches()
        self.short, self.rounding = program.dtype != torch.float64, ROUNDING[program.dtype] * self.copies
        self.dense = Dense(program)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=program.scaled)

    def sparsified(self):
        program, dense = self.program, self.dense
        if program.selection == "given":
            budget, strategy = None, dense.split(dense.mask)
        else:
            importance, _ = IMPORTANCES[program.importance]
            selection = SELECTIONS.get(program.selection) or Increment(program.select)
            budget, strategy = dense.budget, Strategy(importance, selection)
        model, schedule = self.split(program.model()), Schedule(**program.schedule)
        return self.shard(sparsify(model, budget, strategy, steps=program.steps, schedule=schedule))

    # what several ranks do in their own ways: before sparsify(), after it, to what is called, to save and to load
    split = shard = wrap = staticmethod(lambda model: model)
    state, load = staticmethod(nn.Module.state_dict), staticmethod(nn.Module.load_state_dict)

    def sparsify(self):
        self.sparse = self.sparsified()
        self.parallel = self.wrap(self.sparse)
        self.optimizer = OPTIMIZERS[self.program.optimizer]([self.sparse.sparse_values])
        self.compare_choice()
        self.compare_weights()

    def backward(self, kind, first, second, overflow):
        """One or two passes over one batch or two; the gradient of the first may turn infinite at a place.

        "one" batch; two "summed" in one pass; two forward passes and then two backward ones ("pending"); one graph used
        twice ("retained"); or once, and again together with a newer one ("kept").
        """
        one = self.losses(first, overflow)
        if kind in ("retained", "kept"):
            self.passes(one, retain=True)
        two = self.losses(second) if kind in ("summed", "pending", "kept") else None
        if kind in ("summed", "kept"):
            one, two = [a + 2 * b for a, b in zip(one, two, strict=True)], None
        self.passes(one)
        if two is not None:
            self.passes(two)

    def losses(self, batch, overflow=None):
        def loss(model, copy):
            def probe(place, hidden):
                if place == overflow and hidden.requires_grad and copy == batch % self.copies:
                    hidden.register_hook(lambda grad: grad * torch.inf)
                return hidden

            tokens, labels, _ = self.batches[(batch + copy) % len(self.batches)]
            return model(tokens, labels, self.batches[batch][-1], probe)

        sparse, dense = loss(self.parallel, self.copy_number), [loss(self.dense.model, i) for i in range(self.copies)]
        self.compare("the loss", sparse, dense[self.copy_number])
        return [self.scaler.scale(each) for each in (sparse, sum(dense) / self.copies)]

    def passes(self, losses, *, retain=False):
        sparse, dense = losses
        if not sparse.requires_grad:  # the loss depends on nothing that is trained
            assert not self.dense.quota() or self.dense.selected
            return
        sparse.backward(retain_graph=retain)
        self.dense.backward(dense, self.chosen(), retain=retain)
        self.compare_choice()
        self.compare_frozen()
        self.compare_gradients()

    def fail(self, where, place, batch):
        """An error in the "forward" or "backward" pass, or in a part that is "recomputed", leaves all as it was."""
        recomputed = where == "recomputed"

        def probe(at, hidden):
            if at == (0 if recomputed else place):
                if where == "forward" or not hidden.requires_grad:
                    interrupt()
                hidden.register_hook(interrupt)
            return hidden

        before = self.snapshot()
        handles = [part.register_forward_pre_hook(interrupt_in_backward) for part in self.sparse.parts if recomputed]
        try:
            self.sparse(*self.batches[batch], probe).backward()
        except InterruptedPassError:
            after = self.snapshot()
            assert before.keys() == after.keys()
            different = [name for name in before if not torch.equal(before[name], after[name])]
            assert not different, f"the error has changed {different}"
        else:
            raise AssertionError("the error was swallowed")
        finally:
            for handle in handles:
                handle.remove()

    def evaluate(self, how, batch):
        models = [self.sparse, self.dense.model]
        if how == "dropped":
            self.losses(batch)
            return
        if how == "base":
            models[1] = self.program.model()
        for model in models:
            model.train(how != "eval")
        base = base_weights(self.sparse) if how == "base" else nullcontext()
        with base, torch.inference_mode() if how == "inference" else torch.no_grad():
            self.compare("the loss", *(model(*self.batches[batch]) for model in models))
        for model in models:
            model.train()

    def step(self):
        program, scale, values = self.program, self.scaler.get_scale(), self.sparse.sparse_values
        if values.grad is not None:
            finite = bool(values.grad.isfinite().all())
            assert finite == self.dense.finite, f"the gradient is {'' if finite else 'not '}finite"
            if program.clip is not None and finite:
                self.scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_([values], program.clip)
            if program.scaled:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            elif finite:
                self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=program.set_to_none)
        self.dense.step(scale, program.clip)
        self.dense.zero_grad(program.set_to_none)
        self.compare_weights()

    def resume(self, what):
        file = io.BytesIO()
        state = (self.state if what == "state_dict" else trained_state)(self.sparse)
        torch.save(state, file)
        file.seek(0)
        model = self.sparsified()
        self.load(model, torch.load(file, weights_only=True))
        self.go_on_with(model)
        self.dense.selected = False

    def copy(self, how):
        original = self.sparse
        self.go_on_with(copy.deepcopy(original) if how == "deepcopy" else pickle.loads(pickle.dumps(original)))
        loss = original(*self.batches[0])
        if loss.requires_grad:
            loss.backward()
            torch.optim.SGD([original.sparse_values], lr=1.0).step()

    def go_on_with(self, model):
        state = self.optimizer.state_dict()
        self.sparse, self.dense.gradient, self.dense.may_drop, self.dense.passes = model, None, False, 0
        self.parallel, self.optimizer = self.wrap(model), OPTIMIZERS[self.program.optimizer]([model.sparse_values])
        self.optimizer.load_state_dict(state)
        self.compare_weights()

    def export(self):
        delta = SparseDelta.from_model(self.sparse)
        base = self.program.model()
        delta.apply(base)
        trained = self.sparse.state_dict() if is_fully_sharded(self.sparse) else desparsify(self.sparse).state_dict()
        if not is_fully_sharded(self.sparse):
            assert base.state_dict().keys() == trained.keys()
            assert not hasattr(self.sparse, "_ddp_params_and_buffers_to_ignore")
        for name, value in base.state_dict().items():
            assert same_bits(value, full_values(trained[name])), f"the delta makes another `{name}`"

    def chosen(self):
        """(N,) bool: the entries that the library trains in this step."""
        active = get_engine(self.sparse).policy.active  # of repeat-S: the slots that the last choice was for
        if active is None:
            if self.program.selection == "repeat":
                return self.dense.mask
            active = torch.ones(self.sparse.sparse_values.shape, dtype=torch.bool)
        return self.flat(active)

    def flat(self, per_slot):
        """(N,) what the library has in a flat vector (capacity,)."""
        flat = torch.zeros(self.dense.base.shape, dtype=per_slot.dtype)
        parts = self.dense.split(flat)  # views
        for tensor in get_engine(self.sparse).tensors:
            parts[tensor.name].view(-1)[tensor.indices] = per_slot[tensor.slots]
        return flat

    def snapshot(self):
        engine, grad = get_engine(self.sparse), self.sparse.sparse_values.grad
        state = {name: value.clone() for name, value in self.sparse.state_dict().items()}
        state["selected"] = torch.tensor(engine.selected)
        return state if grad is None else {**state, "gradient": grad.nan_to_num(nan=7.0)}

    def compare(self, what, sparse, dense, share=None):
        sparse, dense = sparse.detach(), dense.detach()
        bound = (self.rounding if share is None else share) * max(0.1, float(dense.abs().max()))
        error = float((sparse - dense).abs().max())
        assert error <= bound, f"{what} is off by {error:.3g}, more than {bound:.3g}"

    def compare_choice(self):
        chosen = self.chosen()
        number, expected = int(chosen.sum()), int(self.dense.mask.sum())
        assert number == expected, f"{number} entries are trained, not {expected}"
        assert torch.equal(chosen, self.dense.mask), "other entries are trained"

    def compare_gradients(self):
        gradient = self.sparse.sparse_values.grad
        if gradient.isfinite().all() and self.dense.finite:
            gradient = self.flat(gradient)
            self.compare("the gradient", gradient, self.dense.gradient)
            if self.short:
                self.dense.gradient = gradient

    @torch.no_grad()
    def compare_weights(self):
        engine, dense = get_engine(self.sparse), self.dense
        assert engine.step == dense.step_number, f"{engine.step} steps were counted, not {dense.step_number}"
        values = self.flat(engine.values.detach())
        self.compare("the delta", values, dense.delta, 1e-6 if self.short else self.rounding)
        if self.short:
            dense.delta.copy_(values)
        dense.write()
        weights = torch.cat([full_values(self.sparse.get_parameter(name)).reshape(-1) for name in dense.names])
        self.compare("a weight", weights, dense.wide_weights(), 0 if self.short else self.rounding)
        self.compare_frozen()

    def compare_frozen(self):
        dense, now = self.dense, lambda name: full_values(self.sparse.get_parameter(name))
        weights = torch.cat([now(name).reshape(-1) for name in dense.names])
        assert same_bits(weights[~dense.touched], dense.base[~dense.touched]), "a frozen entry has changed"
        for name, parameter in dense.model.named_parameters():
            assert parameter.requires_grad or same_bits(now(name), parameter), f"`{name}` has changed"


def same_bits(a, b):
    integers = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return torch.equal(a.detach().view(integers), b.detach().view(integers))


def interrupt(*_):
    raise InterruptedPassError


def interrupt_in_backward(*_):
    if torch._C._current_graph_task_id() != -1:
        interrupt()


def run(program, kind=Run):
    """Runs both sides of a program and returns them; an error has the program, the action and what was found there."""
    both = kind(program)
    with ExitStack() as limits:
        for name, limit in TINY.items() if program.tiny else ():
            limits.enter_context(patch(name, limit))
        for number, (action, *arguments) in enumerate(both.program.script, 1):
            try:
                getattr(both, action)(*arguments)
            except Exception as error:
                raise AssertionError(
                    f"program({program.seed}), action {number}, {action}{tuple(arguments)}: "
                    f"{type(error).__name__}: {error}\n\n{program}"
                ) from error
    return both
