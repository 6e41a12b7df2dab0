"""The Hugging Face Trainer with SparsifyCallback: steps, logs, small checkpoints, and a run that goes on from one."""

import copy
import gc
import json
import logging
import weakref
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from models import build
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from trainers import BEST, BUDGET, STEPS, assert_same, make_model, make_trainer, outcome, rows_of, run_trainer
from transformers import TrainerCallback
from transformers.integrations import INTEGRATION_TO_CALLBACK

from sparsify import SparsifyCallback, SparsifyError, get_engine, sparsify, summary
from sparsify.api import trained_state


def run(model, folder, callback=None, **arguments):
    options = {"max_steps": 4, "save_strategy": "no", **arguments}
    return run_trainer(model, folder, callbacks=[callback] if callback else None, **options).model


def test_the_steps_are_found_and_without_the_callback_they_have_to_be_given(tmp_path):
    epochs = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 5}
    model = run(make_model(), tmp_path, **epochs)  # 48 rows, 12 batches: three optimizer steps
    engine = get_engine(model)
    assert (engine.steps, engine.step, engine.unmasked) == (3, 3, BUDGET)
    with pytest.raises(SparsifyError, match=r"pass steps= \(optimizer steps.* callbacks=\[SparsifyCallback"):
        make_trainer(make_model(steps=None), tmp_path, callbacks=[], save_strategy="no").train()


def test_a_model_that_was_trained_is_freed_before_the_function_that_trained_it_ends(tmp_path):
    model = make_model()
    trainer, freed = make_trainer(model, tmp_path, max_steps=1, save_strategy="no"), weakref.ref(model)
    trainer.train()
    del model, trainer
    gc.collect()
    assert freed() is None


class StopAfter(SparsifyCallback):
    def __init__(self, step):
        super().__init__()
        self.last = step

    def on_step_end(self, args, state, control, **event):
        super().on_step_end(args, state, control, **event)
        control.should_training_stop = state.global_step == self.last


def test_found_steps_are_found_again_by_each_run_and_given_ones_are_kept(tmp_path, recwarn):
    callback = SparsifyCallback()
    short = run(make_model(), tmp_path, callback, max_steps=2)
    engine = get_engine(run(make_model(), tmp_path, callback))
    assert (engine.steps, engine.step, engine.unmasked) == (4, 4, BUDGET)
    assert not recwarn.list
    stopped = run(make_model(), tmp_path, StopAfter(2), max_steps=4)
    assert 0 < get_engine(stopped).unmasked < BUDGET
    engine = get_engine(run(stopped, tmp_path, max_steps=2))
    assert (engine.steps, engine.step, engine.unmasked) == (4, 4, BUDGET)
    assert not recwarn.list
    given = make_model(steps=2)
    with pytest.warns(UserWarning, match="has steps=2, and the Trainer makes 4"):
        run(given, tmp_path, callback)
    assert get_engine(given).steps == 2
    for model in (copy.deepcopy(short), short):
        with pytest.warns(UserWarning, match=r"all 60 entries were unmasked by an earlier run of 2 .* 4 steps") as told:
            run(model, tmp_path)
        assert get_engine(model).steps == 4
        assert not any("the Trainer makes" in str(warning.message) for warning in told)


def test_models_that_cannot_be_trained_are_refused_before_the_first_step(tmp_path):
    plain = build("bert")[0]
    optimizer = torch.optim.AdamW(plain.parameters())
    with pytest.raises(SparsifyError, match=r'is not sparsified; .*strategy "full" leaves the model plain'):
        run(plain, tmp_path)
    model = sparsify(plain, BUDGET, "id3")
    with pytest.raises(SparsifyError, match=r"AdamW is to train .*holds `sparse_values`.*optimizers="):
        run(model, tmp_path, optimizers=(optimizer, None))
    assert summary(model).unmasked == 0


class Reporter(TrainerCallback):
    """Sends the logs at once, as TensorBoard's and W&B's reporters do."""

    sent = None

    def __init__(self):
        type(self).sent = []

    def on_log(self, args, state, control, logs=None, **_):
        self.sent.append(dict(logs))


