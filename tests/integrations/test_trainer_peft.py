"""Trainers with peft_config=SparseConfig(...): steps are found without a callback, and checkpoints resume and serve."""

from functools import partial

import pytest
import torch
import transformers as hf
from models import build
from trainers import BEST, BUDGET, STEPS, make_trainer, rows_of, run_trainer, sentences, steps_done, tokenizer

from sparsify import SparseDelta, SparsifyCallback, get_engine, load_model, sparsify

peft = pytest.importorskip("peft", minversion="0.21", reason="earlier versions of PEFT have no place for a method")

from sparsify.integrations.checkpoints import save_checkpoint  # noqa: E402
from sparsify.peft import SparseConfig  # noqa: E402

TARGETS = ["q_proj", "v_proj"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    paths = {name: tmp_path_factory.mktemp(name) for name in ("bert", "llama")}
    for name, path in paths.items():
        build(name)[0].save_pretrained(path)
    return paths


@pytest.fixture
def bert(folders):
    return lambda: hf.BertForSequenceClassification.from_pretrained(folders["bert"])


@pytest.fixture
def llama(folders):
    return lambda: hf.LlamaForCausalLM.from_pretrained(folders["llama"])


@pytest.fixture
def wrapped(bert):
    own = {"budget": BUDGET, "strategy": "id3", "target_modules": ["query", "value"], "task_type": "SEQ_CLS"}
    return lambda: peft.get_peft_model(bert(), SparseConfig(**own))


@torch.no_grad()
def scores(model, name="bert"):
    inputs = {key: value for key, value in build(name)[1][0].items() if key != "labels"}
    return model.eval()(**inputs).logits


def test_the_trainer_finds_steps_and_resumes_bit_for_bit_without_a_callback(wrapped, bert, tmp_path):
    whole = run_trainer(wrapped(), tmp_path, callbacks=[])
    assert steps_done(whole.model) == (STEPS, BUDGET)
    assert "unmasked" in whole.state.log_history[0]
    plain = sparsify(bert(), BUDGET, "id3", target_modules=["query", "value"], modules_to_save=["classifier"])
    make_trainer(plain, tmp_path / "plain").train()
    assert torch.equal(get_engine(plain).values, get_engine(whole.model).values)
    again = run_trainer(wrapped(), tmp_path, callbacks=[], resume=str(tmp_path / "checkpoint-4"))
    assert steps_done(again.model) == (STEPS, BUDGET)
    assert torch.equal(scores(again.model), scores(whole.model))


def test_the_best_checkpoint_is_loaded_at_the_end_and_each_is_an_adapter(wrapped, bert, tmp_path):
    run = run_trainer(wrapped(), tmp_path, callbacks=[SparsifyCallback()], **BEST)
    assert sum(isinstance(callback, SparsifyCallback) for callback in run.callback_handler.callbacks) == 1
    best = run.state.best_model_checkpoint
    assert not best.endswith(f"-{STEPS}")
    served = hf.AutoModelForSequenceClassification.from_pretrained(best)
    for model in (served, peft.PeftModel.from_pretrained(bert(), best)):
        assert torch.equal(scores(model), scores(run.model))


def test_a_lora_beside_the_entries_has_a_rate_of_its_own_and_resumes_bit_for_bit(llama, tmp_path):
    def run():
        torch.manual_seed(0)
        own = {
            "budget": BUDGET,
            "strategy": "id3",
            "target_modules": TARGETS,
            "task_type": "CAUSAL_LM",
            "lora": peft.LoraConfig(r=2),
        }
        model = peft.get_peft_model(llama(), SparseConfig(**own))
        matrices = [parameter for name, parameter in model.named_parameters() if ".lora_" in name]
        groups = [{"params": [get_engine(model).values], "lr": 1e-2}, {"params": matrices, "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups)
        return make_trainer(model, tmp_path, rows_of("llama"), callbacks=[], optimizers=(optimizer, None))

    whole = run()
    whole.train()
    assert steps_done(whole.model) == (STEPS, BUDGET)
    assert [round(group["initial_lr"], 6) for group in whole.optimizer.param_groups] == [1e-2, 1e-3]
    served = hf.AutoModelForCausalLM.from_pretrained(tmp_path / f"checkpoint-{STEPS}")
    assert torch.equal(scores(served, "llama"), scores(whole.model, "llama"))
    again = run()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert torch.equal(scores(again.model, "llama"), scores(whole.model, "llama"))


def test_an_adapter_of_transformers_own_trains_too(llama, tmp_path):
    model = llama()
    model.add_adapter(SparseConfig(budget=BUDGET, strategy="id3", target_modules=TARGETS))
    run_trainer(model, tmp_path, rows_of("llama"), callbacks=[])
    assert steps_done(model) == (STEPS, BUDGET)
    model.save_pretrained(tmp_path / "adapter")
    for folder in ("adapter", f"checkpoint-{STEPS}"):
        served = hf.AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(scores(served, "llama"), scores(model, "llama"))


def test_a_checkpoint_of_a_sparsified_model_is_an_adapter_of_its_base(folders, bert, tmp_path):
    model = bert()
    run = run_trainer(sparsify(model, BUDGET, "id3", modules_to_save=["classifier"]), tmp_path)
    folder = tmp_path / f"checkpoint-{STEPS}"
    for loaded in (
        hf.AutoModelForSequenceClassification.from_pretrained(folder), load_model(folders["bert"], folder),
        peft.AutoPeftModel.from_pretrained(folder),
    ):  # fmt: skip
        assert torch.equal(scores(loaded), scores(model))
    assert SparseDelta.load(folder) == SparseDelta.from_model(model)
    model.sparse_values.data[-1] = torch.inf
    with pytest.warns(UserWarning, match=r"from_pretrained\(\) will not take .* not finite"):
        save_checkpoint(model, run.args, run.state, folder)


def trl_trainer(method, model, folder, columns, settings=None, **options):
    trl = pytest.importorskip("trl")
    kind = partial(getattr(trl, f"{method}Trainer"), processing_class=tokenizer(), **options)
    rows = {name: sentences(24, 5, seed) for seed, name in enumerate(columns)}
    data, kinds = pytest.importorskip("datasets").Dataset.from_dict(rows), (kind, getattr(trl, f"{method}Config"))
    settings = {"max_length": 12} if settings is None else settings
    return make_trainer(model, folder, data, callbacks=[], kind=kinds, bf16=False, max_steps=4, **settings)


@pytest.mark.parametrize(("method", "columns"), [("SFT", ["text"]), ("DPO", ["prompt", "chosen", "rejected"])])
def test_trl_takes_it_as_peft_config(method, columns, llama, tmp_path):
    lora = peft.LoraConfig(r=2) if method == "DPO" else None
    config = SparseConfig(budget=BUDGET, strategy="id3", target_modules=TARGETS, lora=lora)
    run = trl_trainer(method, llama(), tmp_path, columns, peft_config=config)
    run.train()
    assert steps_done(run.model) == (4, BUDGET)
    assert getattr(run, "ref_model", None) is None
    margins = [log["rewards/margins"] for log in run.state.log_history if "rewards/margins" in log]
    assert not margins or margins[0] == 0 != margins[-1]  # of DPO, whose reference is the base
    run.save_model(tmp_path / "final")
    served = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert torch.equal(scores(served, "llama"), scores(run.model, "llama"))
    assert (tmp_path / "checkpoint-2" / "adapter_model.safetensors").stat().st_size < 8_000
    again = trl_trainer(method, llama(), tmp_path, columns, peft_config=config)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert torch.equal(get_engine(again.model).values, get_engine(run.model).values)


def test_a_reward_model_of_trl_trains_its_head_too(folders, tmp_path):
    config = SparseConfig(budget=BUDGET, strategy="id3", target_modules=TARGETS, task_type="SEQ_CLS")

    def model():
        torch.manual_seed(0)
        options = {"num_labels": 1, "pad_token_id": 0}
        return hf.LlamaForSequenceClassification.from_pretrained(folders["llama"], **options)

    run = trl_trainer("Reward", model(), tmp_path, ["chosen", "rejected"], peft_config=config)
    run.train()
    assert steps_done(run.model) == (4, BUDGET)
    run.save_model(tmp_path / "final")
    served = peft.PeftModel.from_pretrained(model(), tmp_path / "final")
    assert torch.equal(scores(served, "llama"), scores(run.model, "llama"))
    before, after = dict(model().named_parameters()), run.model.merge_and_unload().named_parameters()
    changed = {name.split(".")[-2] for name, parameter in after if not torch.equal(parameter, before[name])}
    assert {"score"} < changed <= {"score", *TARGETS}


@pytest.mark.slow
def test_grpo_leaves_the_base_which_it_measures_without_a_second_model(llama, tmp_path):
    def variety(completions, **columns):
        return [float(len(set(completion.split()))) for completion in completions]

    model = llama()
    for parameter in model.parameters():
        parameter.data.mul_(10 if parameter.dim() > 1 else 1)  # so that samples differ
    options = {
        "peft_config": SparseConfig(budget=BUDGET, strategy="id3", target_modules=TARGETS),
        "reward_funcs": variety,
    }
    settings = {"num_generations": 4, "max_completion_length": 6, "beta": 0.1}
    run = trl_trainer("GRPO", model, tmp_path, ["prompt"], settings, **options)
    run.train()
    assert steps_done(run.model) == (4, BUDGET)
    assert run.ref_model is None
    divergences = [log["kl"] for log in run.state.log_history if "kl" in log]
    assert divergences[0] == 0 < divergences[-1]


def test_the_reference_of_a_trained_adapter_is_the_adapter_as_it_was(llama, tmp_path):
    config = SparseConfig(budget=BUDGET, strategy="id3", target_modules=TARGETS)
    first = trl_trainer("SFT", llama(), tmp_path / "sft", ["text"], peft_config=config)
    first.train()
    first.save_model(tmp_path / "first")
    model = peft.PeftModel.from_pretrained(llama(), tmp_path / "first", is_trainable=True)
    run = trl_trainer("DPO", model, tmp_path / "dpo", ["prompt", "chosen", "rejected"])
    run.train()
    assert not torch.equal(scores(model, "llama"), scores(first.model, "llama"))
    model.set_adapter("ref")
    assert torch.equal(scores(model, "llama"), scores(first.model, "llama"))
