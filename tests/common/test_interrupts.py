"""Ctrl-C at any moment: an interrupted call has either happened or not, and training continues the same."""

import contextlib
import copy
import random
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest
import torch
from deltas import bits, task
from torch import nn
from torch.nn import functional as F

import sparsify as package
from sparsify import DeltaSwitch, SparseDelta, base_weights, desparsify, get_engine, sparsify, summary
from sparsify.common.interrupts import uninterrupted
from sparsify.strategies.importance import Magnitude
from sparsify.strategies.strategy import Prune, Strategy

STEPS, BUDGET = 3, 24
# files that are interrupted; not threading, logging and the like, whose locks would stay locked for other tests
PACKAGES = (package, torch.optim, torch.nn.modules)
INTERRUPTED = (*(str(Path(module.__file__).parent) for module in PACKAGES), signal.__file__, __file__)


@pytest.fixture(autouse=True)
def handler():
    """Installs Python's own handler of SIGINT, which a background process does not have."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Tied(nn.Module):
    """A tied embedding and head, a norm and a convolution in the generic form, a linear layer."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.convolution = nn.Conv1d(6, 6, 1)
        self.linear = nn.Linear(6, 6)

    def forward(self, ids):
        hidden = self.norm(self.table(ids))
        hidden = hidden + self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        hidden = torch.tanh(self.linear(hidden))
        return F.cross_entropy(F.linear(hidden, self.table.weight).flatten(0, 1), ids.flatten())


class Interrupter:
    """Sends a real SIGINT at one line of Python code, counted from the start, or counts them all."""

    def __init__(self, at=None):
        self.at, self.lines = at, 0

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        # a traced interrupt may cut off the end of torch's own no_grad(), and of a section without torch functions
        torch.set_grad_enabled(True)
        torch._C.DisableTorchFunctionSubclass().__exit__(None, None, None)

    def _trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(INTERRUPTED):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


def trained(model, ids, optimizer, interrupters):
    """Trains with an interrupter around each attempt at a step; the trained state, and how often it was cut off."""
    model.train()
    interrupted = 0
    while (step := summary(model).step) < STEPS:
        try:
            with next(interrupters):
                optimizer.zero_grad()
                loss = model(ids[step])
                loss.backward()
                with torch.no_grad(), base_weights(model):
                    model(ids[step])
                optimizer.step()
                model.state_dict()
        except KeyboardInterrupt:
            interrupted += 1
    assert summary(model, verify=True).verification.ok
    return model.state_dict(), interrupted


def fresh(strategy="id3"):
    torch.manual_seed(0)
    model = sparsify(Tied().double(), BUDGET, strategy, steps=STEPS)
    return model, torch.randint(9, (STEPS, 4, 5)), torch.optim.SGD([model.sparse_values], lr=0.1)


MANY = pytest.param(350, marks=pytest.mark.slow)  # each with three interrupts


@pytest.mark.parametrize("moments", [30, MANY])
@pytest.mark.parametrize("strategy", ["id3", "d3-repeat"])
def test_training_that_is_interrupted_anywhere_goes_on_as_if_it_were_not(strategy, moments):
    straight = [Interrupter() for _ in range(STEPS)]
    expected, _ = trained(*fresh(strategy), iter(straight))
    generator, interrupts = random.Random(0), 0
    for _ in range(moments):
        at = [generator.randrange(1, straight[0].lines + 1) for _ in range(STEPS)]
        interrupters = chain(map(Interrupter, at), iter(Interrupter, None))
        state, interrupted = trained(*fresh(strategy), interrupters)
        interrupts += interrupted
        for name, tensor in expected.items():
            assert torch.equal(tensor, state[name]), f"`{name}`, interrupted at {at}"
    assert interrupts > moments, "most signals came as interrupts, and the others after a section"


PRUNES = Strategy(Magnitude(largest=True), Prune(pretrained=True))


