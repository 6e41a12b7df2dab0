"""The settings of a sparse adapter, under PEFT's names and sparsify()'s."""

import copy
import re
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from sparsify.adapters.extensions import as_json
from sparsify.core.schedule import Schedule
from sparsify.delta.peft_files import PEFT_TYPE
from sparsify.errors import SparsifyError
from sparsify.strategies.default import recommend
from sparsify.strategies.strategy import Strategy, resolve_schedule, resolve_strategy
from sparsify.strategies.targets import ALL_LINEAR, match_modules

# arguments of sparsify() that are passed on; the last two go into no file
_SAME = ("budget", "steps", "exclude_modules", "trainable_token_indices", "seed", "calibration", "loss_fn")

# LoRA's settings that go with sparse entries; others change the base, or train more than two matrices
_LORA = "r target_modules exclude_modules layers_to_transform layers_pattern rank_pattern lora_alpha alpha_pattern "
_LORA += "lora_dropout fan_in_fan_out use_rslora runtime_config"


@dataclass
class SparseConfig(PeftConfig):
    """Trains ``budget`` of a model's numbers, chosen while it trains: a ``PeftConfig`` to use in place of LoRA's.

    ``task_type``, ``inference_mode``, ``revision``, ``layers_to_transform``, ``layers_pattern`` and ``modules_to_save``
    are PEFT's; the other arguments are those of :func:`sparsify.sparsify`. Without ``target_modules``, candidates are
    all parameters that require grad, or only those of linear layers, with ``layers_to_transform`` and where no strategy
    is given; those that it names may be frozen.

    Args:
        strategy: the name of a preset, a ``Strategy``, what its ``to_dict()`` gives, or ``None``.
        budget_pattern: budgets for modules of their own, as LoRA's ``rank_pattern``: ``{"q_proj": 1000, "mlp": 0.001}``
            gives each module whose name ends so this number, or this share of its entries; all others share ``budget``.
        schedule: a name, a ``Schedule``, or its fields as a dict.
        lora: a ``LoraConfig``, whose matrices are trained whole beside the budget, and are part of the adapter.
        steps: planned number of optimizer steps; those of the Hugging Face Trainer, and of TRL's, are found.

    Raises:
        SparsifyError: when a setting is unknown, or two of them cannot be combined.

    Example:
        >>> config = SparseConfig(budget=0.002, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        >>> SparseConfig(**config.to_dict()) == config
        True
    """

    budget: int | float | None = None
    strategy: str | dict[str, Any] | None = None
    schedule: str | dict[str, Any] | None = None
    steps: int | None = None
    budget_pattern: dict[str, int | float] | None = None
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    lora: LoraConfig | dict[str, Any] | None = None
    seed: int = 0
    calibration: Any = field(default=None, repr=False, compare=False)
    loss_fn: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(PEFT_TYPE)
        if isinstance(self.strategy, Strategy):
            self.strategy = self.strategy.to_dict()
        if isinstance(self.schedule, Schedule):
            self.schedule = asdict(self.schedule)
        if isinstance(saved := self.modules_to_save, str):
            raise SparsifyError(f"modules_to_save={saved!r}; expected a list, as in [{saved!r}].")
        self.modules_to_save = saved and list(saved)  # to which PEFT adds heads
        if self.layers_to_transform is not None and isinstance(names := self.target_modules, str):
            raise SparsifyError(f'target_modules={names!r} with layers_to_transform; expected a list: ["q_proj"].')
        self.lora = None if self.lora is None else _checked(self.lora)
        if not self.inference_mode:  # an adapter may be run where its own importance is not known
            self._resolve("id3" if self.strategy is None else self.strategy, self.schedule)

    def to_dict(self) -> dict[str, Any]:
        """Returns the settings in JSON types, without the calibration."""
        own = {item.name: copy.deepcopy(getattr(self, item.name)) for item in fields(self) if item.compare}
        return own | {"lora": own["lora"] and as_json(own["lora"].to_dict())}

    def arguments(self, model: nn.Module) -> dict[str, Any]:
        """The arguments of ``sparsify()`` for a model."""
        own: Any = self
        given, targets, schedule = own.strategy, own.target_modules, own.schedule
        if given is None:
            given, schedule, linear = recommend(model, self.budget, schedule, targets, None)
            targets = linear if self.layers_to_transform is None else targets
        strategy, resolved = self._resolve(given, schedule)
        if self.layers_to_transform is not None or (self.lora and self.target_modules not in (None, ALL_LINEAR)):
            names = [name for name, _ in model.named_modules() if targets and check_target_module_exists(self, name)]
            if targets is None:  # PEFT asks for no layer of a module that is named in full
                named = replace(self, target_modules=["weight"])
                linear = sorted(match_modules(model, ALL_LINEAR, "target_modules"))
                names = [name for name in linear if check_target_module_exists(named, f"_.{name}.weight")]
            if not names:
                given = f"target_modules={targets!r} with layers_to_transform={self.layers_to_transform!r}"
                remedy = "give numbers of its layers from 0, and layers_pattern if their list is not found."
                raise SparsifyError(f"{given} match no module of the model; {remedy}")
            inner = [f"{name}.base_layer" * hasattr(model.get_submodule(name), "base_layer") or name for name in names]
            targets = "|".join(map(re.escape, inner))  # of layers that LoRA has wrapped
        same = {name: getattr(self, name) for name in _SAME}
        dense = ["lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"] if self.lora else None
        return {**same, "strategy": strategy, "schedule": resolved, "target_modules": targets, "modules_to_save": dense}

    def _resolve(self, given: Any, schedule: Any) -> tuple[Strategy, Schedule]:
        if given == "full":
            raise SparsifyError('strategy "full" trains every entry, which is no adapter; leave PEFT out.')
        strategy = resolve_strategy(Strategy.from_dict(given) if isinstance(given, dict) else given)
        if self.budget_pattern:
            if getattr(strategy.selection, "allocation", None) != "global":
                problem = f"budget_pattern={self.budget_pattern!r} with {strategy.selection}"
                raise SparsifyError(f"{problem}; expected Increment() or Static(), which divide no budget themselves.")
            selection: Any = strategy.selection
            strategy = replace(strategy, selection=replace(selection, allocation=self.budget_pattern))
        schedule = Schedule(**schedule) if isinstance(schedule, dict) else schedule
        return strategy, resolve_schedule("uniform" if schedule is None else schedule)


def _checked(lora: Any) -> Any:
    lora = PeftConfig.from_peft_type(**lora) if isinstance(lora, dict) else lora
    if not isinstance(lora, LoraConfig):
        raise SparsifyError(f"lora={lora!r:.200}; expected a LoraConfig of PEFT, as in LoraConfig(r=8).")
    inits = (True, False, "gaussian", "orthogonal")
    own = {**vars(lora), "init_lora_weights": True} if lora.init_lora_weights in inits else vars(lora)
    names = own.keys() - vars(PeftConfig()).keys() - set(_LORA.split())
    if others := sorted(name for name in names if own[name] != vars(LoraConfig())[name]):
        problem = f"lora=LoraConfig({others[0]}={own[others[0]]!r:.100}) does not go with sparse entries"
        raise SparsifyError(f"{problem}; expected {_LORA} alone. Heads and tokens go into SparseConfig itself.")
    return lora
