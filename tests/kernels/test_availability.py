"""Triton is used where it works: it is tried on each GPU once, and the plain forms serve where that fails."""

import logging
import sys
from types import SimpleNamespace

import pytest
import torch

from sparsify import kernels

GPU = torch.device("cuda", 7)  # that is not there


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(kernels, "_found", lambda name: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    builds = kernels._builds
    builds.cache_clear()
    yield monkeypatch
    builds.cache_clear()


def test_a_gpu_on_which_no_kernel_can_be_built_is_told_of_once_and_gets_the_plain_forms(a_gpu, caplog):
    def fails(*args, **options):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    for name in ("zeros", "ones"):
        a_gpu.setattr(torch, name, lambda *args, **options: None)
    a_gpu.setitem(sys.modules, "sparsify.kernels.triton", SimpleNamespace(scatter=fails))
    with caplog.at_level(logging.WARNING, "sparsify"):
        assert [kernels.has_triton(GPU) for _ in range(3)] == [False] * 3
    (record,) = caplog.records
    problem = "Triton does not work on cuda:7 (RuntimeError: Failed to find C compiler.)"
    assert record.getMessage() == f"{problem}: slower forms in plain torch are used there."


def test_a_gpu_that_works_is_tried_once_and_said_to_build_kernels(a_gpu, caplog):
    written = torch.zeros(1)
    for name in ("zeros", "ones"):
        a_gpu.setattr(torch, name, lambda *args, **options: written)
    a_gpu.setitem(sys.modules, "sparsify.kernels.triton", SimpleNamespace(scatter=lambda *_: written.fill_(1)))
    with caplog.at_level(logging.INFO, "sparsify"):
        assert [kernels.has_triton(GPU) for _ in range(3)] == [True] * 3
    (record,) = caplog.records
    assert record.getMessage().startswith("Triton builds up to seven kernels for cuda:7")


@pytest.mark.parametrize(("capability", "hip"), [((7, 5), None), ((9, 0), "6.4")])
def test_old_gpus_and_those_of_others_get_the_plain_forms(a_gpu, caplog, capability, hip):
    a_gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    a_gpu.setattr(torch.version, "hip", hip)
    with caplog.at_level(logging.WARNING, "sparsify"):
        assert not kernels.has_triton(GPU)
    assert "compute capability 8.0" in caplog.text


def test_no_device_is_asked_without_triton_or_under_its_interpreter(a_gpu):
    a_gpu.setattr(kernels, "_builds", lambda device: pytest.fail("asked"))
    assert not kernels.has_triton(torch.device("cpu"))
    a_gpu.setenv("TRITON_INTERPRET", "1")
    assert kernels.has_triton(torch.device("cpu"))
    a_gpu.setattr(kernels, "_found", lambda name: None)
    assert not kernels.has_triton(GPU)
