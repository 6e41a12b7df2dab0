"""Incomplete checkpoint folders of an interrupted run: found, set aside, and never resumed from."""

import shutil
import warnings

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


DAMAGES = {
    "no trainer state": (lambda folder: (folder / "trainer_state.json").unlink(), "no complete trainer_state.json"),
    "half a trainer state": (lambda folder: cut(folder / "trainer_state.json"), "no complete trainer_state.json"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "half the weights": (lambda folder: cut(folder / "model.safetensors"), "model.safetensors that is cut short"),
    "no optimizer": (lambda folder: (folder / "optimizer.pt").unlink(), "no complete optimizer.pt"),
    "half an optimizer": (lambda folder: cut(folder / "optimizer.pt"), "no complete optimizer.pt"),
    "no scheduler": (lambda folder: (folder / "scheduler.pt").unlink(), "no complete scheduler.pt"),
    "no random state": (lambda folder: (folder / "rng_state.pth").unlink(), "no complete rng_state.pth"),
    "nothing at all": (lambda folder: [path.unlink() for path in folder.iterdir()], "no complete trainer_state.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_incomplete_checkpoint_is_set_aside_and_the_one_before_it_resumed_from(damage, folder, run):
    spoil, problem = DAMAGES[damage]
    spoil(folder / "checkpoint-8")
    assert problem in problem_with(folder / "checkpoint-8")
    assert problem_with(folder / "checkpoint-6") is None
    with pytest.warns(UserWarning, match=r"checkpoint-8` has .*It is called _incomplete-checkpoint-8 now"):
        trainer = make_trainer(make_model(), folder)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["_incomplete-checkpoint-8", "checkpoint-2", "checkpoint-4", "checkpoint-6"]
    trainer.train(resume_from_checkpoint=True)
    assert_same(outcome(trainer), run[1])
    assert problem_with(folder / "checkpoint-8") is None


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


def test_a_folder_that_was_set_aside_gives_way_to_the_next(folder):
    for _ in range(2):
        (folder / "checkpoint-8").mkdir(exist_ok=True)
        (folder / "checkpoint-8" / "model.safetensors").unlink(missing_ok=True)
        with pytest.warns(UserWarning, match="was interrupted"):
            set_aside_incomplete(folder)
    assert (folder / "_incomplete-checkpoint-8").is_dir()
    assert not (folder / "checkpoint-8").exists()


def test_a_checkpoint_of_the_model_only_and_one_that_was_written_without_the_callback_are_complete(tmp_path):
    make_trainer(make_model(), tmp_path / "only", save_only_model=True, max_steps=2).train()
    assert not (tmp_path / "only" / "checkpoint-2" / "optimizer.pt").exists()
    assert problem_with(tmp_path / "only" / "checkpoint-2") is None
    make_trainer(make_model(steps=2), tmp_path, callbacks=[], max_steps=2).train()
    assert problem_with(tmp_path / "checkpoint-2") is None
    (tmp_path / "checkpoint-2" / "model.safetensors").rename(tmp_path / "checkpoint-2" / "pytorch_model.bin")
    assert problem_with(tmp_path / "checkpoint-2") is None
