"""The engine of a sparsified model: what it is made of, and what happens at each event of its training.

    forward     the weights are refreshed, each use of a tensor gets its anchor           ``weights.py``, ``anchors.py``
    backward    gradients are collected, winners unmasked, the flat gradient returned    ``collection.py``
    step        base + delta is written into the weights                                 ``weights.py``

All state is parameters and buffers of the model: ``sparse_values`` (capacity,), the flat delta on the root;
``sparse_position`` (2,) int64, the optimizer steps done and the entries updated by them; and the index buffers, on the
root too. This object holds settings and what lives for a single step.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from sparsify.anchors import AnchoredUse
from sparsify.collection import Collection
from sparsify.compiled import CompiledGraphs
from sparsify.counters import Counters
from sparsify.draws import Draw
from sparsify.export import Export, digest_buffers, export
from sparsify.index_buffers import BUFFERS, IndexBuffers, upload
from sparsify.masked.tensor import MaskedTensor
from sparsify.ranks import Ranks
from sparsify.schedules import Schedule
from sparsify.sharding import read_base
from sparsify.stepping import listen
from sparsify.strategies import Strategy
from sparsify.values import VALUES, SparseValues
from sparsify.verification import Verification, verify
from sparsify.weights import EffectiveWeights

POSITION = "sparse_position"
STATE = (VALUES, POSITION, *BUFFERS)  # what the root's state dict has beside the model's own


class Unmasker:
    """Trains a model at ``budget`` of its entries; reached by :func:`sparsify.get_unmasker`.

    Args:
        root: the model.
        strategy: which entries to unmask.
        budget: how many, in entries.
        schedule: how the unmasked set grows.
        steps: planned number of optimizer steps; may be set later, before the first backward.
        seed: of a random importance.
        accumulation: ``"first"`` or ``"exact"``: which micro-batches of a step its entries are chosen by.
        dense_names: parameters that are trained dense and stored whole.
        frozen_names: parameters that were trainable before and are frozen as long as the model is sparsified.
        sync_mode: how several ranks choose the same entries: ``"exact"`` or ``"candidates"``.

    Attributes:
        tensors: the masked tensors, by ascending number and offset.
        buffers: their unmasked entries.
        fresh_names: parameters, dense ones apart, that the base does not have.
        draws: how the initial values of some of these are drawn, and the digest of them.
        step: optimizer steps done.
        updates: entry updates done, the trained entries summed over the steps.
        base_digests: what the base was, for :meth:`verify`.
        running: whether the root is in its forward.
        weights: keeps the effective values in step.
        collection: takes the gradients.
        ranks: the other ranks, if there are any.
        counters: how many entries were looked at to choose, and in which way.
        check: whether each step's selection is compared with the dense form, which takes its time and memory.
    """

    def __init__(
        self,
        root: nn.Module,
        strategy: Strategy,
        budget: int,
        schedule: Schedule,
        steps: int | None,
        seed: int = 0,
        *,
        accumulation: str = "first",
        dense_names: tuple[str, ...] = (),
        frozen_names: tuple[str, ...] = (),
        sync_mode: str = "exact",
    ) -> None:
        self.root = root
        self.strategy = strategy
        self.budget = budget
        self.schedule = schedule
        self.steps = steps
        self.seed = seed
        self.accumulation = accumulation
        self.dense_names = dense_names
        self.frozen_names = frozen_names
        self.sync_mode = sync_mode
        self.buffer_digests = digest_buffers(root)
        self.base_digests: dict[str, tuple[torch.dtype, str]] = {}
        self.tensors: list[MaskedTensor] = []
        self.buffers = IndexBuffers(root)
        self.fresh_names: tuple[str, ...] = ()
        self.draws: dict[str, tuple[Draw, str]] = {}
        self.step = 0
        self.updates = 0
        self.running = False
        self.ranks = Ranks()
        self.counters = Counters()
        self.check = False
        self.weights = EffectiveWeights(self)
        self.collection = Collection(self)

    # -------------------------------------------------------------------------------- state

    @property
    def values(self) -> SparseValues:
        """(capacity,) the flat delta; looked up by name, since ``load_state_dict(assign=True)`` replaces it."""
        values = self.root._parameters[VALUES]
        if type(values) is nn.Parameter:
            values.__class__ = SparseValues
        return values  # type: ignore[return-value]

    @property
    def unmasked(self) -> int:
        """Number of entries unmasked so far; their slots are 0 to ``unmasked - 1``."""
        return self.buffers.total

    @property
    def capacity(self) -> int:
        """Number of entries that there is room for: the budget, or more where repeat-S touches more."""
        return self.values.numel()

    @property
    def trained(self) -> int:
        """Number of entries that the step in progress trains."""
        active = self.collection.growth.active
        return self.unmasked if active is None else int(active.sum())

    @property
    def growing(self) -> bool:
        """Whether entries may still be unmasked, those of the step in progress among them."""
        return self.collection.growing

    @property
    def compiled(self) -> CompiledGraphs:
        """Its part in compiled graphs."""
        return self.collection.compiled

    @property
    def selected(self) -> bool:
        """Whether the step in progress has had its selection."""
        return self.collection.selected

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        listen(self)

    # -------------------------------------------------------------------------------- forward

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 has the weights."""
        return self.weights.sharded

    @property
    def in_forward(self) -> bool:
        """Whether a weight that is read is a weight that is used: in the root's forward, or a recomputed part of it."""
        return self.running or torch._C._current_graph_task_id() != -1

    def use(self, tensor: MaskedTensor) -> AnchoredUse | None:
        """Announces a use of a tensor in a forward pass; ``None`` where no gradient will be collected."""
        if self.weights.are_base or not torch.is_grad_enabled():
            return None
        values = self.values
        if not values.requires_grad or not (tensor.count or self.growing):
            return None
        tensor.check_shape()
        return self.collection.anchors.use(tensor, values)

    def enter(self) -> None:
        """The root's forward begins: the weights are in step, and there is a root anchor for its compiled parts."""
        if torch.compiler.is_dynamo_compiling():
            self.compiled.enter()
        else:
            self.weights.freeze()
            self.refresh()
            self.compiled.make_root()
        self.running = True

    def leave(self) -> None:
        """The root's forward has ended, or failed."""
        self.compiled.leave()
        self.running = False

    # -------------------------------------------------------------------------------- unmasking

    def append(self, ids: Tensor, slots: Tensor) -> None:
        """Adds entries (n,) given by global id to the index buffers; their current values are the base."""
        values = self.values.detach()
        ids, order = ids.sort()
        slots = slots[order]
        ends = upload([tensor.offset + tensor.numel for tensor in self.tensors], ids.device)
        sizes = torch.searchsorted(ids, ends).diff(prepend=ids.new_zeros(1)).tolist()
        indices = [own - tensor.offset for tensor, own in zip(self.tensors, ids.split(sizes), strict=True)]
        if self.weights.sharded:
            first = int(slots.min()) if slots.numel() else 0
            self.buffers.append(sizes, torch.cat(indices), slots, values.new_zeros(ids.numel()))
            torch.autograd.Variable._execution_engine.queue_callback(lambda: read_base(self, first))
            return
        base = [
            tensor.take(own.to(tensor.parameter.device)).to(values)
            for tensor, own in zip(self.tensors, indices, strict=True)
            if own.numel()
        ]
        self.buffers.append(sizes, torch.cat(indices), slots, torch.cat(base) if base else values[:0])
        self._find_dormant()

    def _find_dormant(self) -> None:
        for tensor in self.tensors if self.collection.growth.static else ():
            tensor.dormant = not tensor.count

    # -------------------------------------------------------------------------------- step

    def optimizer_stepped(self) -> None:
        """Counts an optimizer step and writes the new deltas into the weights."""
        self.weights.check_trained("optimizer.step()")
        self.step += 1
        self.updates += self.trained
        self.counters.step_done()
        self.collection.step_done()
        position = self.root._buffers[POSITION]
        assert position is not None
        position.copy_(upload([self.step, self.updates], position.device))
        self.weights.write()

    def refresh(self) -> None:
        """The weights are in step with the flat delta."""
        self.weights.refresh()
        self.collection.streams.use(self.values.device)

    @torch.no_grad()
    def state_loaded(self, plain: set[MaskedTensor]) -> None:
        """Brings everything in step after a state dict was loaded.

        Args:
            plain: tensors whose weight was loaded without index buffers, as from a merged checkpoint. What was loaded
                is what runs: their delta becomes weight minus base.
        """
        self.buffers.loaded()
        position = self.root._buffers[POSITION]
        assert position is not None
        self.step, self.updates = (int(number) for number in position.tolist())
        self.collection.restart()
        self._find_dormant()
        if plain and not self.unmasked:
            warnings.warn(
                "weights were loaded without index buffers into a sparsified model that has nothing unmasked: they are "
                "its base now. To go on with an earlier run, load its whole state_dict(), buffers included; the "
                "checkpoints of the Hugging Face Trainer have them where it was given SparsifyCallback.",
                stacklevel=4,
            )
        values = self.values
        for tensor in plain:
            values[tensor.slots.to(values.device)] = (
                tensor.effective.to(values.dtype) - tensor.base.to(values.dtype)
            ).to(values)
        self.weights.write(but=plain)

    def verify(self) -> Verification:
        """Whether the frozen entries are the base's, and as many unmasked as planned."""
        self._prepare("summary(verify=True)")
        return verify(self)

    def export(self, budget: int | None = None) -> Export:
        """What was learned: the first ``budget`` unmasked entries, and what is stored whole."""
        self._prepare("SparseDelta.from_model()")
        return export(self, budget)

    def _prepare(self, call: str) -> None:
        """The trained weights can be read."""
        self.weights.check_trained(call)
        self.weights.refresh()
        self.weights.reshard()
