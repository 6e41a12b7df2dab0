"""Where an inference engine keeps the entries of a checkpoint's tensors, asked of the engine's own loader of weights.

    delta --Layout--> entries of stored tensors --LoaderCopy--> entries of the engine's memory

The loader gets tensors of the meta device: what it copies into the engine's memory is the geometry of a view, and is
recorded instead of written. So tensors that are fused, padded or sharded need no table here.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sparsify.common.raw_bits import as_bits
from sparsify.delta.checkpoint.conversion import Layout
from sparsify.delta.checkpoint.reader import Checkpoint
from sparsify.errors import BaseMismatchError, SparsifyError, brief

_aten = torch.ops.aten
_COPIES = (_aten.clone.default, _aten._to_copy.default)  # move values at most
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)  # of padding, which stays as it is


class ServedModel(nn.Module):
    """A base as an engine has arranged it, with the names of ``from_pretrained``; deltas and subscribers take it.

    Args:
        model: the engine's model, with a method ``load_weights`` for names and tensors of the checkpoint.
        checkpoint: the path of the checkpoint that the engine has loaded.
        dtype: the dtype that the engine computes in.
        is_shard: whether other ranks have what is not found in this one.

    Attributes:
        found: a mask (count,) for each tensor whose base values were read: the entries that are in this memory.
    """

    def __init__(self, model: nn.Module, checkpoint: str, dtype: torch.dtype, *, is_shard: bool = False) -> None:
        super().__init__()
        self._model, self.checkpoint = (model,), Checkpoint(checkpoint)  # a tuple: it is no submodule
        self._dtype, self.is_shard = dtype, is_shard
        self._tensors: dict[str, ServedTensor] = {}
        self.found: list[Tensor] = []

    def find_targets(self, names: Iterable[str]) -> dict[str, Any]:
        """The tensors with these names; raises where the checkpoint lacks one, or the engine does not just copy it."""
        targets, (model,), stored = dict.fromkeys(names), self._model, self.checkpoint
        parts = (*model.named_parameters(), *model.named_buffers())
        memory = {part.untyped_storage().data_ptr(): name for name, part in parts if part.numel()}  # by address
        layouts = {name: stored.copies(name, stored.layout(name)) for name in targets if name not in self._tensors}
        keys = {key for own in layouts.values() for layout in own for key in layout.keys}
        recorded = self._ask_loader(keys, memory) if keys else {}
        self._tensors |= {name: ServedTensor(name, self, own, recorded) for name, own in layouts.items()}
        found = {name: self._tensors[name] for name in targets}
        first_names = {tensor.origin: name for name, tensor in reversed(found.items())}
        for name, tensor in found.items():
            if (first := first_names[tensor.origin]) != name:
                one = f"`{first}` and `{name}` are one tensor in the checkpoint (`{tensor.origin[0]}`)"
                raise BaseMismatchError(f"{one} and two in the delta: serve the base with these weights untied.")
            if not tensor.addresses <= memory.keys():
                raise SparsifyError(f"the engine has moved `{name}` to other memory since: start it anew.")
        return found

    def _ask_loader(self, keys: set[str], memory: dict[int, str]) -> "dict[str, list[LoaderCopy]]":
        shapes = {key: self.checkpoint.stored[key].shape for key in sorted(keys)}
        tensors = {key: torch.empty(shape, dtype=self._dtype, device="meta") for key, shape in shapes.items()}
        recorder, loader = _Recorder(tensors, memory), self._model[0]
        try:
            with torch.inference_mode(False), torch.no_grad(), recorder:
                loader.load_weights(list(tensors.items()))  # type: ignore[operator]
        except SparsifyError:
            raise
        except Exception as error:  # of the engine's code for hundreds of models
            problem = f"the engine's loader fails after `{recorder.last}` ({type(error).__name__}: {brief(error)})"
            raise BaseMismatchError(f"{problem}: it may have packed the weights. Serve them unquantized.") from error
        return recorder.recorded


class LoaderCopy(NamedTuple):
    """What the loader copies of a stored tensor, by its geometry there, and where it is in the engine's memory."""

    memory: Tensor  # (n,) all of a parameter's storage
    dims: list[tuple[int, int, int]]  # size, stride in the stored tensor, stride in memory; strides descend
    offset: int  # of the first entry in the stored tensor
    start: int  # of the first entry in memory

    @classmethod
    def of(cls, target: Tensor, source: Tensor) -> "LoaderCopy | None":
        """Of a copy of ``source`` into ``target``; ``None`` where an entry goes to several places."""
        every = sorted(zip(source.shape, source.stride(), target.stride(), strict=True), key=lambda dim: -dim[1])
        dims, reach = list[tuple[int, int, int]](), 0
        for size, stride, step in reversed([dim for dim in every if dim[0] != 1]):
            if stride <= reach:
                return None
            reach += (size - 1) * stride
            number, *inner = dims[0] if dims else (1, 0, 0)
            if inner == [stride / number, step / number]:  # two dimensions that are one, there and here
                dims[0] = (size * number, inner[0], inner[1])
            else:
                dims.insert(0, (size, stride, step))
        memory = target.detach().as_strided((target.untyped_storage().nbytes() // target.itemsize,), (1,), 0)
        return cls(memory, dims, int(source.storage_offset()), int(target.storage_offset()))

    def locate(self, indices: Tensor) -> tuple[Tensor | slice, Tensor]:
        """Numbers (k,) of those of the entries at flat, ascending indices (n,) that are here, and their positions."""
        end = self.offset + sum((size - 1) * stride for size, stride, _ in self.dims) + 1
        first, last = torch.searchsorted(indices, torch.tensor([self.offset, end])).tolist()
        rest = indices[first:last] - self.offset
        if [dim[1:] for dim in self.dims] == [(1, 1)]:
            return slice(first, last), rest + self.start
        positions, is_here = torch.full_like(rest, self.start), torch.ones_like(rest, dtype=torch.bool)
        for size, stride, step in self.dims:
            number = rest.div(stride, rounding_mode="floor") if stride > 1 else rest
            positions += number * step
            is_here &= number < size
            rest = rest - number * stride
        numbers = (is_here & (rest == 0)).nonzero().flatten()
        return numbers + first, positions[numbers]


class Place(NamedTuple):
    """Entries in one piece of memory: their positions (k,) there, on its device, and their numbers among all."""

    memory: Tensor
    positions: Tensor
    numbers: Tensor | slice  # (k,)

    def held(self) -> Tensor:
        return self.memory.index_select(0, self.positions)

    def of(self, values: Tensor) -> Tensor:
        """Those of all entries' values (n,) that go here, as they are kept here."""
        return values.reshape(-1)[self.numbers].to(self.memory.device, self.memory.dtype)


class ServedTensor:
    """A tensor of the base wherever the engine keeps its entries, with the tensor methods that patch plans use."""

    device = torch.device("cpu")

    def __init__(self, name: str, model: ServedModel, layouts: list[Layout], made: dict[str, list[LoaderCopy]]) -> None:
        self._name, self._model, self._layouts, self._copies = name, model, layouts, made
        self.shape, self.dtype = layouts[0].shape, model.checkpoint.dtype(layouts[0])
        self.origin = layouts[0].windows[0].key, layouts[0].windows[0].place.storage_offset()
        memories = [copy.memory for layout in layouts for key in layout.keys for copy in made[key]]
        self.addresses = {memory.untyped_storage().data_ptr() for memory in memories}
        self._is_as_stored = all(memory.dtype == self.dtype for memory in memories)
        self._last: tuple[Tensor | None, list[Place]] = None, []

    def take(self, indices: Tensor) -> Tensor:
        """The base's values (n,), of memory or, where that has not all, or in another dtype, of the checkpoint.

        What memory has is compared by :meth:`holds` before a plan is carried out.
        """
        found, values = torch.zeros(len(indices), dtype=torch.bool), torch.empty(len(indices), dtype=self.dtype)
        for place in self._places(indices):
            found[place.numbers] = True
            values[place.numbers] = place.held().to("cpu", self.dtype)
        is_whole = bool(found.all())
        if not (is_whole or self._model.is_shard):
            missing = f"{int((~found).sum()):,} of {len(found):,} entries of `{self._name}`"
            raise BaseMismatchError(f"the engine has no place for {missing}: it leaves the tensor out, or has tied it.")
        self._model.found.append(found)
        return values if is_whole and self._is_as_stored else self._model.checkpoint.take(self._layouts[0], indices)

    def holds(self, indices: Tensor | None, values: Tensor) -> bool:
        """Whether the entries that are in this memory have these values, in the dtype there."""
        return all(torch.equal(as_bits(own.held()), as_bits(own.of(values))) for own in self._places(indices))

    def put(self, indices: Tensor | None, values: Tensor) -> None:
        for place in self._places(indices):
            place.memory.index_copy_(0, place.positions, place.of(values))

    def detach(self) -> Tensor:
        """All of the base's values, as a tensor."""
        return self.take(torch.arange(self.shape.numel())).view(self.shape)

    def _places(self, indices: Tensor | None) -> list[Place]:
        """Where entries at flat, ascending indices (n,) are, or all entries."""
        if indices is None or indices is not self._last[0]:
            every, places = torch.arange(self.shape.numel()) if indices is None else indices, []
            for part in (part for layout in self._layouts for part in layout.locate(every)):
                for copy in self._copies[part.key]:
                    numbers, positions = copy.locate(part.indices)
                    entries = numbers if isinstance(part.entries, slice) else part.entries[numbers]
                    places.append(Place(copy.memory, positions.to(copy.memory.device), entries))
            self._last = indices, places
        return self._last[1]


class _Recorder(TorchDispatchMode):
    """Records what a loader copies into a model's memory, and carries out no write to that."""

    def __init__(self, tensors: dict[str, Tensor], memory: dict[int, str]) -> None:
        super().__init__()
        self._keys = {tensor.untyped_storage()._cdata: key for key, tensor in tensors.items()}
        self._memory, self.last = memory, ""  # the stored tensor that the loader has turned to
        self.recorded: dict[str, list[LoaderCopy]] = {key: [] for key in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = [self._keys.get(tensor.untyped_storage()._cdata) for tensor in tensors]
        self.last = next(filter(None, keys), self.last)
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        outputs = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = [leaf for name in outputs for leaf in tree_leaves(given.get(name)) if isinstance(leaf, Tensor)]
        own = next(filter(None, (self._memory.get(leaf.untyped_storage().data_ptr()) for leaf in written)), None)
        if func is _aten.copy_.default and keys[-1] and not keys[0]:
            self._record(tensors[0], tensors[1], own)
            return args[0]
        if any(keys) and func not in _COPIES and not func.is_view:
            raise self._refusal(f"{func}, which changes values or looks at them")
        if own and func not in _FILLS:
            raise self._refusal(f"{func} on its own `{own}`")
        # a copy is the tensor itself, whose geometry it would have lost
        return args[0] if own or (any(keys) and func in _COPIES) else func(*args, **kwargs or {})

    def _record(self, target: Tensor, source: Tensor, own: str | None) -> None:
        copy = LoaderCopy.of(target, source.expand(target.shape))
        if own is None or copy is None:
            where = "to other memory than the model's" if own is None else "of single entries to several places"
            raise self._refusal(f"a copy {where}")
        if not target.dtype.is_floating_point or target.itemsize < 2:
            raise self._refusal(f"a copy to {target.dtype}, so the model is quantized")
        self.recorded[self.last].append(copy)

    def _refusal(self, how: str) -> BaseMismatchError:
        problem = f"the engine's loader does more to `{self.last}` than to move its values: {how}"
        return BaseMismatchError(f"{problem}. Serve the model unquantized, or leave this tensor out of the training.")
