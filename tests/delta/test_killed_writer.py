"""A writer that is killed leaves one whole file, the old one or the new one, and nothing that gets in the way."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsify.delta.format import CONFIG_NAME, FILE_NAME
from sparsify.delta.metadata import parse
from sparsify.delta.sparse_delta import SparseDelta

ROOT = Path(__file__).parents[2]
# dies at one call of a function of the os module
DIES_AT = """
import os, signal, sys
from test_killed_writer import version
delta = version(1)
setattr(os, sys.argv[2], lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
delta.save(sys.argv[1])
"""


def version(number):
    return SparseDelta({}, {"w": torch.full((200_000,), float(number))}, {"version": number})


def leftovers(folder):
    return [item.name for item in folder.iterdir() if item.name not in (FILE_NAME, CONFIG_NAME)]


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_writer_killed_before_the_rename_leaves_the_old_file_whole(tmp_path, where):
    version(0).save(tmp_path)
    before = (tmp_path / FILE_NAME).read_bytes()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)])}
    writer = subprocess.run([sys.executable, "-c", DIES_AT, tmp_path, where], env=environment, timeout=120)
    assert writer.returncode == -signal.SIGKILL
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert SparseDelta.load(tmp_path) == version(0)
    assert len(leftovers(tmp_path)) == 1  # so it was at work
    assert leftovers(tmp_path)[0].startswith(f".{FILE_NAME}.")
    version(2).save(tmp_path)
    assert SparseDelta.load(tmp_path) == version(2)
    assert len(leftovers(tmp_path)) == 1


def test_a_file_that_is_replaced_while_it_is_read_is_read_as_it_was(tmp_path, monkeypatch):
    for number in (0, 1):
        version(number).save(tmp_path / str(number))

    def replace(header):
        os.replace(tmp_path / "1" / FILE_NAME, tmp_path / "0" / FILE_NAME)
        return parse(header)

    monkeypatch.setattr("sparsify.delta.format.parse", replace)
    assert SparseDelta.load(tmp_path / "0") == version(0)
    assert not (tmp_path / "1" / FILE_NAME).exists()
