"""Where the time of a step goes: under torch's profiler, which slows the host down, after a step without it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from sparsify.training.engine import COLLECT, COMMIT

from .worker import Worker, seconds_between

LAUNCH = re.compile(r"cu(da)?(Graph)?Launch")
WAIT = re.compile(r"cu(da)?\w*Synchronize|cudaMemcpy$|cuda(Malloc|Free)$")  # of which the profiler's end takes one


def profile_step(worker: Worker) -> dict[str, Any]:
    """Milliseconds, launches and waits of one step, the profiled one the second: the first starts the profiler."""
    started = time.perf_counter()
    start, _, end = worker.step()
    host = time.perf_counter() - started
    found = {"step": 1e3 * seconds_between(start, end), "host": 1e3 * host}
    is_cuda = worker.settings.is_cuda
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * is_cuda]) as profiled:
            worker.step()
    return found | breakdown(profiled.key_averages(), is_cuda)


def breakdown(rows: Sequence[Any], is_cuda: bool) -> dict[str, Any]:
    """The numbers of a profile, times in milliseconds."""
    on_host = {row.key: row for row in rows if row.device_type == DeviceType.CPU}
    kernels = [(row.key, row.count, row.self_cpu_time_total / 1e3) for row in on_host.values()]
    if is_cuda:  # the device has a row for each of the host's ranges too
        kernels = [
            (row.key, row.count, row.self_device_time_total / 1e3)
            for row in rows if row.device_type == DeviceType.CUDA and row.key not in on_host
        ]  # fmt: skip
    ranges = {name: on_host[name] for name in (COLLECT, COMMIT) if name in on_host}
    return {
        "launches": sum(row.count for name, row in on_host.items() if LAUNCH.match(name)),
        "waits": {name: row.count for name, row in on_host.items() if WAIT.match(name)},
        "ranges": {
            name: {"count": row.count, "host": row.cpu_time_total / 1e3, "device": row.device_time_total / 1e3}
            for name, row in ranges.items()
        },
        "kernels": sorted(kernels, key=lambda kernel: -kernel[2]),
    }
