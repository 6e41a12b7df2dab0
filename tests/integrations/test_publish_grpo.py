"""GRPO by a follower that samples: each rollout is by the trainer's weights of that step, bit by bit."""

import pytest
import torch
from deltas import bits
from test_trl import BUDGET, STEPS, grpo, load, save_base

from sparsify import DeltaSubscriber, SparseDelta, SparsifyCallback, sparsify

pytestmark = pytest.mark.slow


def completions(model, prompts, seed):
    """Two completions of each prompt: the most probable tokens, and sampled ones."""
    torch.manual_seed(seed)
    length = len(prompts[0])
    made = (
        model.generate(torch.tensor(prompts), max_new_tokens=6, do_sample=do_sample, pad_token_id=0)
        for do_sample in (False, True)
    )
    return [tokens[:, length:].tolist() for tokens in made]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_base(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("options", "versions"),
    [
        ({}, [0, 1, 2, 3]),
        ({"gradient_accumulation_steps": 2}, [0, 1, 2, 3]),
        ({"num_iterations": 2}, [0, 2]),  # each batch of completions serves two steps
        ({"beta": 0.1}, [0, 1, 2, 3]),  # with the base as reference
    ],
)
def test_each_rollout_is_by_the_weights_of_its_version(base, tmp_path, options, versions):
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
    model = sparsify(load(base), BUDGET)
    trainer = grpo(model, tmp_path, callbacks=[callback], rollout_func=rollout, **options)
    trainer.train()
    assert found == versions
    rollout(["bal ket"], trainer)
    assert found[-1] == STEPS
    resumed = grpo(sparsify(load(base), BUDGET), tmp_path, callbacks=[callback], rollout_func=rollout, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))  # a chain of its own, counted from 0
    assert found[len(versions) + 1 :] == [version - 2 for version in versions if version >= 2]
    assert bits(resumed.model) == bits(model)