@pytest.mark.parametrize("late", [False, True])
def test_reporters_and_the_printer_see_how_far_the_unmasking_has_come(tmp_path, monkeypatch, capsys, late):
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "recorder", Reporter)
    model, callback = make_model(), SparsifyCallback()
    options = {"report_to": ["recorder"], "save_strategy": "no", "eval_strategy": "steps", "eval_steps": 4}
    trainer = make_trainer(model, tmp_path, callbacks=[] if late else [callback], **options)
    if late:
        trainer.add_callback(callback)
    handler = trainer.callback_handler
    before = list(handler.callbacks)
    begins = [Mock(wraps=each.on_train_begin) for each in before]
    for each, begin in zip(before, begins, strict=True):
        monkeypatch.setattr(each, "on_train_begin", begin)
    trainer.train()
    last = summary(model)
    for logs in (Reporter.sent, trainer.state.log_history):
        training = [log for log in logs if "loss" in log]
        assert [log["unmasked"] for log in training] == [7, 15, 22, 30, 37, 45, 52, 60]
        assert [log["budget_share"] for log in training] == [log["unmasked"] / BUDGET for log in training]
        assert training[-1]["tensor_sparsity"] == last.tensor_sparsity
        assert training[-1]["selection_entropy"] == last.selection_entropy
        assert not any("unmasked" in log for log in logs if "loss" not in log)
        json.dumps(logs)
    assert "'unmasked'" in capsys.readouterr().out
    assert handler.callbacks[0] is callback
    assert sorted(map(id, handler.callbacks)) == sorted(map(id, before))
    assert {begin.call_count for begin in begins} == {1}, "each callback is called once although one of them moves"


FILES = {
    "model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json", "training_args.bin",
}  # fmt: skip
STATE = {"sparse_values", "sparse_position", "sparse_settings", "sparse_ids", "sparse_base"}


def test_a_model_saved_by_hand_while_it_trains_is_an_ordinary_one(tmp_path):
    class Save(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **_):
            if state.global_step == 3:
                model.save_pretrained(tmp_path / "by-hand")
                copy.deepcopy(model).save_pretrained(tmp_path / "run" / "copy")

    model = make_model()
    make_trainer(model, tmp_path / "run", callbacks=[SparsifyCallback(), Save()]).train()
    for folder in (tmp_path / "by-hand", tmp_path / "run" / "copy"):
        assert "bert.pooler.dense.weight" in load_file(folder / "model.safetensors")
        type(model).from_pretrained(folder)


class Named(nn.Module):
    """A plain module that returns its loss by name, as the Trainer expects it."""

    def __init__(self):
        super().__init__()
        self.inner = build("mlp")[0]

    def forward(self, x, labels):
        return {"loss": self.inner(x, labels)}


