"""All sparse adapters of a model, and which of them its weights hold.

    in training    at most one: the model's engine and flat delta. While another one is shown, or none, the engine is
                   paused over the base's values, and the optimizer goes on to hold the flat delta
    other ones     kept as deltas; those that only run are checked against the base once
    a LoRA         of the only adapter: layers of PEFT, which it disables and merges itself, trained and stored whole

The weights hold the active adapter's values at all times, so that merging, and a forward pass, cost nothing. PEFT and
transformers find the adapters in one ``BaseTunerLayer`` without parameters, a child of the base model.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype, check_adapters_to_merge
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from sparsify.api import desparsify, sparsify
from sparsify.common.interrupts import uninterrupted
from sparsify.common.names import ENGINE, POSITION, base_name, plain_name
from sparsify.common.quantized import is_quantized
from sparsify.delta.algebra import DeltaSum
from sparsify.delta.format import PEFT_KEY
from sparsify.delta.patch_plan import PatchPlan, holds, undone, write_plan
from sparsify.delta.peft_files import DELTAS, from_blob
from sparsify.delta.sparse_delta import SparseDelta
from sparsify.errors import SparsifyError
from sparsify.strategies.targets import PEFT_SAVED
from sparsify.training.install import uninstall


class SparseAdapter(nn.Module):
    """One adapter: its config and, unless it is in training, its delta, which is loaded as a state of any shape."""

    def __init__(self, config: Any, take: Callable[[SparseDelta], None]) -> None:
        super().__init__()
        self.config, self.trains, self._take = config, not config.inference_mode, take
        self.delta = SparseDelta({})
        self.plan: PatchPlan = []  # of its delta, where it only runs

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        if state.numel():
            self._take(SparseDelta(*from_blob(state.cpu())))


class SparseAdapters(nn.Identity, BaseTunerLayer):  # so that it may be in an nn.Sequential
    """The adapters of a model, by name, and what switches between them."""

    adapter_layer_names = (DELTAS,)
    root: nn.Module

    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.sparse_values: Any = nn.ModuleDict()
        self.live: str | None = None  # the name of what is in training
        self.shown: str | None = None  # of what the weights hold; the base's values where None
        vars(self)["root"] = root  # no submodule
        self._could_train = {base_name(name) for name, own in root.named_parameters() if own.requires_grad}
        self._lora: list[Any] = []  # the layers that an adapter's LoRA wraps
        self._kept: list[tuple[Tensor, Tensor]] = []  # their weights while it is merged, and what they were
        self._trained: list[Tensor] | None = None  # the weights in training, while the engine is paused
        self._written: PatchPlan = []  # what the weights hold of an adapter that only runs
        self._disable_adapters, self._active_adapter, self.merged_adapters = False, [], []

    def get_base_layer(self) -> nn.Module:
        return self.root

    def add(self, name: str, config: Any, *, active: bool) -> None:
        """Adds an adapter, which has learned nothing until something is loaded; an active one that trains begins."""
        twin = next((other for other, adapter in self.sparse_values.items() if adapter.config is config), None)
        adapter = self.sparse_values[name] = SparseAdapter(config, partial(self.take, name))
        if self.live is None:
            self._freeze()
        if name == "ref" and twin is not None:  # TRL's frozen copy, which it adds with the adapter's own config object
            adapter.trains = False
            self.take(name, self.delta_of(twin))
        if active:
            self.set_adapter(name)

    def take(self, name: str, delta: Any) -> None:
        """Gives an adapter a delta, its own or that of others, or a sum; raises where the model is not its base."""
        adapter, configs = self.sparse_values[name], getattr(delta, "config", {}).get(PEFT_KEY, {})
        for old, settings in configs.items():  # a file's LoRA may have another adapter's name
            place = re.compile(rf"(?<=\.)(lora_\w+)\.{re.escape(old)}(?=\.|$)")
            whole = {place.sub(rf"\1.{name}", key): tensor for key, tensor in delta.whole.items()}
            delta = SparseDelta(delta.tensors, whole, {**delta.config, PEFT_KEY: {name: settings}})
        delta = self._without_heads(delta) if isinstance(delta, SparseDelta) else delta
        if name == self.live:
            self._go_on_from(delta)
        elif adapter.trains:
            adapter.delta = delta
        else:
            with self._showing(None), self._plain():
                self._wrap(name)
                delta = delta.on(self.root) if isinstance(delta, DeltaSum) else delta
                adapter.plan, adapter.delta = delta.plan(self.root)[0], delta  # or raises, while the earlier is there
        self.set_adapter(self.active_adapters)

    def delta_of(self, name: str) -> SparseDelta:
        """What an adapter has learned, without ``modules_to_save``, which PEFT saves itself."""
        self._take_out()
        delta: SparseDelta = self.sparse_values[name].delta
        if name != self.live:
            return delta
        with self._showing(name):
            delta = SparseDelta.from_model(self.root)
        if self._engine.extended_at:
            config = self.sparse_values[name].config
            config.budget, config.steps = self._engine.budget - self._engine.policy.kept, self._engine.steps
        return self._without_heads(delta)

    def _without_heads(self, delta: SparseDelta) -> SparseDelta:
        saved = {base_name(key) for key, _ in self.root.named_parameters() if PEFT_SAVED in key.split(".")}
        return SparseDelta(delta.tensors, {k: t for k, t in delta.whole.items() if k not in saved}, delta.config)

    def delete_adapter(self, adapter_name: str) -> None:
        if adapter_name in (self.shown, self.live):  # else what is merged stays merged
            self._show(None)
        if adapter_name == self.live or self._lora:
            self._end()
        super().delete_adapter(adapter_name)
        self.set_adapter(self.active_adapters)

    def leave(self, merge: bool, names: list[str] | None, safe_merge: bool) -> None:
        """Makes the root a plain model again, with an adapter's values, by default the active one's, or the base's."""
        if merge:
            self.merge(safe_merge, names)
        name = _single(self.merged_adapters) if merge else None
        self._take_out()
        self._show(name)
        if name is not None and name == self.live:
            desparsify(self.root)  # or raises, where weights are quantized
        elif self.live is not None:
            uninstall(self._engine, dequantize=False)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else list(adapter_names)
        name = _single(names)
        self._show(None if self._disable_adapters else name)
        self._active_adapter = names

    def enable_adapters(self, enabled: bool) -> None:
        self._disable_adapters = not enabled
        self.set_adapter(self.active_adapters)

    def set_requires_grad(self, adapter_names: Any, requires_grad: bool = True) -> None:
        if self.live in ([adapter_names] if isinstance(adapter_names, str) else adapter_names):
            self._engine.values.requires_grad_(requires_grad)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        names = check_adapters_to_merge(self, adapter_names)  # warns where there is nothing to do
        name = _single([*self.merged_adapters, *names])
        own = [self._engine.values] if name == self.live and name is not None else []
        own += [parameter for layer in self._lora for parameter in layer.parameters()]
        if safe_merge and not all(parameter.isfinite().all() for parameter in own):
            raise SparsifyError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")  # PEFT's
        if names and adapter_names:
            self._show(name)
        self.merged_adapters += names  # whose values the weights hold anyway

    def unmerge(self) -> None:
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
        self._take_out()
        self.set_adapter(self.active_adapters)

    def keep_merged(self) -> None:
        """Keeps the weights into which a LoRA is about to be merged: to subtract it would not be exact."""
        weights = [] if self.merged else [layer.get_base_layer().weight for layer in self._lora]
        self._kept += [(weight, weight.detach().clone()) for weight in weights]

    @torch.no_grad()
    def _take_out(self) -> None:
        """Undoes a merge."""
        for weight, old in self._kept:
            weight.copy_(old)
        self._kept = []
        for layer in (self, *self._lora):
            layer.merged_adapters = []

    @property
    def _engine(self) -> Any:
        return vars(self.root)[ENGINE]

    def _wrap(self, name: str) -> None:
        """Wraps the layers of an adapter's LoRA; not before it is loaded, since loaders would miss its matrices."""
        if (config := self.sparse_values[name].config.lora) is None or self._lora:
            return
        LoraModel(self.root, replace(config, inference_mode=not self.sparse_values[name].trains), name)
        del self.root.peft_config
        cast_adapter_dtype(self.root, name)
        self._lora = [module for module in self.root.modules() if isinstance(module, LoraLayer)]
        for layer in self._lora:  # low_cpu_mem_usage would round what is loaded; this one moves nothing
            layer._move_adapter_to_device_of_base_layer = self._move_adapter_to_device_of_base_layer

    def _show(self, name: str | None) -> None:
        """Puts an adapter's values into the weights, or the base's; one that trains begins, if it has not."""
        if name is not None and name != self.live and self.sparse_values[name].trains:
            self._begin(name)
        if name == self.shown:
            return
        self._take_out()
        if self.live is not None and self.shown == self.live:
            self._trained, self.shown = self._engine.weights.make_base(), None
        plan = [] if name is None else self.sparse_values[name].plan
        with self._plain(), uninterrupted():
            before = [] if holds(self.root, self._written) else self._written  # the base was loaded again
            with undone(before, self.root):
                write_plan(plan, self.root)
            self._written = plan
        if self._trained is not None and name == self.live:
            self._engine.weights.make_trained(self._trained)
            self._trained = None
        self.shown = name

    @contextmanager
    def _showing(self, name: str | None) -> Iterator[None]:
        """Shows an adapter, or the base, for the length of a ``with`` block."""
        shown = self.shown
        self._show(name)
        try:
            yield
        finally:
            self._show(shown)

    @contextmanager
    def _plain(self) -> Iterator[None]:
        """Has others take the model for a plain one; graphs that await backward do not see what is written to it."""
        own = {key: vars(self.root).pop(key) for key in (ENGINE, "peft_config") if key in vars(self.root)}
        unseen = tuple(self.root.parameters()) if ENGINE in own else ()
        try:
            with torch.autograd._unsafe_preserve_version_counter(unseen):  # type: ignore[attr-defined]
                yield
        finally:
            vars(self.root).update(own)

    def _begin(self, name: str) -> None:
        """Has an adapter train, in place of what is in training; nothing changes if that fails."""
        before, shown = self.live, self.shown
        if before is not None:
            self.sparse_values[before].delta = self.delta_of(before)
            self._end()
        try:
            with self._plain():  # sparsify() would take no quantized weights of a PEFT model
                self._start(name)
        except BaseException:
            self._end()
            if before is not None:
                self._begin(before)
            self._show(shown)
            raise

    def _start(self, name: str) -> None:
        from sparsify.integrations.transformers import add_to_trainers

        adapter, root = self.sparse_values[name], self.root
        if nn.LayerNorm(1).weight.is_meta:  # as PEFT makes all parameters then
            raise SparsifyError("low_cpu_mem_usage=True is for adapters that do not train: leave it out.")
        self._show(None)
        self._wrap(name)
        wrapped, all_may = self._wrapped(), adapter.config.target_modules is not None  # PEFT's targets may be frozen
        for key, parameter in root.named_parameters():
            may_train = (all_may or base_name(key) in self._could_train) and parameter.is_floating_point()
            if may_train and parameter not in wrapped and not is_quantized(parameter):
                parameter.requires_grad_(True)
        sparsify(root, **adapter.config.arguments(root))
        self.live = self.shown = name
        if adapter.delta.tensors or adapter.delta.whole:
            self._go_on_from(adapter.delta)
        adapter.delta = SparseDelta({})
        add_to_trainers()

    @torch.no_grad()
    def _go_on_from(self, delta: SparseDelta) -> None:
        """Has the adapter in training go on from a delta; its entries are in another order then than they were."""
        engine, root, held = self._engine, self.root, self._engine.values
        masked = {plain_name(tensor.name): tensor for tensor in engine.tensors}
        with self._showing(None), self._plain():
            plan, _ = delta.plan(root)  # raises where the model is not its base
            others = [write.name for write in plan if (write.indices is None) == (write.name in masked)]
            if others or delta.num_entries > held.numel():
                own = f"{engine.budget:,} entries{f', and `{others[0]}` in no such way' if others else ''}"
                raise SparsifyError(f"the adapter is a {delta!r}, and its config trains {own}: run it, or mend that.")
            write_plan([write for write in plan if write.indices is None], root)
        self._show(self.live)
        engine.weights.write_base()
        held.zero_()
        engine.entries.truncate(0)
        root.get_buffer(POSITION)[0] = int(delta.config.get("steps_done") or 0)
        engine.steps = engine.steps or delta.config.get("steps")
        engine.was_sorted = True
        ids, values = [engine.entries.ids], [held[:0]]
        for name, _, indices, old, new, _ in plan:
            if indices is not None:
                ids.append((indices + masked[name].offset).to(held.device))
                change = new.to(held.dtype) - old
                change -= old + change - new  # the sum may be the trained value's neighbour
                values.append((delta.tensors[name].values if masked[name].is_quantized else change).to(held))
        engine.start(torch.cat(ids))
        held[: engine.unmasked] = torch.cat(values)

    def _end(self) -> None:
        """Ends the training of what is in training: the model is the base then, without a LoRA, and frozen."""
        self._show(None)
        if self.live is not None:
            uninstall(self._engine, dequantize=False)
        self.live = self._trained = None
        for name, module in list(self.root.named_modules()):
            if module in self._lora:
                self.root.set_submodule(name, module.get_base_layer())
        self._lora = []
        self._freeze()

    def _freeze(self) -> None:
        for parameter in set(self.root.parameters()) - self._wrapped():
            parameter.requires_grad_(False)

    def _wrapped(self) -> set[nn.Parameter]:
        """The parameters of ``modules_to_save`` and their originals, which PEFT switches itself."""
        wrappers = (module for module in self.root.modules() if isinstance(module, AuxiliaryTrainingWrapper))
        return {parameter for module in wrappers for parameter in module.parameters()}


def _single(names: Sequence[str]) -> str | None:
    if len(names) > 1:
        sums = "DeltaSwitch.activate(names) takes several deltas, and their sum is a delta: a + 0.5 * b."
        raise SparsifyError(f"the adapters {names} cannot be active together; take one of them. {sums}")
    return next(iter(names), None)
