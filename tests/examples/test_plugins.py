"""The plugins of examples/plugins, called as ms-swift and axolotl call them; stand-ins have their signatures."""

import importlib
import sys
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from models import build
from peft import PeftModel
from trainers import rows_of, run_trainer

from sparsify import SparsifyCallback, get_engine

PLUGINS = Path(__file__).parents[2] / "examples" / "plugins"
TARGETS = ["q_proj", "down_proj"]
IDS = build("llama")[1][0]["input_ids"]


def stand_in(monkeypatch, plugin, **modules):
    monkeypatch.syspath_prepend(str(PLUGINS))
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return importlib.import_module(plugin)


def train(model, folder):
    """Trains without a word about steps or callbacks."""
    trainer = run_trainer(model, folder, rows_of("llama"), callbacks=[])
    engine = get_engine(model)
    assert engine.steps == trainer.state.max_steps
    assert engine.unmasked == engine.budget
    return trainer


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=IDS).logits


class PeftTuner:
    @staticmethod
    def save_pretrained(model, save_directory, state_dict=None, safe_serialization=True, **kwargs):
        model.save_pretrained(save_directory, safe_serialization=safe_serialization, selected_adapters=["default"])

    from_pretrained = PeftModel.from_pretrained


def test_ms_swift_has_a_tuner_called_sparse(monkeypatch, tmp_path):
    tuners, nothing = {}, {}
    stand_in(
        monkeypatch, "ms_swift", swift=nothing, swift__pipelines=nothing, swift__pipelines__train=nothing,
        swift__tuner_plugin={"PeftTuner": PeftTuner, "tuners_map": tuners},
        swift__pipelines__train__tuner={
            "get_target_modules": lambda args, model: TARGETS, "get_modules_to_save": lambda args, model, task=None: [],
        },
    )  # fmt: skip
    tuner, args = tuners["sparse"], SimpleNamespace(task_type="causal_lm")
    model = tuner.prepare_model(args, build("llama")[0])
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
    train(model, tmp_path / "run")
    tuner.save_pretrained(model, str(tmp_path / "saved"), state_dict={}, safe_serialization=True)
    served = tuner.from_pretrained(build("llama")[0], str(tmp_path / "saved"))
    assert torch.equal(logits(served), logits(model))


class Settings(dict):
    """As axolotl's DictDefault: what is not there is None."""

    __getattr__ = dict.get


def test_axolotl_has_an_adapter_called_sparse(monkeypatch, tmp_path):
    kind = make_dataclass("AdapterCapabilities", ["name", ("lora_like", bool, False), ("relora", bool, False)])
    base = {"AdapterCapabilities": kind, "BasePlugin": type("BasePlugin", (), {})}
    module = stand_in(
        monkeypatch, "axolotl_plugin", axolotl={}, axolotl__integrations={}, axolotl__integrations__base=base
    )
    plugin = module.SparsePlugin()
    assert [each.name for each in plugin.get_adapter_capabilities()] == ["sparse"]
    source, name = plugin.get_input_args().rsplit(".", 1)
    arguments = getattr(importlib.import_module(source), name)(sparse={"budget": 40, "target_modules": TARGETS})
    cfg = Settings(adapter="sparse", **arguments.model_dump())
    assert plugin.load_adapter(build("llama")[0], Settings(adapter="lora")) is None
    nothing, config = plugin.load_adapter(build("llama")[0], cfg, inference=False, config_only=True)
    assert nothing is None
    assert (config.budget, config.task_type) == (40, "CAUSAL_LM")
    model, _ = plugin.load_adapter(build("llama")[0], cfg)
    trainer = train(model, tmp_path / "run")
    assert plugin.add_callbacks_post_trainer(cfg, trainer) == []
    trainer.callback_handler.callbacks.clear()
    assert isinstance(plugin.add_callbacks_post_trainer(cfg, trainer)[0], SparsifyCallback)
    model.save_pretrained(tmp_path / "saved")
    served, _ = plugin.load_adapter(build("llama")[0], Settings(cfg, lora_model_dir=tmp_path / "saved"), inference=True)
    assert torch.equal(logits(served), logits(model))
