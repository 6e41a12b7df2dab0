"""Trainer runs that are killed (-9) at random moments and resumed: each must end as the run that nobody killed.

A run writes a checkpoint after every step and keeps two. Half of the kills come at any time of the run, the others at
one of the file operations of writing a checkpoint and deleting older ones. A run is killed one to three times in a row.
The promise: it resumes from a complete checkpoint wherever there is one, and ends as the uninterrupted run, to the bit.
"""

import contextlib
import multiprocessing
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from trainers import assert_same, make_model, make_trainer, outcome
from transformers import TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from sparsify import SparsifyCallback
from sparsify.integrations.checkpoints import problem_with

STEPS, RESULT = 7, "result.pt"
WRITES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")  # audit events of a checkpoint's writing
MOST_WRITES = 20  # of one checkpoint: mkdir, the weights in a folder of their own, the other files, an old one deleted
PRELOADED = ["transformers.trainer", "transformers.models.bert.modeling_bert", "sparsify.integrations.transformers"]
SECONDS = 300  # of one run; far more than it takes


class DiesWriting(TrainerCallback):
    """Kills its process at an operation of writing a checkpoint, which is counted from where the run goes on."""

    def __init__(self, step, operation):
        self.step, self.left, self.writing = step, operation, False
        sys.addaudithook(self.audit)

    def audit(self, event, arguments):
        if self.writing and event in WRITES:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **_):
        self.step -= 1
        self.writing = self.step < 0

    def on_save(self, args, state, control, **_):
        self.writing = False


def run(folder, doom, begun):
    begun.send("imported")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begins = TrainerCallback()
    begins.on_train_begin = lambda args, state, control, **_: setattr(begins, "step", state.global_step)
    callbacks = [SparsifyCallback(), begins, *([DiesWriting(*doom)] if doom else [])]
    trainer = make_trainer(
        make_model(modules_to_save=["classifier"]), folder, callbacks=callbacks, max_steps=STEPS, save_steps=1,
        save_total_limit=2,
    )  # fmt: skip
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) is not None)
    logs, *rest = outcome(trainer)
    logs.pop(STEPS + 1, None)  # the Trainer's idle step, where the run was killed when all steps were done
    torch.save((begins.step, (logs, *rest)), folder / RESULT)


def start(folder, doom=None):
    folder.mkdir(exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    begun, begins = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(folder, doom, begins))
    process.start()
    begins.close()
    begun.recv()
    return process


def finish(folder, expected):
    complete = [path for path in folder.glob("checkpoint-*") if problem_with(path) is None]
    last = max((int(path.name.rpartition("-")[2]) for path in complete), default=0)
    process = start(folder)
    process.join(SECONDS)
    assert process.exitcode == 0, f"{folder}: the resumed run ended with {process.exitcode}"
    begun_at, ending = torch.load(folder / RESULT, weights_only=True)
    assert begun_at == last, f"{folder}: resumed at step {begun_at}, with a complete checkpoint of step {last}"
    assert_same(ending, expected)


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL and a fork server")
@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_runs_that_are_killed_and_resumed_are_the_uninterrupted_one(kills, tmp_path):
    draw, counts = random.Random(3), Counter()
    process = start(tmp_path / "straight")
    begin = time.monotonic()
    process.join(SECONDS)
    seconds = time.monotonic() - begin
    _, expected = torch.load(tmp_path / "straight" / RESULT, weights_only=True)
    while (done := counts.total()) < kills:
        folder = tmp_path / f"run-{done}"
        for _ in range(draw.randint(1, 3)):
            if counts.total() == kills:
                break
            kind = ("any time", "writing")[counts.total() % 2]
            process = start(folder, (draw.randrange(STEPS), draw.randrange(MOST_WRITES)) if kind == "writing" else None)
            if kind == "any time":
                process.join(draw.uniform(0, seconds))
                process.kill()
            process.join(SECONDS)
            if process.exitcode != -signal.SIGKILL:
                break  # it was faster
            counts[kind] += 1
        if not (folder / RESULT).exists():
            finish(folder, expected)
        shutil.rmtree(folder)
    assert counts == {"any time": kills // 2, "writing": kills // 2}