@pytest.mark.parametrize("strategy", ["id3", "pafi", PRUNES])
def test_a_model_whose_conversion_is_interrupted_is_plain_or_sparsified(strategy):
    plain = Tied()
    ids, before = torch.randint(9, (4, 5)), copy.deepcopy(plain.state_dict())
    after = desparsify(sparsify(copy.deepcopy(plain), 2 * BUDGET, strategy, steps=STEPS)).state_dict()
    with Interrupter() as counter:
        sparsify(copy.deepcopy(plain), 2 * BUDGET, strategy, steps=STEPS)
    generator = random.Random(0)
    for _ in range(40):
        model, at = copy.deepcopy(plain), generator.randrange(1, counter.lines + 1)
        with contextlib.suppress(KeyboardInterrupt), Interrupter(at):
            sparsify(model, 2 * BUDGET, strategy, steps=STEPS)
        if not hasattr(model, "sparse_values"):
            assert all(type(one) is type(other) for one, other in zip(model.modules(), plain.modules(), strict=True))
            assert all(parameter.requires_grad for parameter in model.parameters()), f"interrupted at {at}"
            assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
            sparsify(model, 2 * BUDGET, strategy, steps=STEPS)
        assert summary(model, verify=True).verification.ok
        model(ids).backward()
        with contextlib.suppress(KeyboardInterrupt), Interrupter(generator.randrange(1, counter.lines // 3)):
            desparsify(model)
        if hasattr(model, "sparse_values"):
            desparsify(model)
        assert model.state_dict().keys() == before.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in model.state_dict().items())
        model(ids).backward()


def test_a_load_that_is_interrupted_leaves_the_trained_weights():
    model, ids, optimizer = fresh()
    model(ids[0]).backward()
    optimizer.step()
    loss, state = model(ids[1]), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    handle = model.linear.register_load_state_dict_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        model.load_state_dict(state)
    handle.remove()
    assert torch.equal(model(ids[1]), loss)


def test_the_base_may_be_entered_twice_and_copied_within():
    model, ids, optimizer = fresh()
    base = model(ids[0])
    base.backward()
    optimizer.step()
    trained, reference = model(ids[0]).detach(), base_weights(model)
    with reference:
        with reference:
            assert torch.equal(model(ids[0]), base)
        assert torch.equal(model(ids[0]), base)
        other = copy.deepcopy(model)
    assert torch.equal(model(ids[0]), trained)
    assert torch.equal(other(ids[0]), trained)


def test_a_section_is_not_interrupted_and_the_interrupt_comes_after_it():
    done = []

    def section():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        section()
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def handler_in_a_section():
    with uninterrupted():
        return signal.getsignal(signal.SIGINT)


def test_another_thread_and_a_signal_that_is_ignored_are_left_alone():
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(handler_in_a_section).result() is signal.default_int_handler
    for ignored in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, ignored)
        assert handler_in_a_section() == ignored


def test_a_step_that_was_cut_off_is_counted_once():
    """The optimizer has moved the values, and its hooks did not run."""
    model, ids, optimizer = fresh()
    model(ids[0]).backward()
    handle = optimizer.register_step_post_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    handle.remove()
    assert summary(model).step == get_engine(model).step == 1
    optimizer.zero_grad()
    model(ids[1]).backward()
    optimizer.step()
    assert summary(model).step == 2


def tasks():
    """A base and two deltas of it, one of them with a bias stored whole."""
    base = Tied()
    deltas = [task(base, seed, share=0.1) for seed in (1, 2)]
    deltas[0].whole["convolution.bias"] = torch.ones(6)
    return base, deltas


class Interrupted:
    """Calls functions and interrupts each at a random line."""

    def __init__(self):
        self._generator, self._lines, self.count = random.Random(0), {}, 0

    def call(self, name, function):
        lines = self._lines.get(name)
        seen = Interrupter(self._generator.randrange(1, lines + 1) if lines else None)
        try:
            with seen:
                function()
        except KeyboardInterrupt:
            self.count += 1
        self._lines[name] = max(seen.lines, lines or 0)


MOMENTS = pytest.mark.parametrize("moments", [20, pytest.param(200, marks=pytest.mark.slow)])


@MOMENTS
def test_a_delta_whose_apply_swap_or_revert_is_interrupted_is_on_the_model_or_not(moments):
    base, (first, second) = tasks()
    plain, interrupted = bits(base), Interrupted()
    with first.applied(base):
        of_first = bits(base)
    with second.applied(base):
        of_second = bits(base)
    verbs = {
        "apply": (lambda: first.apply(base), plain, of_first),
        "swap": (lambda: first.swap(base, second), of_first, of_second),
        "revert": (lambda: second.revert(base), of_second, plain),
    }
    for _ in range(moments):
        for name, (verb, before, after) in verbs.items():
            interrupted.call(name, verb)
            if bits(base) == before:
                verb()
            assert bits(base) == after
    assert interrupted.count > moments


@MOMENTS
def test_a_switch_that_is_interrupted_has_one_delta_active_or_the_other(moments):
    base, deltas = tasks()
    switch, states, interrupted = DeltaSwitch(base), {None: bits(base)}, Interrupted()
    for name, delta in zip("ab", deltas, strict=True):
        switch.attach(name, delta)
        with switch.activated(name):
            states[name] = bits(base)
    for moment in range(moments):
        interrupted.call("activate", lambda name="ab"[moment % 2]: switch.activate(name))
        assert bits(base) == states[switch.active]
        if moment % 5 == 4:
            interrupted.call("deactivate", switch.deactivate)
            assert bits(base) == states[switch.active]
    assert interrupted.count > moments / 2


@MOMENTS
def test_a_save_that_is_interrupted_leaves_the_old_file_or_the_new_one(moments, tmp_path):
    _, deltas = tasks()
    deltas[0].save(tmp_path)
    interrupted, names = Interrupted(), {path.name for path in tmp_path.iterdir()}
    for moment in range(moments):
        interrupted.call("save", lambda delta=deltas[moment % 2]: delta.save(tmp_path))
        assert {path.name for path in tmp_path.iterdir()} <= names
        assert SparseDelta.load(tmp_path) in deltas
    assert interrupted.count > moments / 2
