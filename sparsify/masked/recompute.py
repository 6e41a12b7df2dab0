"""Recomputes a layer's input in backward, instead of saving it.

    h --> activation --> x --> linear layer

The layer's weight gradient needs x, the activation's own gradient needs h. Autograd keeps h as long as x could be
needed, so x is computed a second time in backward, by the same operation on the same numbers, and never saved. The same
is done behind a layer norm. A transformer's block then saves next to nothing for its weights' gradients, as when its
layers are frozen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsify.common.shards import is_fully_sharded
from sparsify.core.module import masked_tensors

_ATEN = torch.ops.aten
Maker = Callable[[Callable[[], Tensor]], Tensor]  # recomputes a tensor, optionally into the buffer that it is given
_EPS = "sparsify_eps"  # in the metadata of a layer norm's node, which does not save it
_MARK = "sparsify_mark"  # in the metadata of any node: identifies it without keeping its graph alive


def _layer_norm(node: Any, _: Callable[[], Tensor]) -> Tensor:
    # the ``out`` form computes it elsewhere, and copies
    values: Tensor = torch.native_layer_norm(
        node._saved_input, node._saved_normalized_shape, node._saved_weight, node._saved_bias, node.metadata[_EPS]
    )[0]
    return values


# name of an operation's autograd node -> the inputs that the node saves, and the operation, given a buffer
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[Any, Callable[[], Tensor]], Tensor]]] = {
    "GeluBackward0": (
        ("_saved_self",),
        lambda node, empty: _ATEN.gelu.out(node._saved_self, approximate=node._saved_approximate, out=empty()),
    ),
    "SiluBackward0": (("_saved_self",), lambda node, empty: _ATEN.silu.out(node._saved_self, out=empty())),
    # the product of a gated block, and the last operation of an activation that is written out in Python
    "MulBackward0": (
        ("_saved_self", "_saved_other"),
        lambda node, empty: _ATEN.mul.out(node._saved_self, node._saved_other, out=empty()),
    ),
    "NativeLayerNormBackward0": (("_saved_input",), _layer_norm),
}


class _Memory:
    """The buffer in which a thread recomputes inputs, one after the other: allocated once in a backward pass.

    It belongs to one backward pass and one stream at a time. Autograd runs the nodes of a GPU in one thread, where
    several passes may alternate, and several streams that do not wait for each other.
    """

    owner: tuple[int, torch.Stream | None] = (-1, None)  # the backward pass and the stream
    buffer: Tensor | None = None
    made: tuple[object, Tensor] | None = None  # the last input and its node's mark; queries, keys and values share one

    def clear(self) -> None:
        self.buffer = self.made = None

    def empty(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        nbytes, buffer = shape.numel() * dtype.itemsize, self.buffer
        if buffer is None or buffer.nbytes < nbytes or buffer.device != device:
            buffer = self.buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return buffer[:nbytes].view(dtype).view(shape)


_MEMORIES: dict[int, _Memory] = {}  # by thread


def _memory(device: torch.device) -> _Memory:
    """Returns this thread's memory for the running backward pass on a device."""
    memory = _MEMORIES.setdefault(threading.get_ident(), _Memory())
    stream = torch.accelerator.current_stream(device) if device.type == "cuda" else None
    owner = torch._C._current_graph_task_id(), stream
    if memory.owner != owner:
        memory.clear()
        memory.owner = owner
    return memory


def release_memory() -> None:
    """Frees the memory of the running backward pass, in all its threads.

    A thread that turns to another pass meanwhile keeps its tensors and allocates again the next time.
    """
    graph = torch._C._current_graph_task_id()
    for memory in list(_MEMORIES.values()):
        if memory.owner[0] == graph:
            memory.clear()


def note_epsilon(module: Any, args: Any, output: Tensor) -> None:
    """Forward hook: records an ``nn.LayerNorm``'s epsilon in its output's node, so that it can be recomputed.

    Not of a weight that FSDP2 has sharded, which it may have freed when a layer behind it, in another block, computes
    its input again.
    """
    if torch.compiler.is_dynamo_compiling() or output.grad_fn is None:
        return
    if not any(is_fully_sharded(tensor.collector.entries.root) for tensor in masked_tensors(module).values()):
        node: Any = output.grad_fn
        node.metadata[_EPS] = module.eps


def recomputable(x: Tensor) -> Callable[[], Tensor] | None:
    """Returns a function that recomputes ``x`` in a backward pass, bit for bit; ``None`` where ``x`` has to be saved.

    The recomputed tensor is valid until the next one is recomputed.
    """
    node: Any = x.grad_fn
    # a version beyond 0 tells of writes that autograd does not know of, as through detach(). Where hooks pack saved
    # tensors, now or when x was made (checkpointing, offloading), these may be unpacked only once
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if node is None or x._version or not x.is_contiguous() or hooks is not None:
        return None
    try:
        make = _operation(node)
    except RuntimeError:  # a backward pass through x is over, and has freed its node's tensors
        return None
    if make is None:
        return None

    shape, dtype, device, mark = x.shape, x.dtype, x.device, node.metadata.setdefault(_MARK, object())

    def again() -> Tensor:
        memory = _memory(device)
        made = memory.made
        if made is None or made[0] is not mark:
            memory.made = None
            with torch.no_grad():
                made = memory.made = mark, make(lambda: memory.empty(shape, dtype, device))
        return made[1]

    return again


def _operation(node: Any) -> Maker | None:
    """Recomputes an operation from the inputs that its node saves."""
    inputs, operation = _OPERATIONS.get(node.name(), ((), None))
    if operation is None or any(_is_packed(getattr(node, f"_raw{n}")) or getattr(node, n) is None for n in inputs):
        return None
    if operation is _layer_norm and _EPS not in node.metadata:
        return None
    return lambda empty: operation(node, empty)


def _is_packed(saved: Any) -> bool:
    """Whether hooks have packed a saved tensor; assumed where an older torch does not tell."""
    return getattr(saved, "unpack_hook", "unknown") is not None
