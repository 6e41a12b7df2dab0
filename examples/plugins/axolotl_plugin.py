"""Axolotl trains a budget of a model's own numbers: a plugin with ``adapter: sparse``. In the YAML file:

    plugins:
      - axolotl_plugin.SparsePlugin
    adapter: sparse
    sparse:  # of SparseConfig
      budget: 0.002
      target_modules: [q_proj, v_proj, up_proj, down_proj]

The folder of this file has to be on the path: ``PYTHONPATH=examples/plugins axolotl train config.yaml``. The Trainer's
number of steps is found. ``lora_model_dir`` loads a trained adapter; ``axolotl merge-lora`` needs
``merge_method: legacy``, since its other one multiplies LoRA's matrices.
"""

from typing import Any

from axolotl.integrations.base import AdapterCapabilities, BasePlugin
from peft import PeftModel, get_peft_model
from pydantic import BaseModel

from sparsify import SparsifyCallback
from sparsify.peft import SparseConfig

NAME = "sparse"


class SparseArgs(BaseModel):
    """What the plugin adds to axolotl's settings: those of ``SparseConfig``."""

    sparse: dict[str, Any] | None = None


class SparsePlugin(BasePlugin):
    """Gives axolotl the adapter ``sparse``."""

    def get_input_args(self) -> str:
        return f"{__name__}.SparseArgs"

    def get_adapter_capabilities(self) -> list[AdapterCapabilities]:
        return [AdapterCapabilities(name=NAME)]

    def load_adapter(self, model: Any, cfg: Any, inference: bool = False, config_only: bool = False) -> Any:
        """The model with the adapter, and its config; DPO's trainers want the config alone."""
        if cfg.adapter != NAME:
            return None
        config = SparseConfig(**{"task_type": "CAUSAL_LM", **(cfg.sparse or {})})
        if config_only:
            return None, config
        if cfg.lora_model_dir:
            return PeftModel.from_pretrained(model, cfg.lora_model_dir, is_trainable=not inference), config
        return get_peft_model(model, config), config

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[SparsifyCallback]:
        """The callback that finds the number of steps and logs, where PEFT's hook has not added it already."""
        has_it = any(isinstance(callback, SparsifyCallback) for callback in trainer.callback_handler.callbacks)
        return [] if has_it or cfg.adapter != NAME else [SparsifyCallback()]
