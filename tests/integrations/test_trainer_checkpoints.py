"""Incomplete checkpoint folders of an interrupted run: found, set aside, and never resumed from."""

import shutil
import warnings
from pathlib import Path

import pytest
from trainers import assert_same, make_model, make_trainer, outcome, run_trainer

from sparsify import SparsifyCallback, SparsifyError
from sparsify.integrations.checkpoints import problem_with, set_aside_incomplete


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a whole run, and its outcome."""
    folder = tmp_path_factory.mktemp("run")
    return folder, outcome(run_trainer(make_model(), folder))


@pytest.fixture
def folder(run, tmp_path):
    return shutil.copytree(run[0], tmp_path / "run")


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


DAMAGES = [
    (Path.unlink, "trainer_state.json", "no complete trainer_state.json"),
    (cut, "trainer_state.json", "no complete trainer_state.json"),
    (Path.unlink, "model.safetensors", "no model.safetensors"),
    (cut, "model.safetensors", "a model.safetensors that is cut short"),
    (cut, "optimizer.pt", "no complete optimizer.pt"),
    (Path.unlink, "scheduler.pt", "no complete scheduler.pt"),
    (Path.unlink, "rng_state.pth", "no complete rng_state.pth"),
]


@pytest.mark.parametrize(("damage", "file", "problem"), DAMAGES)
def test_an_incomplete_checkpoint_is_set_aside_when_a_trainer_is_made(damage, file, problem, folder):
    damage(folder / "checkpoint-8" / file)
    with pytest.warns(UserWarning, match=rf"checkpoint-8` has {problem}.*It is called _incomplete-checkpoint-8 now"):
        make_trainer(make_model(), folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["_incomplete-checkpoint-8", "checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_training_goes_on_from_the_last_complete_checkpoint_and_what_was_set_aside_gives_way_to_the_next(folder, run):
    cut(folder / "checkpoint-8" / "optimizer.pt")
    with pytest.warns(UserWarning, match="no complete optimizer.pt"):
        resumed = run_trainer(make_model(), folder, resume=True)
    assert_same(outcome(resumed), run[1])
    assert problem_with(folder / "checkpoint-8") is None
    (folder / "checkpoint-8" / "model.safetensors").unlink()
    with pytest.warns(UserWarning, match="has no model.safetensors: its writer was interrupted"):
        set_aside_incomplete(folder)
    assert not (folder / "_incomplete-checkpoint-8" / "model.safetensors").exists()
    assert not (folder / "checkpoint-8").exists()


def test_a_callback_that_was_added_later_refuses_what_is_incomplete(folder):
    (folder / "checkpoint-8" / "optimizer.pt").unlink()
    trainer = make_trainer(make_model(), folder, callbacks=[])
    trainer.add_callback(SparsifyCallback())
    with pytest.raises(SparsifyError, match=r"checkpoint-8` has no complete optimizer.pt, so training cannot go on"):
        trainer.train(resume_from_checkpoint=True)


def test_complete_folders_and_those_of_others_are_left_alone(folder):
    (folder / "checkpoint-final").mkdir()
    (folder / "checkpoint-9").write_text("a file")
    before = sorted(path.name for path in folder.iterdir())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_aside_incomplete(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_checkpoint_of_the_model_only_and_one_that_was_written_without_the_callback_are_complete(tmp_path):
    make_trainer(make_model(), tmp_path / "only", save_only_model=True, max_steps=2).train()
    assert not (tmp_path / "only" / "checkpoint-2" / "optimizer.pt").exists()
    assert problem_with(tmp_path / "only" / "checkpoint-2") is None
    make_trainer(make_model(steps=2), tmp_path, callbacks=[], max_steps=2).train()
    assert problem_with(tmp_path / "checkpoint-2") is None
    (tmp_path / "checkpoint-2" / "model.safetensors").rename(tmp_path / "checkpoint-2" / "pytorch_model.bin")
    assert problem_with(tmp_path / "checkpoint-2") is None