EPOCHS = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "epoch", "per_device_train_batch_size": 16}
CASES = {
    "a new head": (lambda: make_model(modules_to_save=["classifier"]), {}),
    "repeat": (lambda: make_model(strategy="d3-repeat", steps=4, budget=12), {}),
    "static": (lambda: make_model(strategy="pafi"), {}),
    "accumulation": (make_model, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "epochs": (make_model, EPOCHS),
    "autocast": (make_model, {"bf16": True}),
    "cosine": (lambda: make_model(schedule="cosine"), {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
    "plain": (lambda: sparsify(Named(), 20, "id3"), {"rows": rows_of("mlp"), "remove_unused_columns": False}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_resumed_from_a_checkpoint_of_the_trained_state_is_the_uninterrupted_one(
    case, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # transformers 4 sets it for good
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    make, arguments = CASES[case][0], {"max_steps": 4, **CASES[case][1]}

    def train(resume=None):
        model, own = make(), {}
        if case == "a new head":  # at a rate of its own
            groups = [{"params": [model.sparse_values]}, {"params": model.classifier.parameters(), "lr": 5e-2}]
            own["optimizers"] = torch.optim.AdamW(groups, lr=1e-2), None
        return outcome(run_trainer(model, tmp_path, resume=resume, **own, **arguments))

    expected = train()
    half, _ = sorted(tmp_path.iterdir())
    assert {path.name for path in half.iterdir()} == FILES
    state = load_file(half / "model.safetensors")
    head = {"classifier.weight", "classifier.bias"} if case == "a new head" else set()
    assert {name for name, value in state.items() if value.numel()} == STATE | head
    (frozen,) = state.keys() - STATE - head  # it is empty
    assert frozen in dict(make().named_parameters())
    assert_same(train(resume=str(half)), expected)
    assert "missing keys" not in caplog.text
    assert "unexpected keys" not in caplog.text


def test_a_run_that_was_done_already_stays_as_it_is(tmp_path):
    """The Trainer makes a step more where the last one was in the middle of an epoch."""
    options = {"max_steps": 4, "lr_scheduler_type": "constant"}
    straight = run_trainer(make_model(), tmp_path, **options)
    resumed = run_trainer(make_model(), tmp_path, resume=True, **options)
    assert resumed.state.global_step == 5
    (logs, *rest), expected = outcome(resumed), outcome(straight)
    del logs[5]
    assert_same((logs, *rest), expected)


def test_a_checkpoint_of_other_settings_or_another_base_is_refused(tmp_path):
    make_trainer(make_model(), tmp_path, max_steps=2).train()
    for model, text in [
        (make_model(budget=2 * BUDGET), r"budget=60, and this model is sparsified with budget=120.*extend\(model"),
        (sparsify(build("bert", seed=7)[0], BUDGET, "id3"), "build the model from the same base"),
    ]:
        with pytest.raises(SparsifyError, match=text):
            make_trainer(model, tmp_path, max_steps=2).train(resume_from_checkpoint=True)


def test_a_resumed_run_keeps_its_plan_though_the_trainer_makes_more_steps_and_extends_it_on_request(tmp_path):
    make_trainer(make_model(), tmp_path, max_steps=4).train()
    half = str(tmp_path / "checkpoint-2")
    with pytest.warns(UserWarning, match=r"run that is resumed, has steps=4, and the Trainer makes 8.*extend=True"):
        kept = run_trainer(make_model(), tmp_path / "kept", save_strategy="no", resume=half)
    callbacks = [SparsifyCallback(extend=True)]
    extended = run_trainer(make_model(), tmp_path / "extended", callbacks=callbacks, save_strategy="no", resume=half)
    unmasked = [[log["unmasked"] for log in t.state.log_history if "unmasked" in log] for t in (kept, extended)]
    assert unmasked[0] == [15, 30, 45, 60, 60, 60, 60, 60]
    assert unmasked[1] == [15, 30, 30, 30, 37, 45, 52, 60]
    assert summary(extended.model, verify=True).verification.ok


def test_a_trainer_warns_before_it_trains_what_no_delta_holds(tmp_path):
    model = make_model(steps=STEPS)
    model.classifier = nn.Linear(16, 3)
    with pytest.warns(UserWarning, match=r"`classifier.weight`, `classifier.bias` can train, but no delta holds them"):
        make_trainer(model, tmp_path, max_steps=1, save_strategy="no").train()


def test_a_checkpoint_that_was_written_without_the_callback_is_no_place_to_go_on_from(tmp_path):
    make_trainer(make_model(steps=2), tmp_path, callbacks=[], max_steps=2).train()
    loaded = pytest.warns(UserWarning, match="loaded without entries")
    with loaded, pytest.raises(SparsifyError, match="written without SparsifyCallback"):
        make_trainer(make_model(), tmp_path).train(resume_from_checkpoint=True)


def test_the_best_checkpoint_is_loaded_at_the_end(tmp_path):
    trainer = run_trainer(make_model(), tmp_path, save_total_limit=1, **BEST)
    best = tmp_path / f"checkpoint-{trainer.state.best_global_step}"
    assert trainer.state.best_global_step < STEPS
    assert trainer.state.best_model_checkpoint == str(best)
    assert [*tmp_path.iterdir()] == [best]
    there = make_model(steps=STEPS)
    there.load_state_dict(load_file(best / "model.safetensors"))
    state = there.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trainer.model.state_dict().items())


def lora(seed=0):
    plain = build("bert")[0]
    torch.manual_seed(seed)  # of LoRA's matrices
    config = LoraConfig(r=4, target_modules=["query", "value"], lora_dropout=0.1, modules_to_save=["classifier"])
    return sparsify(get_peft_model(plain, config), 0.3, "id3")


def test_a_sparse_lora_is_resumed_though_its_matrices_were_drawn_anew_and_its_best_entries_come_back(tmp_path):
    straight = run_trainer(lora(), tmp_path, **BEST)
    resumed = run_trainer(lora(seed=1), tmp_path, resume=str(tmp_path / "checkpoint-4"), **BEST)
    assert_same(outcome(resumed), outcome(straight))
    folder = Path(straight.state.best_model_checkpoint)
    assert {path.name for path in folder.iterdir()} == FILES | {
        "adapter_model.safetensors", "adapter_config.json", "README.md",
    }  # fmt: skip
    best, state = load_file(folder / "model.safetensors"), trained_state(straight.model)
    assert straight.state.best_global_step < STEPS
    assert get_engine(straight.model).unmasked == best["sparse_ids"].numel()
    assert all(torch.equal(value, state[name]) for name, value in best.items() if value.numel())
    again, batch = PeftModel.from_pretrained(build("bert")[0], folder).eval(), build("bert")[1][0]
    assert torch.equal(again(**batch).logits, straight.model.eval()(**batch).logits)
