"""Where an inference engine keeps the entries of a checkpoint's tensors, asked of the engine's own loader of weights.

    delta --Layout--> entries of stored tensors --Window--> entries of the engine's memory

The loader gets tensors of the meta device: what it copies into the engine's memory is the geometry of a view, and is
recorded instead of written. So tensors that are fused, padded or sharded need no table here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsify.common.names import near_names
from sparsify.common.raw_bits import as_bits
from sparsify.delta.checkpoint.conversion import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.errors import BaseMismatchError, SparsifyError, brief

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)  # which move values at most
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)  # of padding, which stays as it is


class ServedModel(nn.Module):
    """A base as an engine has arranged it in memory, for deltas, :class:`DeltaSubscriber` and :class:`DeltaSwitch`.

    Tensors have the names, shapes and dtypes of the checkpoint, as ``from_pretrained`` makes them.

    Args:
        model: the engine's model, with a method ``load_weights`` that takes names and tensors of the checkpoint.
        checkpoint: the path of the checkpoint that the engine has loaded.
        dtype: that the engine computes in: its loader gets tensors of it, which it need not cast.
        is_shard: whether other ranks have what is not found here; :attr:`found` then says what was.

    Attributes:
        found: a mask (count,) for each tensor whose base values were read: the entries that are in this memory.
    """

    def __init__(self, model: nn.Module, checkpoint: str, dtype: torch.dtype, *, is_shard: bool = False) -> None:
        super().__init__()
        self._model, self._checkpoint = (model,), Checkpoint(checkpoint)  # no submodule
        self._dtype, self._is_shard = dtype, is_shard
        self._tensors: dict[str, ServedTensor] = {}
        self.found: list[Tensor] = []

    def find_targets(self, names: Iterable[str]) -> dict[str, Any]:
        """The tensors with these names; raises where the checkpoint lacks one, or the loader's copies are not plain."""
        names = list(names)
        memory = _memory(self._model[0])
        if new := [name for name in names if name not in self._tensors]:
            layouts = {name: self._checkpoint.copies(name, self._checkpoint.layout(name)) for name in new}
            keys = dict.fromkeys(key for own in layouts.values() for layout in own for key in layout.keys)
            windows = self._ask_loader(list(keys), memory)
            for name, own in layouts.items():
                self._tensors[name] = ServedTensor(name, own, windows, self._checkpoint, self._note)
        first_names: dict[object, str] = {}
        for name in names:
            tensor = self._tensors[name]
            if (first := first_names.setdefault(tensor.origin, name)) != name:
                one = f"`{first}` and `{name}` are one tensor in the checkpoint (`{tensor.origin[0]}`)"
                raise BaseMismatchError(f"{one} and two in the delta: serve the base with these weights untied.")
            if not tensor.addresses <= memory.keys():
                raise SparsifyError(f"the engine has moved `{name}` to other memory since: start it anew.")
        return {name: self._tensors[name] for name in names}

    def _ask_loader(self, keys: Sequence[str], memory: dict[int, str]) -> dict[str, list[Window]]:
        shapes = {key: self._checkpoint.stored[key].shape for key in keys}
        tensors = {key: torch.empty(shape, dtype=self._dtype, device="meta") for key, shape in shapes.items()}
        survey = _Survey(tensors, memory)
        loader: Any = self._model[0]
        try:
            with torch.inference_mode(False), torch.no_grad(), survey:
                loader.load_weights(list(tensors.items()))
        except SparsifyError:
            raise
        except Exception as error:  # of the engine's code for hundreds of models
            at = f" (at `{survey.last}`)" if survey.last else ""
            problem = f"the engine's loader does not take weights any more{at}: {type(error).__name__} {brief(error)}"
            raise BaseMismatchError(f"{problem}. It may have packed them: serve the model unquantized.") from error
        return survey.windows

    def _note(self, name: str, mask: Tensor) -> None:
        if not self._is_shard and not bool(mask.all()):
            missing = f"{int((~mask).sum()):,} of {mask.numel():,} entries of `{name}`"
            near = near_names(name, _memory(self._model[0]).values())
            raise BaseMismatchError(f"the engine has no place for {missing}{near}: its model leaves that tensor out.")
        self.found.append(mask)


