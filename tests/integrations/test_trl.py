"""TRL's trainers on a sparsified tiny Llama: the oracle's entries, resuming, DPO's reference, GRPO's rollouts."""

import copy
import weakref
from functools import partial

import pytest
import torch
import trainers
from deltas import bits
from models import build
from oracle import unmasked_sets
from peft import LoraConfig, get_peft_model
from quantized_models import quantize
from trainers import assert_same, outcome, sentences, tokenizer
from transformers import LlamaForCausalLM, TrainerCallback

from sparsify import DeltaSubscriber, SparseDelta, SparsifyCallback, SparsifyError, load_model, sparsify
from sparsify.api import get_engine, summary

trl = pytest.importorskip("trl", reason="TRL is in the extra `test`")
Dataset = pytest.importorskip("datasets", reason="datasets is in the extra `test`").Dataset

BUDGET, STEPS = 40, 4


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The folder of a tiny Llama, its weights far enough from zero for the losses to differ."""
    folder, (model, _) = tmp_path_factory.mktemp("llama"), build("llama")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(10)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def load(folder):
    return LlamaForCausalLM.from_pretrained(folder)


def make_trainer(kind, config, data, model, folder, callbacks=None, **more):
    made, chosen = partial(kind, processing_class=tokenizer()), {"max_steps": STEPS, "bf16": False, **more}
    return trainers.make_trainer(model, folder, Dataset.from_dict(data), callbacks, kind=(made, config), **chosen)


def sft(*args, **options):
    rows = {"text": sentences(24, 9, seed=0)}
    return make_trainer(trl.SFTTrainer, trl.SFTConfig, rows, *args, max_length=12, **options)


def dpo(*args, kind=trl.DPOTrainer, **options):
    pairs = {name: sentences(24, 4, seed) for seed, name in enumerate(("prompt", "chosen", "rejected"))}
    return make_trainer(kind, trl.DPOConfig, pairs, *args, max_length=12, **options)


def variety(completions, **columns):
    return [float(len(set(completion.split()))) for completion in completions]


def grpo(*args, rollout_func=None, **options):
    """Generates the completions itself, unless it is given a function for that."""
    kind = partial(trl.GRPOTrainer, reward_funcs=variety, rollout_func=rollout_func)
    options = {"num_generations": 4, "max_completion_length": 6, **options}
    return make_trainer(kind, trl.GRPOConfig, {"prompt": sentences(24, 4, seed=0)}, *args, **options)


TRAINERS = {"sft": sft, "dpo": dpo, "grpo": grpo}
KINDS = ["sft", "dpo", pytest.param("grpo", marks=pytest.mark.slow)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_entries_and_their_updates_are_the_oracles(kind, base, tmp_path):
    """One step of SGD on the plain model tells every gradient, those of weights that TRL reads itself included."""
    options = {"max_steps": 1, "save_strategy": "no", "optim": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0}
    start, dense = load(base), load(base)
    trainer = TRAINERS[kind](dense, tmp_path, callbacks=[], **options)
    trainer.train()
    gradients = {name: (before - dense.get_parameter(name)).detach() / 0.5 for name, before in start.named_parameters()}
    scores = {name: grad.abs() / (start.get_parameter(name).abs() + 1) ** 2 for name, grad in gradients.items()}
    cut = torch.cat([score.flatten() for score in scores.values()]).topk(BUDGET).values[-1]
    sparse = sparsify(load(base), BUDGET, "id3")
    TRAINERS[kind](sparse, tmp_path, **options).train()
    best = {name: (score >= cut).flatten().nonzero().flatten().tolist() for name, score in scores.items()}
    assert unmasked_sets(sparse) == best
    for name, score in scores.items():
        expected = torch.where(score >= cut, dense.get_parameter(name), start.get_parameter(name))
        torch.testing.assert_close(sparse.get_parameter(name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_logged_and_resumed_bit_for_bit(kind, base, tmp_path):
    straight = TRAINERS[kind](sparsify(load(base), BUDGET, "id3"), tmp_path)
    straight.train()
    engine = get_engine(straight.model)
    assert (engine.steps, engine.unmasked) == (STEPS, BUDGET)
    assert summary(straight.model, verify=True).verification.ok
    assert [log["unmasked"] for log in straight.state.log_history if "loss" in log] == [10, 20, 30, 40]
    assert (tmp_path / "checkpoint-2" / "model.safetensors").stat().st_size < 6_000
    resumed = TRAINERS[kind](sparsify(load(base), BUDGET, "id3"), tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(outcome(resumed), outcome(straight))


def test_dpos_reference_is_the_base(base, tmp_path):
    """By default a second model is loaded by the base's name; computed ahead of training, there is none."""
    runs = []
    for precompute in (False, True):
        trainer = dpo(
            sparsify(load(base), BUDGET, "id3"), tmp_path / str(precompute), precompute_ref_log_probs=precompute
        )
        assert (trainer.ref_model is None) == precompute
        trainer.train()
        runs.append(outcome(trainer))
        assert runs[-1][0][1][0] == pytest.approx(0.6931, abs=1e-4)  # log 2: nothing learnt yet
    assert runs[0][1] == runs[1][1]
    for step, log in runs[0][0].items():
        assert log == pytest.approx(runs[1][0][step], rel=1e-4)


