"""What PEFT asks of a method: adapters are injected, saved, loaded and merged through this class."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import set_additional_trainable_modules
from torch import Tensor, nn

from sparsify.common.names import plain_name, tied_names
from sparsify.common.quantized import is_quantized
from sparsify.delta.algebra import METHODS, DeltaSum, merge_deltas
from sparsify.delta.peft_files import DELTAS, LAYER, to_blob
from sparsify.errors import SparsifyError
from sparsify.peft.adapters import SparseAdapters
from sparsify.strategies.targets import PEFT_SAVED, match_modules

_PEFTS_HEADS = ("classifier", "score", "qa_outputs")  # which PEFT adds to modules_to_save, whether they exist or not
_HEADS_LATER = ("TOKEN_CLS", "QUESTION_ANS")  # tasks whose heads PEFT wraps only after it has injected the adapter
_COMBINATIONS = ("linear", *METHODS)


class SparseModel(BaseTuner):
    """The tuner of ``SparseConfig``: a model with :class:`SparseAdapters`, which does the work."""

    prefix = DELTAS  # also of the flat delta, so that TRL leaves it out where it copies weights to an engine
    tuner_layer_cls = SparseAdapters
    target_module_mapping: dict[str, list[str]] = {}  # noqa: RUF012
    _create_and_replace: Any = None  # which only PEFT's inject_adapter() calls

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds an adapter; a new tuner's first one is active. If that fails, the model is what it was."""
        config: Any = self.peft_config[adapter_name]
        names = [name for name in config.modules_to_save or () if name not in _PEFTS_HEADS]
        saved = match_modules(model, names or None, "modules_to_save")
        if not config.inference_mode:  # an inactive adapter begins later, and PEFT does not expect it to fail then
            for argument in ("target_modules", "exclude_modules"):
                match_modules(model, config.arguments(model)[argument], argument)
            _check_not_tied(model, saved)
        others = [name for name in self.peft_config if name != adapter_name]
        others += [name for name, module in model.named_modules() if isinstance(module, LoraLayer)]
        others += [name for name, parameter in model.named_parameters() if is_quantized(parameter)]
        if others and any(own.lora for own in self.peft_config.values()):  # type: ignore[attr-defined]
            problem = f"lora= goes with no other adapter, no LoRA and no quantized weight, and there is `{others[0]}`"
            raise SparsifyError(f"{problem}: load a base of its own, or merge_and_unload() what is there.")
        children = {module: dict(module._modules) for module in model.modules()}
        flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        try:
            if not hasattr(model, LAYER):
                model.add_module(LAYER, SparseAdapters(model))
            layer: SparseAdapters = getattr(model, LAYER)
            is_active = adapter_name in self.active_adapters
            dense = [*(config.modules_to_save or ()), *(_PEFTS_HEADS if config.task_type in _HEADS_LATER else ())]
            # the rows of trainable tokens are entries here
            heads: Any = replace(config, modules_to_save=dense or None, trainable_token_indices=None)
            set_additional_trainable_modules(
                model=model, peft_config=heads, model_config=self.get_model_config(model), adapter_name=adapter_name,
                activate_adapter=is_active,
            )  # fmt: skip
            layer.add(adapter_name, config, active=is_active)
        except BaseException:
            for module, own in children.items():  # without the layer, and PEFT's wrappers
                module._modules = own
            for parameter, requires_grad in flags:
                parameter.requires_grad_(requires_grad)
            raise

    def add_weighted_adapter(
        self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str, combination_type: str = "linear",
        *, density: float = 1.0, majority_sign_method: str = "total",
    ) -> None:  # fmt: skip
        """Adds the sum or merge of some adapters, as they are now, as an adapter that can be run.

        Arguments are those of LoRA; ``combination_type`` is ``"linear"``, the exact sum, or a method of
        :func:`sparsify.merge_deltas`, which also takes the last two.

        Raises:
            SparsifyError: when an argument is none of these, or adapters have modules that PEFT saves, such as heads.
        """
        names = list(self.peft_config)
        if not adapters or not set(adapters) <= set(names) or adapter_name in names:
            problem = f"adapters={adapters!r} and adapter_name={adapter_name!r}"
            raise SparsifyError(f"{problem}; expected some of {names}, and a name that is none of these.")
        if combination_type not in _COMBINATIONS:
            expected = f"expected one of {', '.join(_COMBINATIONS)}; a sum is exact, and needs no svd or cat."
            raise SparsifyError(f"combination_type={combination_type!r}; {expected}")
        if any(own.modules_to_save or own.lora for own in map(self.peft_config.get, adapters)):  # type: ignore[union-attr]
            problem = f"the adapters {adapters} have modules_to_save or a LoRA, which cannot be combined"
            raise SparsifyError(f"{problem}; take their entries alone: SparseDelta.load(folder).entries_only().")
        layer: SparseAdapters = getattr(self.model, LAYER)
        deltas = [layer.delta_of(name) for name in adapters]
        own: Any = {"method": combination_type, "density": density, "majority_sign_method": majority_sign_method}
        total: Any = merge_deltas(deltas, weights, **own if combination_type != "linear" else {})  # which checks them
        total = total if combination_type != "linear" else DeltaSum(total.terms)
        first: Any = self.peft_config[adapters[0]]
        self.peft_config[adapter_name] = replace(first, inference_mode=True, budget=None, modules_to_save=None)
        self.inject_adapter(self.model, adapter_name)
        layer.take(adapter_name, total)

    def _enable_peft_forward_hooks(self, *args: Any, adapter_names: Any = None, **kwargs: Any) -> Any:
        """Refuses a batch of several adapters, all of which PEFT would run by the active one."""
        if adapter_names is not None:
            problem = f"adapter_names={adapter_names!r:.100} for the rows of a batch: one adapter is active at a time"
            raise SparsifyError(f"{problem}; call set_adapter(name), and the model with the rows of that one.")
        return nullcontext()

    @classmethod
    def _get_adapter_state_dict(  # type: ignore[override]
        cls, model: nn.Module, config: Any, adapter_name: str, **kwargs: Any
    ) -> dict[str, Tensor]:
        """What is saved of an adapter, apart from its ``modules_to_save``: its delta."""
        name, layer = next((name, own) for name, own in model.named_modules() if isinstance(own, SparseAdapters))
        delta = layer.delta_of(adapter_name)
        return {f"{name}.{DELTAS}.{adapter_name}._extra_state": to_blob(delta.tensors, delta.whole, delta.config)}

    @classmethod
    def _remap_adapter_state_dict_for_load(cls, **kwargs: Any) -> dict[str, Tensor]:  # type: ignore[override]
        """What is loaded: the delta, and ``modules_to_save``; PEFT stores resized embeddings as well as the delta."""
        own = super()._remap_adapter_state_dict_for_load(**kwargs)
        return {name: value for name, value in own.items() if {LAYER, PEFT_SAVED} & set(name.split("."))}

    def _unload_and_optionally_merge(  # type: ignore[override]
        self, merge: bool = True, adapter_names: Any = None, safe_merge: bool = False, **kwargs: Any
    ) -> Any:
        getattr(self.model, LAYER).leave(merge, adapter_names, safe_merge)
        delattr(self.model, LAYER)
        return super()._unload_and_optionally_merge(merge, **kwargs, adapter_names=adapter_names)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> None:
        getattr(self.model, LAYER).keep_merged()
        super().merge_adapter(*args, **kwargs)


def _check_not_tied(model: nn.Module, saved: set[str]) -> None:
    """Raises where PEFT would train a copy of a weight that others of the base share, which no base can hold."""
    for name, names in tied_names(model).items():
        inside = next((module for module in saved if name.startswith(f"{plain_name(module)}.")), None)
        other = next((own for own in names if not own.startswith(f"{inside}.")), None)
        if inside is not None and other is not None:
            problem = f"modules_to_save: `{inside}` shares its weight with `{other}`, and PEFT would train a copy of it"
            remedy = "train tokens by trainable_token_indices, or untie the base before (tie_word_embeddings=False)"
            raise SparsifyError(f"{problem}, which does not go onto the base: {remedy}.")
