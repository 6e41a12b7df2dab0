"""The sending end of a stream: each version of a model in training as the bytes that changed since the one before.

    model in training --DeltaPublisher.update()--> bytes --any transport--> DeltaSubscriber.apply() --> plain base model

The versions of one publisher are a chain: they are counted from 0 and have a random id in common.
"""

import secrets
from collections.abc import Iterator
from functools import cached_property

import torch
from torch import nn

from sparsify.common.names import find_engine
from sparsify.delta.entries import StrPath
from sparsify.delta.format import check_not_extended
from sparsify.delta.merge import WeightPatch, make_patches
from sparsify.errors import SparsifyError
from sparsify.stream.version import Changes, Version, changed_entries, changed_whole, difference, write_message

_MAX_INDEX = 2**31 - 1


class DeltaUpdate:
    """A version of a model in training, as a message to its followers: ``bytes(update)`` are what to send.

    Any thread may ask for its bytes, which are made once. It holds the two versions that it is between: to keep many,
    keep their bytes.

    Attributes:
        chain: the publisher's id.
        version: the version that it makes.
    """

    def __init__(self, chain: str, version: int, state: Version, before: Version | None = None) -> None:
        self.chain, self.version = chain, version
        self._state, self._before = state, before

    @property
    def is_snapshot(self) -> bool:
        """Whether it makes its version from the base; otherwise from the version before."""
        return self._changes.known is None

    @cached_property
    def _changes(self) -> Changes:
        update = None if self._before is None else difference(self._before, self._state)
        return update or self._state.snapshot()

    @cached_property
    def _bytes(self) -> bytes:
        return write_message(self.chain, self.version, self._changes, self._state.config)

    def __bytes__(self) -> bytes:
        return self._bytes

    def snapshot(self) -> "DeltaUpdate":
        """The version that it makes as a whole, for followers that lack the one before."""
        return DeltaUpdate(self.chain, self.version, self._state)

    def patches(self, checkpoint: StrPath | None = None) -> Iterator[WeightPatch]:
        """Yields what changed as patches of a checkpoint's tensors, the form in which inference engines take weights.

        Args:
            checkpoint: the path of the checkpoint that the engine has loaded, as for :meth:`SparseDelta.patches`.

        Returns:
            Patches with int32 positions; of ``update()`` those that bring the version before to this one, of
            ``snapshot()`` those that bring the base to it.

        Raises:
            BaseMismatchError: when the checkpoint is not that of the model's base.
            SparsifyError: when the model was extended by adapters, or quantized and no checkpoint is given; when a
                dense tensor is the base's again; while the patches are read, when int32 cannot hold a position.
        """
        check_not_extended(self._state.config, "patches")
        before = self._before or Version({}, {}, {})  # the base
        if gone := sorted(before.whole.keys() - self._state.whole.keys()):
            remedy = "load the engine's checkpoint afresh, and take the patches of `snapshot()`."
            raise SparsifyError(f"`{gone[0]}` is the base's again, whose values are not known here: {remedy}")
        tensors, whole = changed_entries(before, self._state), changed_whole(before, self._state)
        return (_with_int32(patch) for patch in make_patches(tensors, whole, checkpoint))

    def __repr__(self) -> str:
        return f"DeltaUpdate({'snapshot of ' if self.is_snapshot else ''}version {self.version})"


class DeltaPublisher:
    """Makes the messages of a model in training, of the values that ``SparseDelta.from_model(model)`` would have.

    It keeps the last version in host memory. A new publisher begins a new chain, so that followers of an earlier run
    notice. With FSDP all ranks make a publisher and call ``update()`` together, and one of them sends.

    Args:
        model: a model that ``sparsify`` prepared, wrapped or not; what it holds now is version 0.

    Raises:
        SparsifyError: when the model is not sparsified, or has strategy "full".

    Example:
        >>> import copy, sparsify
        >>> base = nn.Linear(4, 4)
        >>> model = sparsify.sparsify(copy.deepcopy(base), 3, "random")
        >>> publisher, follower = DeltaPublisher(model), sparsify.DeltaSubscriber(base)
        >>> follower.apply(bytes(publisher.snapshot()))
        0
        >>> model.sparse_values.data += 1
        >>> follower.apply(bytes(publisher.update()))
        1
        >>> base.weight.equal(model.weight)
        True
    """

    def __init__(self, model: nn.Module) -> None:
        self._export = find_engine(model).exporter(model, "DeltaPublisher.update()")
        self._chain = secrets.token_hex(16)
        self._last: tuple[int, Version] = 0, self._export()  # replaced as one, since other threads read it

    def update(self) -> DeltaUpdate:
        """Makes the next version, of what the model holds now; call it between optimizer steps.

        Returns:
            What changed since the last version: new entries with their positions, and new values of earlier ones. It
            is a snapshot where entries have left or changed their base or dtype, as after an earlier state was loaded.

        Raises:
            SparsifyError: as ``SparseDelta.from_model``, when trained values are not finite, say; the version stays.
        """
        number, before = self._last
        self._last = number + 1, self._export()
        return DeltaUpdate(self._chain, *self._last, before)

    def snapshot(self) -> DeltaUpdate:
        """The last version as a whole, for followers that lack the one before; any thread may call it."""
        return DeltaUpdate(self._chain, *self._last)


def _with_int32(patch: WeightPatch) -> WeightPatch:
    if patch.indices is None:
        return patch
    if patch.indices.numel() and int(patch.indices[-1]) > _MAX_INDEX:
        raise SparsifyError(f"`{patch.name}` has entries beyond position {_MAX_INDEX:,}, which int32 cannot hold.")
    return patch._replace(indices=patch.indices.to(torch.int32))