def losses(trainer):
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_base_takes_the_place_of_the_second_model_that_is_freed(kind, base, tmp_path):
    options = {"beta": 0.3, "save_strategy": "no"}
    trainer = TRAINERS[kind](sparsify(load(base), BUDGET, "id3"), tmp_path, **options)
    second = weakref.ref(trainer.ref_model)
    trainer.train()
    assert second() is None
    late = TRAINERS[kind](sparsify(load(base), BUDGET, "id3"), tmp_path, callbacks=[], **options)
    late.add_callback(SparsifyCallback())
    with pytest.warns(UserWarning, match=r"reference is a second model.*pass it in callbacks=\[...\]"):
        late.train()
    assert isinstance(late.ref_model, LlamaForCausalLM)
    assert losses(trainer) == losses(late)
    assert torch.equal(trainer.model.sparse_values, late.model.sparse_values)
    assert trainer.model.training


class Mixing(TrainerCallback):
    """A second model that follows, parameter by parameter, as TRL's does for a dense model."""

    def __init__(self, model):
        self.model = model

    def on_step_end(self, args, state, control, model=None, **_):
        if state.global_step % args.ref_model_sync_steps == 0:
            for name, parameter in self.model.named_parameters():
                parameter.data.lerp_(model.get_parameter(name).data, args.ref_model_mixup_alpha)


