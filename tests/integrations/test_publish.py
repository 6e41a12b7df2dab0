"""The Trainer publishes its model: a follower has the trained weights after every optimizer step."""

import copy

from deltas import bits
from models import build
from trainers import BEST, BUDGET, STEPS, make_model, make_trainer, run_trainer
from transformers import TrainerCallback

from sparsify import DeltaSubscriber, SparseDelta, SparsifyCallback, sparsify


class Compare(TrainerCallback):
    """Notes after each step what a delta of the model would make of the base."""

    def __init__(self, base):
        self.base, self.expected = base, []

    def on_step_end(self, args, state, control, **event):
        delta = SparseDelta.from_model(event["model"])
        self.expected.append(bits(delta.apply(copy.deepcopy(self.base))))


def test_a_follower_has_the_weights_of_every_step(tmp_path):
    base, follower, found = build("bert")[0], None, []

    def publish(update):
        version = follower.apply(bytes(update))
        assert version == update.version
        if version:
            found.append(bits(follower.model))

    follower = DeltaSubscriber(copy.deepcopy(base))
    model = sparsify(copy.deepcopy(base), BUDGET, "id3", modules_to_save=["classifier"])
    compare, callback = Compare(base), SparsifyCallback(publish=publish)
    options = {"gradient_accumulation_steps": 2, "save_strategy": "no"}
    trainer = run_trainer(model, tmp_path, callbacks=[callback, compare], **options)
    assert len(found) == follower.version == STEPS
    assert found == compare.expected
    late = DeltaSubscriber(copy.deepcopy(base))
    assert late.apply(callback.publisher.snapshot()) == STEPS
    assert bits(late.model) == found[-1]
    trainer.train()  # a run of its own: a new chain, which begins with a snapshot
    assert follower.version == STEPS


def test_the_best_model_that_is_loaded_at_the_end_is_published(tmp_path):
    follower, model = DeltaSubscriber(build("bert")[0]), sparsify(build("bert")[0], BUDGET, "id3")
    callback = SparsifyCallback(publish=lambda update: follower.apply(bytes(update)))
    trainer = run_trainer(model, tmp_path, callbacks=[callback], **BEST)
    assert trainer.state.best_global_step < STEPS
    assert follower.version == STEPS + 1
    assert bits(follower.model) == bits(SparseDelta.from_model(model).apply(build("bert")[0]))


def test_a_resumed_run_begins_a_new_chain(tmp_path):
    base, sent = build("bert")[0], []
    silent, callback = SparsifyCallback(), SparsifyCallback(publish=sent.append)
    make_trainer(make_model(), tmp_path, callbacks=[silent], max_steps=STEPS).train()
    assert silent.publisher is None
    model = make_model()
    run_trainer(model, tmp_path, callbacks=[callback], resume=str(tmp_path / "checkpoint-4"))
    assert [update.version for update in sent] == list(range(STEPS - 4 + 1))
    follower = DeltaSubscriber(copy.deepcopy(base))
    for update in sent:
        follower.apply(bytes(update))
    assert bits(follower.model) == bits(SparseDelta.from_model(model).apply(base))
