"""Recomputes a layer's input in backward, instead of saving it.

    h --> activation, or layer norm --> x --> linear layer

The layer's weight gradient needs x, the activation's own gradient needs h. Autograd keeps h as long as x could be
needed, so x is computed a second time in backward, by the same operation on the same numbers, and never saved.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsify.common.shards import is_fully_sharded
from sparsify.core.module import NOTHING, MaskedModule, masked_tensors

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: the weight of a "
    "masked layer, as by an optimizer step between forward and backward. Compute the loss again."
)
LARGEST_KEPT = 1 << 22  # numbers of an input that is saved where computing it again takes more of the host
_EPS = "sparsify_eps"  # in the metadata of a layer norm's node, which does not save it
_MARK = "sparsify_mark"  # in the metadata of any node: identifies it without keeping its graph alive


def _layer_norm(node: Any) -> Tensor:
    saved = node._saved_input, node._saved_normalized_shape, node._saved_weight, node._saved_bias
    return torch.native_layer_norm(*saved, node.metadata[_EPS])[0]


# name of an operation's autograd node -> the inputs that the node saves, and the operation
_OPERATIONS: dict[str, tuple[tuple[str, ...], Callable[[Any], Tensor]]] = {
    "GeluBackward0": (("_saved_self",), lambda node: F.gelu(node._saved_self, approximate=node._saved_approximate)),
    "SiluBackward0": (("_saved_self",), lambda node: F.silu(node._saved_self)),
    # the product of a gated block, and the last operation of an activation that is written out in Python
    "MulBackward0": (("_saved_self", "_saved_other"), lambda node: node._saved_self * node._saved_other),
    "NativeLayerNormBackward0": (("_saved_input",), _layer_norm),
}

# the last input that a thread recomputed in a stream, with the backward pass and its node's mark: queries, keys and
# values share one. Autograd runs the nodes of a GPU in one thread, in streams that do not wait for each other
_LAST: dict[tuple[int, int], tuple[int, object, Tensor]] = {}


def release_memory() -> None:
    """Frees what the running backward pass has recomputed, in all its threads."""
    graph = torch._C._current_graph_task_id()
    for place, (owner, *_) in list(_LAST.items()):
        if owner == graph:
            _LAST.pop(place, None)


class MaskedLayerNorm(MaskedModule, nn.LayerNorm):
    """An ``nn.LayerNorm`` that records its epsilon in its output's node, so that it can be recomputed.

    Not under FSDP2, which may have freed the norm's weight when a layer in another block computes its input again.
    """

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        if torch.compiler.is_dynamo_compiling() or output.grad_fn is None:
            return output
        tensor = next(iter(masked_tensors(self).values()))
        if not is_fully_sharded(tensor.collector.entries.root):
            node: Any = output.grad_fn
            node.metadata[_EPS] = self.eps
        return output


def recomputable(x: Tensor) -> Callable[[], Tensor] | None:
    """Returns a function that recomputes ``x`` in backward, bit for bit; ``None`` where ``x`` has to be saved."""
    node: Any = x.grad_fn
    # a version beyond 0 tells of writes that autograd does not know of, as through detach(). Where hooks pack saved
    # tensors, now or when x was made (checkpointing, offloading), these may be unpacked only once
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if node is None or x._version or not x.is_contiguous() or hooks is not None:
        return None
    inputs, make = _OPERATIONS.get(node.name(), ((), None))
    if make is None or (make is _layer_norm and _EPS not in node.metadata):
        return None
    try:
        for name in inputs:
            raw = getattr(node, f"_raw{name}")
            # hooks may have packed what is saved, and are assumed where an older torch does not tell
            if getattr(raw, "unpack_hook", "unknown") is not None or getattr(node, name) is None:
                return None
    except RuntimeError:  # a backward pass through x is over, and has freed its node's tensors
        return None
    device, mark = x.device, node.metadata.setdefault(_MARK, object())

    def again() -> Tensor:
        stream = torch.accelerator.current_stream(device).stream_id if device.type == "cuda" else 0
        place = threading.get_ident(), stream
        last = _LAST.get(place)
        if last is None or last[1] is not mark:
            _LAST.pop(place, None)  # before the next is allocated
            del last
            last = _LAST[place] = torch._C._current_graph_task_id(), mark, make(node)
        return last[2]

    return again


def saving(x: Tensor, short: Tensor, *, always: bool) -> AbstractContextManager[object]:
    """A context for a layer of ``x``, cast to ``short``: where it can, autograd saves how to compute that again.

    If not ``always``, it saves a small ``x`` itself: a GPU computes it in less time than Python takes to ask for it.
    """
    again = recomputable(x) if always or x.numel() > LARGEST_KEPT else None
    if again is None:
        return NOTHING
    address, dtype = short.data_ptr(), short.dtype

    def pack(saved: Tensor) -> Any:
        shape = saved.shape
        return (lambda: again().to(dtype).view(shape)) if saved.data_ptr() == address else (saved, saved._version)

    def unpack(packed: Any) -> Tensor:
        if callable(packed):
            return packed()
        weight, version = packed
        if weight._version != version:  # autograd does not look where a hook has packed a tensor
            raise RuntimeError(MODIFIED)
        return weight

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
