"""Runs an attack in a process of its own, which may take only so much more memory and time."""

import os
import pickle
import resource
import select
import signal
import sys
import warnings

import pytest
import torch

needs_limits = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and an address-space limit")


def within_limits(function, megabytes=500, seconds=30):
    """Calls a function in a fork, with so much more memory; returns its text, if any, or raises what it raised."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of newer versions of Python: this process has threads
        child = os.fork()
    if child == 0:
        os.write(writing, pickle.dumps(_outcome(function, megabytes)))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([pipe], [], [], seconds)[0]:
            os.kill(child, signal.SIGKILL)
        outcome = pipe.read()
    os.waitpid(child, 0)
    assert outcome, f"killed: it took more than {seconds} s, or died"
    result = pickle.loads(outcome)
    if isinstance(result, BaseException):
        raise result
    return result


def _outcome(function, megabytes):
    try:
        torch.set_num_threads(1)  # the threads of a pool are not there in a fork
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + int(megabytes * 2**20),) * 2)
        result = function()
    except BaseException as error:
        return type(error)(str(error)[:5_000]) if isinstance(error, ValueError) else RuntimeError(repr(error)[:5_000])
    return result if isinstance(result, str) else None
