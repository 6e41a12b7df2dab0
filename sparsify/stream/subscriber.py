"""The receiving end of a stream: keeps a plain model at the last version of a model in training."""

import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import check_plain
from sparsify.delta import patch_plan
from sparsify.delta.entries import TensorDelta
from sparsify.delta.patch_plan import PatchPlan, PlannedWrite, undone, write_plan
from sparsify.errors import DeltaFormatError, MissingUpdateError, SparsifyError, StaleUpdateError
from sparsify.stream.publisher import DeltaUpdate
from sparsify.stream.version import Changes, KnownValues, TrainedEntries, read_message

_POLL_SECONDS = 0.001
_REMEDY = "load the base afresh, make a new DeltaSubscriber of it, and apply `snapshot()`"
_SAMPLE = 1024  # values that are compared where an update replaces all


class DeltaSubscriber:
    """Keeps a plain model at the last version of a model in training.

    A message is checked, as are the values that it replaces (all or, where an update has all trained values, a sample),
    and written completely or not at all. Threads use the model within :meth:`reading`.

    Args:
        model: the base of the publisher's model, wrapped or not, on any device; it is changed in place.

    Attributes:
        model: the base with the version's values in it.
        chain: the id of the publisher that it follows; ``None`` before the first snapshot.
        version: the version that the model holds; ``None`` before the first snapshot.

    Raises:
        SparsifyError: when the model is being trained sparsely.
    """

    def __init__(self, model: nn.Module) -> None:
        check_plain(model)
        self.model = model
        self.chain: str | None = None
        self.version: int | None = None
        self._held = Held({}, {})
        self._left: set[str | None] = set()  # chains that were followed before
        self._lock, self._applying = ReadWriteLock(), ReadWriteLock()

    def apply(self, update: bytes | DeltaUpdate) -> int:
        """Brings the model to the version of a message, once no thread is :meth:`reading`; returns the version.

        Raises:
            DeltaFormatError: when the message is damaged: have it sent again.
            StaleUpdateError: when the model is past it already: drop it.
            MissingUpdateError: when it does not follow the model's version or chain: apply ``snapshot()`` first.
            BaseMismatchError: when the model is not the base of the publisher's model.
            SparsifyError: when something else has changed the model: make a new subscriber of a base loaded afresh.
                After each of these errors the model is as before.
        """
        self._lock.check_not_reading()
        with self._applying.writing():
            chain, version, changes = read_message(bytes(update))
            self._check_order(chain, version, is_snapshot=changes.known is None)
            if changes.known is None:
                with self._lock.writing(), uninterrupted(), undone(self._held.plan(), self.model, _REMEDY):
                    plan, targets = patch_plan.plan_delta(changes.tensors, changes.whole, self.model)
                    of = {write.name: write for write in plan}
                    entries = {name: _over(of[name].old, part) for name, part in sorted(changes.tensors.items())}
                    held = Held(entries, {name: of[name] for name in changes.whole})
                    write_plan(plan, self.model, targets=targets)
                    if self.chain not in (None, chain):
                        self._left.add(self.chain)
                    self._held, self.chain, self.version = held, chain, version
            else:
                steps, held = plan_update(changes, self._held, self.model)
                with self._lock.writing(), uninterrupted():
                    write_plan(steps, self.model, f"the values of version {self.version}", _REMEDY)
                    self._held, self.version = held, version
        return version

    def mark(self) -> tuple[Any, ...]:
        """What is held now, for :meth:`go_back`."""
        return self.chain, self.version, self._held, set(self._left)

    def go_back(self, mark: tuple[Any, ...]) -> None:
        """Makes updates since a :meth:`mark` as if they had not come; raises where something else changed the model."""
        with self._lock.writing(), uninterrupted(), undone(self._held.plan(), self.model, _REMEDY):
            write_plan(mark[2].plan(), self.model)
            self.chain, self.version, self._held, self._left = mark

    @contextmanager
    def reading(self) -> Iterator[int | None]:
        """Keeps the model at one version, which is given, for the length of a ``with`` block.

        Work that the block starts on a GPU has to be on the stream that updates are applied on, usually the default.
        """
        with self._lock.reading():
            yield self.version

    def _check_order(self, chain: str, version: int, *, is_snapshot: bool) -> None:
        at = "no version yet" if self.version is None else f"version {self.version}"
        has_left = chain in self._left
        if has_left or (chain == self.chain and version <= (self.version or 0)):
            run, at = ("an earlier run", f"{at} of a later one") if has_left else ("this run", at)
            raise StaleUpdateError(f"this is version {version} of {run}, and the model holds {at}: drop it.")
        is_next = chain == self.chain and version - 1 == self.version
        if not is_snapshot and not is_next:
            other = "" if chain == self.chain or self.chain is None else " of another run"
            steps = f"this update makes version {version} from version {version - 1}"
            remedy = "ask the publisher for `snapshot()`, and go on with the updates after it."
            raise MissingUpdateError(f"{steps}, and the model holds {at}{other}: {remedy}")


class Held(NamedTuple):
    """What a follower holds by tensor name: entries over its own base, in the order of the names, and dense tensors."""

    entries: dict[str, TrainedEntries]
    whole: dict[str, PlannedWrite]

    def plan(self) -> PatchPlan:
        return [*(_write(name, part) for name, part in self.entries.items()), *self.whole.values()]