SYNCED = {"save_strategy": "no", "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.6, "sync_ref_model": True}


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_reference_that_is_synced_follows_the_trained_values(kind, base, tmp_path):
    model, mixing, tokens = sparsify(load(base), BUDGET, "id3"), Mixing(load(base)), torch.arange(8)[None]
    trainer = TRAINERS[kind](model, tmp_path, callbacks=[SparsifyCallback(), mixing], beta=0.3, **SYNCED)
    for _ in range(2):
        trainer.train()
        torch.testing.assert_close(trainer.ref_model(tokens).logits, mixing.model(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not torch.equal(trainer.ref_model(tokens).logits, load(base)(tokens).logits)
    assert summary(model, verify=True).verification.ok


def test_a_reference_that_cannot_follow_is_refused_by_name_and_a_given_one_is_kept(base, tmp_path):
    given = load(base)
    for model, options, match in (
        (sparsify(load(base), BUDGET, "id3"), {"ref_model": given}, "it was given to the trainer"),
        (
            sparsify(load(base), BUDGET, "id3", modules_to_save=["lm_head"]),
            {},
            "`lm_head.weight` of modules_to_save has no",
        ),
    ):
        kind = partial(trl.DPOTrainer, **options)
        with pytest.raises(SparsifyError, match=f"{match}.*sync_ref_model=True would mix"):
            dpo(model, tmp_path, kind=kind, **SYNCED).train()
    trainer = dpo(
        sparsify(load(base), BUDGET, "id3"), tmp_path, kind=partial(trl.DPOTrainer, ref_model=given), max_steps=1
    )
    trainer.train()
    assert trainer.ref_model is given


def test_the_reference_of_a_quantized_model_is_quantized(base, tmp_path):
    def sparse():
        return sparsify(quantize(load(base), "nf4"), BUDGET, "id3", steps=STEPS, target_modules="all-linear")

    trainer = dpo(sparse(), tmp_path, save_strategy="no")
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(0.6931, abs=1e-4)
    assert len(set(losses(trainer))) == STEPS


def test_a_peft_config_is_refused_by_its_name(base, tmp_path):
    for callbacks in ([], None):
        kind = partial(trl.DPOTrainer, peft_config=LoraConfig(r=2))
        with pytest.raises(SparsifyError, match=r"does not require grad: .*trainers that are given a peft_config"):
            dpo(sparsify(load(base), BUDGET, "id3", steps=STEPS), tmp_path, callbacks=callbacks, kind=kind).train()


def test_a_sparse_lora_is_its_own_reference_with_the_adapter_off(base, tmp_path):
    model = get_peft_model(load(base), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    before = copy.deepcopy(model.state_dict())
    trainer = dpo(sparsify(model, 0.3, "id3"), tmp_path)
    assert trainer.ref_model is None
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(0.6931, abs=1e-4)
    assert len(set(losses(trainer))) == STEPS
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items() if "lora_" not in name)
    tokens = torch.arange(8)[None]
    loaded = load_model(base, SparseDelta.from_model(model))  # without the copy that TRL has added as the reference
    assert torch.equal(loaded(tokens).logits, model.eval()(tokens).logits)


def completions(model, prompts, seed):
    """Two completions of each prompt: the most probable tokens, and sampled ones."""
    torch.manual_seed(seed)
    length = len(prompts[0])
    made = (
        model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=do_sample, pad_token_id=0)
        for do_sample in (False, True)
    )
    return [tokens[:, length:].tolist() for tokens in made]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "versions"),
    [
        ({}, [0, 1, 2, 3]),
        ({"gradient_accumulation_steps": 2}, [0, 1, 2, 3]),
        ({"num_iterations": 2}, [0, 2]),  # each batch of completions serves two steps
        ({"beta": 0.1}, [0, 1, 2, 3]),  # with the base as reference
    ],
)
def test_each_rollout_of_a_follower_is_by_the_weights_of_its_version(base, tmp_path, options, versions):
    sampler, found = DeltaSubscriber(load(base).eval()), []

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts).input_ids
        last = callback.publisher.snapshot()
        model = trainer.model.eval()
        with sampler.reading() as version:
            assert (sampler.chain, version) == (last.chain, last.version)
            found.append(version)
            greedy, sampled = completions(sampler.model, ids, trainer.state.global_step)
        assert [greedy, sampled] == completions(model, ids, trainer.state.global_step)
        model.train()
        assert bits(sampler.model) == bits(SparseDelta.from_model(model).apply(load(base)))
        return {"prompt_ids": ids, "completion_ids": sampled, "logprobs": None}

    callback = SparsifyCallback(publish=lambda update: sampler.apply(bytes(update)))
    model = sparsify(load(base), BUDGET, "id3")
    trainer = grpo(model, tmp_path, callbacks=[callback], rollout_func=rollout, **options)
    trainer.train()
    assert found == versions
    rollout(["bal ket"], trainer)
    assert found[-1] == STEPS
    resumed = grpo(sparsify(load(base), BUDGET, "id3"), tmp_path, callbacks=[callback], rollout_func=rollout, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # a chain of its own, counted from 0
    assert found[len(versions) + 1 :] == [version - 2 for version in versions if version >= 2]
    assert bits(resumed.model) == bits(model)
