"""Compiled graphs: a root anchor while they are compiled, and the uses of tensors that they announce as they run.

    compiled   the root anchor is an input of every use in the graph, and stays the same as long as the flat delta does
    forward    each use is counted
    backward   each use hands over its gradient, and its number is taken back

A graph that is dropped leaves its numbers behind until the next optimizer step: sums wait for the end of a backward
pass meanwhile.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsify.core.gradients import DenseGradient, Gradient
from sparsify.core.layers import autocast_dtype
from sparsify.core.module import masked_tensors
from sparsify.core.step import TrainingStep
from sparsify.core.tensor import REENTRANT, Use
from sparsify.errors import SparsifyError
from sparsify.masked.tensor import ModelTensor
from sparsify.selection.joined import is_small

_AGAIN = -1  # the number of a use that is none of those in a forward pass


def check_not_exported() -> None:
    if torch.compiler.is_dynamo_compiling():
        return  # it would wrap the error in one of its own
    # the public is_exporting() is true under torch.compile in older versions of torch
    is_exporting = getattr(torch.compiler, "_is_exporting_flag", False)
    if is_exporting or torch.jit.is_tracing():  # type: ignore[attr-defined]  # documented, not in __all__
        problem = "cannot be exported or traced (torch.export, torch.jit.trace, torch.onnx.export)"
        remedy = "Export the plain model, with the trained weights in place: desparsify(model)."
        raise SparsifyError(f"a sparsified model {problem}. {remedy}")


class CompiledGraphs:
    """The graphs of a training step's model; their operators (masked/compiled.py) bring in the compiler."""

    def __init__(self, step: TrainingStep) -> None:
        self._step: Any = step  # takes the gradients
        self._entry: Tensor | None = None  # the root anchor of the forward pass that is being compiled
        self._uses: defaultdict[ModelTensor, list[Use]] = defaultdict(list)  # that wait for their backward
        self._kept = False  # whether a graph was kept in this optimizer step
        self._again: list[ModelTensor] = []  # whose sums wait for it
        self._recomputed: dict[ModelTensor, int] = {}  # the backward pass in which its graph ran forward again

    def __getstate__(self) -> dict[str, Any]:
        return CompiledGraphs(self._step).__dict__  # a copy of the model starts with no open graph

    def linear(self, module: Any, x: Tensor, transposed: bool) -> Tensor:
        (weight, of_weight), (bias, of_bias) = (_frozen(module, attribute) for attribute in ("weight", "bias"))
        if (dtype := autocast_dtype(x)) is not None:
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            return self._use("transposed" if transposed else "linear", x, weight, bias, of_weight, of_bias)

    def embedding(self, module: Any, ids: Tensor) -> Tensor:
        weight, tensor = _frozen(module, "weight")
        return self._use("embedding", ids, weight, None, tensor, None)

    def tap(self, tensor: ModelTensor, parameter: Tensor) -> Tensor:
        read: Any = self._use("tap", None, parameter.detach(), None, tensor, None)
        read._is_param = read.is_tap = True  # as in core/taps.py
        return read

    def _use(self, kind: str, x: Tensor | None, weight: Tensor, bias: Tensor | None, *tensors: Any) -> Tensor:
        """Computes a layer, in an operator where a gradient may be collected for its weight or bias, now or later."""
        from sparsify.masked.compiled import compute, serial

        step = self._step
        idle = [each is None or step.paused or each.dormant or each.is_frozen for each in tensors]
        handles = [None if is_idle else each.handle for each, is_idle in zip(tensors, idle, strict=True)]
        if all(handle is None for handle in handles):
            return weight if kind == "tap" else compute(kind, x, weight, bias)
        if step.parallel > 1:
            torch.compiler.disable(_refuse_parallel)()
        root = self._traced_root()[0] if self._entry is None else self._entry
        training = torch.is_grad_enabled() and root.requires_grad
        return torch.ops.sparsify.use(kind, x, weight, bias, root, *handles, training, serial())

    def enter(self) -> None:
        """The root's forward is being compiled; its graph will refresh the weights whenever it runs."""
        root, handle = self._traced_root()
        self._entry = torch.ops.sparsify.refresh(root, handle)

    def _traced_root(self) -> tuple[Tensor, Tensor]:
        """The root anchor and a tensor's handle; a graph is compiled anew when the flat delta is another one."""
        from sparsify.masked.compiled import made_ready

        tensor: Any = self._step.tensors[0]
        made_ready(tensor.handle)
        root = self._step.current_root
        assert root is not None
        assert root.serves(self._step.entries.values)  # becomes a guard: every run of the graph checks it
        return root.output, tensor.handle

    def leave(self) -> None:
        self._entry = None

    def count_use(self, tensor: ModelTensor) -> None:
        """Counts a use as its graph runs forward; a part that runs again inside a backward pass is checkpointing's."""
        graph = torch._C._current_graph_task_id()
        if graph in (-1, self._step.around_forward):
            self._uses[tensor].append(Use([tensor], self._step.root_anchor()))
        else:
            self._recomputed[tensor] = graph

    def collect(self, tensor: ModelTensor, device: torch.device, gradient: Callable[[], Gradient]) -> None:
        """Ends one of the counted uses in the backward pass of its graph, and hands ``gradient()`` over."""
        graph = torch._C._current_graph_task_id()
        if self._recomputed.get(tensor, graph) != graph:  # in a backward pass of its own
            raise SparsifyError(REENTRANT.format(name=tensor.name))
        uses = self._uses[tensor]
        self._kept |= torch._C._autograd._get_current_graph_task_keep_graph()
        if self._kept:  # a graph may run backward again, with uses that nobody counts: sums wait for the pass's end
            tensor.waiting.add(_AGAIN)
            self._again.append(tensor)
        # none waits where a graph that was kept runs backward again
        use = uses.pop() if uses else Use([tensor], self._step.root_anchor())

        def own(tensor: Any) -> Gradient:
            made = gradient()  # a compiled graph uses its buffers again
            is_held = tensor.waiting or is_small(tensor) or isinstance(made, DenseGradient)
            return made.dense().own() if is_held else made

        use.collect(device, own)

    def pass_done(self) -> None:
        self._recomputed.clear()
        while self._again:
            self._again.pop().waiting.discard(_AGAIN)

    def step_done(self) -> None:
        self._uses.clear()
        self._kept = False


def _refuse_parallel() -> None:
    raise SparsifyError("a tensor-parallel model trains without torch.compile: the operators here take no DTensors.")


def _frozen(module: Any, attribute: str) -> tuple[Any, Any]:
    """Returns a parameter, detached, and its masked tensor; without one where it has none, or is in another's place."""
    parameter, tensor = module._parameters.get(attribute), masked_tensors(module).get(attribute)
    if tensor is None or parameter is not tensor.parameter:
        return parameter, None
    return parameter.detach(), tensor