def plan_update(changes: Changes, held: Held, model: nn.Module) -> tuple[PatchPlan, Held]:
    """Plans an update on the version before; raises where it does not fit what is held, or the model."""
    entries, whole, known = dict(held.entries), dict(held.whole), changes.known or {}
    steps: PatchPlan = []
    for dtype in known:
        group = {name: part for name, part in held.entries.items() if part.values.dtype == dtype}
        for name, (places, values) in zip(group, _spread(known[dtype], group.values()), strict=True):
            if values.numel():
                part = group[name] if places is None else group[name].at(places)
                steps.append(_write(name, part._replace(values=values))._replace(old=_write(name, part).new))
                every = values if places is None else group[name].values.index_put((places,), values)
                entries[name] = group[name]._replace(values=every)
    names = [*changes.tensors, *changes.whole]
    # with all that is held, of which a new tensor must not be an alias
    targets = patch_plan.find_targets([*entries, *whole, *names], model, {*whole, *changes.whole}) if names else {}
    for name, delta in changes.tensors.items():
        _check(name not in whole, f"it has entries of `{name}`, which is stored whole")
        steps.append(patch_plan.plan_entries(name, delta, targets[name]))
        more = _over(steps[-1].old, delta)
        entries[name] = part = entries[name].joined(more) if name in entries else more
        fits = part.entry_type == more.entry_type and bool((part.indices[1:] > part.indices[:-1]).all())
        _check(fits, f"it has other entries of `{name}`")
    for name, tensor in changes.whole.items():
        _check(name not in entries, f"it has all of `{name}`, of which entries are trained")
        before = held.whole.get(name)
        steps.append(patch_plan.plan_dense(name, tensor, targets[name], None if before is None else before.new))
        whole[name] = steps[-1] if before is None else steps[-1]._replace(old=before.old)
    sent_again = {dtype for dtype in known if known[dtype].places is None}
    dtypes = {part.values.dtype for part in held.entries.values()}
    if held.whole.keys() <= changes.whole.keys() and dtypes <= sent_again:
        # The version does not depend on what is replaced. A sample tells whether another model is below.
        steps = [*_sample(steps), *(step._replace(checked=False) for step in steps)]
    return steps, Held(dict(sorted(entries.items())), whole)


def _over(base: Tensor, part: TensorDelta) -> TrainedEntries:
    return TrainedEntries(part.shape, part.dtype, part.kind, part.quantization, part.indices, base, part.values)


def _write(name: str, part: TrainedEntries) -> PlannedWrite:
    new = patch_plan.trained_values(name, part.kind, part.values, part.base)
    return PlannedWrite(name, part.shape, part.indices, part.base, new)


def _spread(known: KnownValues, group: Iterable[TrainedEntries]) -> Sequence[tuple[Tensor | None, Tensor]]:
    """Numbers of the entries that have new values, and these, tensor by tensor; ``None`` for all that a tensor has."""
    counts = [part.values.numel() for part in group]
    values, places, total = *known, sum(counts)
    fits = values.numel() == total if places is None else not places.numel() or int(places[-1]) < total
    _check(fits, f"its {values.numel():,} values are not of the {total:,} known entries")
    if places is None:
        return [(None, own) for own in values.split(counts)]
    starts = torch.tensor([0, *counts], device="cpu").cumsum(0)
    cuts = torch.searchsorted(places, starts).tolist()
    parts = zip(cuts, cuts[1:], starts.tolist(), strict=False)
    return [(places[begin:end] - start, values[begin:end]) for begin, end, start in parts]


def _sample(plan: PatchPlan) -> PatchPlan:
    """A part of the write with the most entries; of one tensor, since a GPU is waited for."""
    write = max(plan, key=lambda write: 0 if write.indices is None else write.indices.numel(), default=None)
    if write is None or write.indices is None:
        return []
    return [write._replace(indices=write.indices[:_SAMPLE], old=write.old[:_SAMPLE], new=write.new[:_SAMPLE])]


def _check(fits: bool, problem: str) -> None:
    if not fits:
        unfit = "this update does not go with the version that the model holds"
        raise DeltaFormatError(f"{unfit}: {problem}. Nothing was changed: ask for `snapshot()`.")


class ReadWriteLock:
    """Readers and writers take turns: a writer waits for the readings in progress, later readings wait for the writer.

    A thread may read within its own reading, also while a writer waits. Readings may overlap in one thread, and end in
    another one, as asyncio's tasks and generators do. Writers poll: Ctrl-C could leave a condition variable locked.
    """

    def __init__(self) -> None:
        self._readings: dict[object, threading.Thread] = {}  # in progress, with the threads that began them
        self._door = threading.Lock()  # readers pass through, and a writer holds it

    def __reduce__(self) -> "tuple[type[ReadWriteLock], tuple[()]]":
        return ReadWriteLock, ()  # a copy's threads are others

    def check_not_reading(self) -> None:
        if self._is_reading():
            raise SparsifyError("an update inside a block that reads the model would wait for itself: leave it first.")

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps writers out for the length of a ``with`` block."""
        reading, thread = object(), threading.current_thread()
        try:
            with nullcontext() if self._is_reading() else self._door:
                self._readings[reading] = thread
            yield
        finally:
            self._readings.pop(reading, None)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keeps everybody else out for the length of a ``with`` block; raises inside a reading of the same thread."""
        self.check_not_reading()
        with self._door:
            while self._readings:
                time.sleep(_POLL_SECONDS)
            yield

    def _is_reading(self) -> bool:
        return threading.current_thread() in tuple(self._readings.values())
