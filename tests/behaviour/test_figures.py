"""The documentation's figures are drawn by their scripts, from the repository's data or a small model."""

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from examples.figures import entries, quality, step
from sparsify import SparseDelta, sparsify


def words(path):
    return {text.strip() for text in ElementTree.parse(path).getroot().itertext() if text.strip()}


def test_quality_has_a_panel_for_each_task(tmp_path):
    quality.main(["--out", str(tmp_path / "figure.svg")])
    assert {"SST-2, accuracy", "WNUT17, entity F1", "ID3", "LoRA", "full fine-tuning"} <= words(tmp_path / "figure.svg")


def test_entries_are_drawn_from_a_delta(tmp_path):
    model = sparsify(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 8, "pafi")
    with torch.no_grad():
        model.sparse_values += 1
    SparseDelta.from_model(model).save(tmp_path / "delta")
    entries.main([str(tmp_path / "delta"), "--out", str(tmp_path / "figure.svg")])
    assert {"8 unmasked entries", "weight"} <= words(tmp_path / "figure.svg")


@pytest.mark.slow
def test_a_step_is_measured_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    step.main(["--shape", "tiny", "--layers", "0", "--budget", "1000", "--out", str(tmp_path / "figure.svg")])
    assert {"forward", "backward", "update"} <= words(tmp_path / "figure.svg")