class Window(NamedTuple):
    """A part of a stored tensor, by size, stride and offset, and where its entries are in the engine's memory."""

    memory: Tensor  # (n,) all of a parameter's storage
    dims: tuple[tuple[int, int, int], ...]  # size, stride in the stored tensor, stride in memory; strides descend
    offset: int  # of the first entry in the stored tensor
    start: int  # of the first entry in memory

    @classmethod
    def of(cls, target: Tensor, source: Tensor) -> Window | None:
        """The window of a copy of ``source`` into ``target``; ``None`` where single entries cannot be followed."""
        dims: list[tuple[int, int, int]] = []
        every = zip(source.shape, source.stride(), target.stride(), strict=True)
        for size, stride, step in sorted((dim for dim in every if dim[0] != 1), key=lambda dim: -dim[1]):
            if dims and (dims[-1][1], dims[-1][2]) == (size * stride, size * step):
                dims[-1] = dims[-1][0] * size, stride, step  # two dimensions that are one in both
            else:
                dims.append((size, stride, step))
        spans = [(size - 1) * stride for size, stride, _ in dims]
        if any(stride <= sum(spans[number + 1 :]) for number, (_, stride, _) in enumerate(dims)):
            return None  # an entry is copied to several places
        memory = target.detach().as_strided((target.untyped_storage().nbytes() // target.itemsize,), (1,), 0)
        return cls(memory, tuple(dims), int(source.storage_offset()), int(target.storage_offset()))

    def locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers (k,) of those of the entries at flat, ascending indices (n,) that are here, and their positions."""
        end = self.offset + sum((size - 1) * stride for size, stride, _ in self.dims) + 1
        first, last = torch.searchsorted(indices, torch.tensor([self.offset, end])).tolist()
        rest = indices[first:last] - self.offset
        positions, is_here = torch.full_like(rest, self.start), torch.ones_like(rest, dtype=torch.bool)
        for size, stride, step in self.dims:
            number = rest if stride == 1 else rest.div(stride, rounding_mode="floor")
            positions += number * step
            is_here &= number < size
            rest = rest - number * stride
        numbers = (is_here & (rest == 0)).nonzero().flatten()
        return numbers + first, positions[numbers]


class Place(NamedTuple):
    """Entries in one piece of the engine's memory."""

    memory: Tensor
    positions: Tensor  # (k,) on the memory's device
    numbers: Tensor  # (k,) of the entries among those that were looked for, on the CPU


class ServedTensor:
    """A tensor of the base wherever the engine keeps its entries, with the tensor methods that patch plans use."""

    device, is_meta = torch.device("cpu"), False

    def __init__(
        self, name: str, layouts: list[Layout], windows: dict[str, list[Window]], checkpoint: Checkpoint,
        note: Callable[[str, Tensor], None],
    ) -> None:  # fmt: skip
        self._name, self._layouts, self._windows, self._note = name, layouts, windows, note
        self._checkpoint = checkpoint
        self.shape, self.dtype = layouts[0].shape, checkpoint.dtype(layouts[0])
        first = layouts[0].windows[0]
        self.origin = first.key, first.place.storage_offset()
        memories = [window.memory for layout in layouts for key in layout.keys for window in windows[key]]
        self.addresses = {memory.untyped_storage().data_ptr() for memory in memories}
        self._same_dtype = all(memory.dtype == self.dtype for memory in memories)
        self._last: tuple[Tensor, list[Place]] = torch.empty(0), []

    def take(self, indices: Tensor) -> Tensor:
        """The base's values (n,), from memory where all of them are there as in the checkpoint, otherwise from that.

        :meth:`holds` compares the two before anything is written.
        """
        found = torch.zeros(indices.numel(), dtype=torch.bool)
        places = self._places(indices)
        for place in places:
            found[place.numbers] = True
        self._note(self._name, found)
        if not (self._same_dtype and bool(found.all())):
            return self._checkpoint.take(self._layouts[0], indices)
        values = torch.empty(indices.numel(), dtype=self.dtype)
        for place in places:
            values[place.numbers] = place.memory[place.positions].cpu()
        return values

    def holds(self, indices: Tensor | None, values: Tensor) -> bool:
        """Whether the entries that are in this memory have these values, in the dtype there."""
        return all(
            torch.equal(as_bits(place.memory[place.positions]), as_bits(_moved(values, place)))
            for place in self._places(indices)
        )

    def put(self, indices: Tensor | None, values: Tensor) -> None:
        for place in self._places(indices):
            place.memory.index_copy_(0, place.positions, _moved(values, place))

    def copy_(self, values: Tensor) -> None:
        self.put(None, values)

    def detach(self) -> Tensor:
        """All of the base's values, as a tensor."""
        return self.take(torch.arange(self.shape.numel())).view(self.shape)

    def _places(self, indices: Tensor | None) -> list[Place]:
        """Where entries at flat, ascending indices (n,) are, or all entries."""
        if indices is not None and indices is self._last[0]:
            return self._last[1]
        looked_for = torch.arange(self.shape.numel()) if indices is None else indices
        places = []
        for part in (part for layout in self._layouts for part in layout.locate(looked_for)):
            for window in self._windows[part.key]:
                numbers, positions = window.locate(part.indices)
                if numbers.numel():
                    places.append(Place(window.memory, positions.to(window.memory.device), part.entries[numbers]))
        if indices is not None:
            self._last = indices, places
        return places


class _Survey(TorchDispatchMode):
    """Records what a loader copies into a model's memory, and carries out no write to that."""

    def __init__(self, tensors: dict[str, Tensor], memory: dict[int, str]) -> None:
        super().__init__()
        self._keys = {tensor.untyped_storage()._cdata: key for key, tensor in tensors.items()}
        self._memory = memory
        self.windows: dict[str, list[Window]] = {key: [] for key in tensors}
        self.last = ""  # tensor that the loader has turned to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        keys = [self._key(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.last = next(filter(None, keys), self.last)
        if func is _aten.copy_.default and self._key(args[1]) and not self._key(args[0]):
            self._record(*args[:2])
            return args[0]
        if any(keys):
            if func in _COPIES:
                return args[0]  # the tensor itself, whose geometry a copy would lose
            if not func.is_view:
                raise self._refusal(f"{func}, which changes values or looks at them")
        elif written := [args[0] for _ in args[:1] if func._schema.is_mutable and self._name(args[0])]:
            if func not in _FILLS:
                raise self._refusal(f"{func} on its own `{self._name(written[0])}`")
            return written[0]
        return func(*args, **kwargs)

    def _record(self, target: Tensor, source: Tensor) -> None:
        if self._name(target) is None:
            raise self._refusal("a copy in other memory than the model's")
        source = source if source.shape == target.shape else source.expand(target.shape)
        if (window := Window.of(target, source)) is None:
            raise self._refusal("a copy of single entries to several places")
        if not target.dtype.is_floating_point or target.itemsize < 2:
            raise self._refusal(f"a copy to {target.dtype}, so the model is quantized")
        self.windows[self.last].append(window)

    def _key(self, tensor: Any) -> str | None:
        return self._keys.get(tensor.untyped_storage()._cdata) if isinstance(tensor, Tensor) else None

    def _name(self, tensor: Any) -> str | None:
        is_real = isinstance(tensor, Tensor) and not tensor.is_meta
        return self._memory.get(tensor.untyped_storage().data_ptr()) if is_real else None

    def _refusal(self, how: str) -> BaseMismatchError:
        problem = f"the engine's loader does more to `{self.last}` than to move its values: {how}"
        return BaseMismatchError(f"{problem}. Serve the model unquantized, or leave this tensor out of the training.")


def _memory(model: nn.Module) -> dict[int, str]:
    """The names of a model's parameters and buffers by the addresses of their storages."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors if tensor.numel()}


def _moved(values: Tensor, place: Place) -> Tensor:
    return values.reshape(-1)[place.numbers].to(place.memory.device, place.memory.dtype)
