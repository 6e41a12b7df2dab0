"""ms-swift trains a budget of a model's own numbers: a tuner, for ``--external_plugins``.

    swift sft --external_plugins examples/plugins/ms_swift.py --tuner_type sparse --model Qwen/Qwen3-0.6B \
        --dataset AI-ModelScope/alpaca-gpt4-data-en#500 --learning_rate 3e-4

The budget is set below: ms-swift has no arguments for tuners of one's own. ``--target_modules``, ``--target_regex``,
``--freeze_vit`` and ``--modules_to_save`` mean what they mean for LoRA. The Trainer's number of steps is found.
Checkpoints are adapters of PEFT: go on with ``--resume_from_checkpoint``, serve with ``swift infer --adapters``, with
the same ``--external_plugins`` and ``--tuner_type``.
"""

from typing import Any

from peft import PeftModel, get_peft_model
from swift.tuner_plugin import PeftTuner, tuners_map
from torch import nn

from sparsify.peft import SparseConfig

SETTINGS: dict[str, Any] = {"budget": 0.002, "strategy": "id3"}  # of SparseConfig
TASKS = {"seq_cls": "SEQ_CLS", "reranker": "SEQ_CLS", "embedding": None}  # all others are causal language models


class SparseTuner(PeftTuner):
    """The tuner ``sparse``; ``PeftTuner`` saves and loads it."""

    @staticmethod
    def prepare_model(args: Any, model: nn.Module) -> PeftModel:
        from swift.pipelines.train.tuner import get_modules_to_save, get_target_modules  # which import the plugins

        config = SparseConfig(
            target_modules=get_target_modules(args, model),
            modules_to_save=get_modules_to_save(args, model) or None,
            task_type=TASKS.get(args.task_type, "CAUSAL_LM"),
            **SETTINGS,
        )
        return get_peft_model(model, config)


tuners_map["sparse"] = SparseTuner
