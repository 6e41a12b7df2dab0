"""What a GPU takes, in at most ten minutes: checks, a smoke test, steps of three models, their profiles, the tests.

    bash examples/benchmarks/gpu.sh [OUT]

Installs and downloads nothing, and needs torch, transformers, PEFT and safetensors; the first lines name all that is
missing, and what is left out for it. A model's methods take turns in one process, so that other load on the machine
affects all of them. OUT/results.json is written after each turn, the table and the picture after each model; kernels
are kept in OUT/triton. What fails, or takes too long, does not keep the rest from running; the last lines name it, and
the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
METHODS = ("id3", "lora", "lora-short", "static", "full", "shira")  # no SHiRA of Llamas by default: never ready in time
SECONDS, IMPORTS = 590, 60  # in all, and for a process to import its libraries
TESTS = 100  # seconds that are kept for the tests, if there is pytest
TESTED = ("tests/kernels", "tests/selection", "tests/behaviour/test_cuda.py")  # with tests that need a GPU
NEEDED = ("torch", "transformers", "peft", "safetensors")
OPTIONAL = {
    "triton": "its kernels are not measured: slower forms in plain torch are",
    "matplotlib": "no picture",
    "pytest": "no tests",
    "xdist": "no tests (pip install pytest-xdist)",
    "hypothesis": "no tests",
}
OLDEST = {"torch": (2, 8), "triton": (3, 4)}


class Model(NamedTuple):
    """A shape of step_bench, and what it is measured with."""

    shape: str
    batch: int
    length: int
    budget: int
    seconds: int  # for all turns of a method
    gigabytes: int  # that a GPU needs to have free
    steps: int  # measured of each method
    rounds: int  # that the steps are taken in; 1 where the methods do not fit next to each other


MODELS = (
    Model("bert-base", 32, 128, 320_000, 25, 8, 40, 5),
    Model("llama-1b", 1, 4096, 1_200_000, 30, 44, 21, 3),
    Model("llama-8b", 1, 4096, 6_700_000, 45, 60, 8, 1),
)
TINY = Model("tiny", 2, 16, 1_000, 60, 0, 2, 2)


def missing(device: str) -> dict[str, str]:
    """What is not there, and what follows; ends the program where nothing can be measured without it."""
    print(f"Python {platform.python_version()} at {sys.executable}, {os.cpu_count()} cores")
    packages, found = importlib.metadata.packages_distributions(), dict[str, str]()
    for name in (*NEEDED, *OPTIONAL):
        if importlib.util.find_spec(name) is None:
            version, found[name] = "missing", OPTIONAL.get(name, "")
        else:
            version, oldest = importlib.metadata.version(packages.get(name, [name])[0]), OLDEST.get(name, ())
            if tuple(map(int, re.findall(r"\d+", version)[:2])) < oldest:
                found[f"{name} {'.'.join(map(str, oldest))}"] = f"{version} is too old; what fails may be due to it"
        print(f"{name:<14}{version}")
    lacking = [name for name in NEEDED if name in found]
    if lacking:
        sys.exit(f"nothing can be measured without {', '.join(lacking)}: install it (pip install {' '.join(lacking)}).")
    if not any(map(shutil.which, filter(None, [os.environ.get("CC"), "cc", "gcc", "clang"]))):
        found["a C compiler"] = OPTIONAL["triton"]
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        found["Python.h"] = OPTIONAL["triton"]
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            sys.exit(f"torch {torch.__version__} finds no GPU: it takes a build for CUDA, and NVIDIA's driver.")
        free, total = (number / 1e9 for number in torch.cuda.mem_get_info())
        capability = torch.cuda.get_device_capability()
        print(f"{torch.cuda.get_device_name()}, capability {capability}, {free:.0f} of {total:.0f} GB free")
        if capability < (8, 0):
            found["compute capability 8.0"] = OPTIONAL["triton"]
    for name, why in found.items():
        print(f"MISSING: {name}: {why}")
    return found


def fitting(models: Sequence[Model], device: str) -> list[Model]:
    """The models that the GPU has room for."""
    if device != "cuda":
        return list(models)
    import torch

    free = torch.cuda.mem_get_info()[0] / 1e9
    for model in models:
        if model.gigabytes > free:
            print(f"LEFT OUT: {model.shape} needs {model.gigabytes} GB, {free:.0f} are free")
    return [model for model in models if model.gigabytes <= free]


class Clock:
    """The time that is left."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self, most: float = SECONDS, kept: float = 0) -> float:
        return max(0.0, min(most, self._end - time.monotonic() - kept))


def environment(out: Path) -> dict[str, str]:
    paths = [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "TRITON_CACHE_DIR": str(out / "triton")}
    return {**os.environ, **own, "HF_HUB_OFFLINE": "1"}


def kill(process: subprocess.Popen[Any]) -> None:
    """Ends a process with all that it started, if it still runs."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def measured(
    settings: Sequence[Any], model: Model, profiled: bool, clock: Clock, out: Path
) -> Iterator[tuple[Any, dict[str, Any], bool]]:
    """Builds all methods in one process, then measures them in turns: a method, what it takes, and if it has ended.

    After a method that hangs or dies, a new process builds the others again, for the turns that are left.
    """
    left, built = list(settings) * (1 + model.rounds), list[Any]()
    if model.rounds == 1:
        left.sort(key=settings.index)  # each is freed before the next is built
    seconds = dict.fromkeys(settings, float(model.seconds))
    while left:
        left, built, dead = [one for one in dict.fromkeys(built) if one in left] + left, [], False
        seconds[left[0]] += IMPORTS
        task = json.dumps([asdict(one) for one in left]), str(model.steps // model.rounds), str(int(profiled))
        with (out / f"{model.shape}.log").open("a") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "step_bench.several", *task],
                stdout=subprocess.PIPE, stderr=errors, bufsize=0, env=environment(out), start_new_session=True,
            )  # fmt: skip
            try:
                while left and not dead:
                    built.append(one := left.pop(0))
                    started = time.monotonic()
                    found = next_line(process, clock.left(seconds[one], kept=TESTS))
                    seconds[one] -= time.monotonic() - started
                    dead = found.pop("dead", False)
                    left = [other for other in left if other != one or "failed" not in found]
                    yield one, found, one not in left
            finally:
                kill(process)


def next_line(process: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    """The next line (JSON) of a process; ``failed``, and why, where none comes."""
    assert process.stdout is not None
    end = time.monotonic() + seconds
    while select.select([process.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
        line = process.stdout.readline()
        if not line:
            return {"failed": f"ended with exit code {process.wait()}", "dead": True}
        if line.startswith(b"{"):
            return dict(json.loads(line))
    return {"failed": f"a turn took longer than {seconds:.0f} s", "dead": True}


def measure(
    model: Model,
    methods: Sequence[str],
    device: str,
    clock: Clock,
    out: Path,
    results: list[Any],
    profiled: bool = True,
) -> list[str]:
    """Measures all methods of a model, and writes ``results`` after each turn; what failed."""
    from step_bench.report import make_text, plot
    from step_bench.run import Measurement, to_json
    from step_bench.settings import Settings

    common = {"batch": model.batch, "length": model.length, "dtype": "bfloat16", "device": device}
    settings = [Settings(method, model.shape, model.budget, **common) for method in methods]
    own = [Measurement(one) for one in settings]
    results.extend(own)
    print(f"\n=== {model.shape}: bfloat16, batch {model.batch} x {model.length}, budget {model.budget:,}", flush=True)
    for method, found, ended in measured(settings, model, profiled, clock, out):
        one = own[settings.index(method)]
        one.profile = profile = found.pop("profile", {})
        one.add(found)
        one.held_bytes = one.peak_bytes
        (out / "results.json").write_text(to_json(results) + "\n")
        if not ended:
            continue
        times = f"{1e3 * one.step_seconds:.2f} ms a step, {one.peak_bytes / 1e9:.2f} GB" if one.updates else one.failed
        launches = f", {profile['launches']:,} launches, waits {profile['waits']}" if profile else ""
        print(f"{one.settings.method:<12}{times}, {one.warm_up:.0f} s to be ready{launches}", flush=True)
    print(make_text(own))
    if any(one.updates for one in own) and importlib.util.find_spec("matplotlib"):
        plot(own, out / f"{model.shape}.png")
    return [f"{one.settings.method} of {model.shape}: {one.failed}" for one in own if one.failed]


def test(clock: Clock, out: Path) -> list[str]:
    """Runs the tests of a GPU, as far as time is left; what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", *(str(ROOT / path) for path in TESTED)]
    print(f"\n=== tests, {clock.left():.0f} s left", flush=True)
    with (out / "tests.log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment(out), start_new_session=True
        )
        try:
            code = process.wait(clock.left())
        except subprocess.TimeoutExpired:
            return ["tests: no time was left for the rest of them"]
        finally:
            kill(process)
    print("\n".join((out / "tests.log").read_text(errors="replace").splitlines()[-15:]))
    return [f"tests: exit code {code}"] * bool(code)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu-results"), metavar="OUT")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="only the smoke test")
    parser.add_argument("--shapes", nargs="+", choices=[one.shape for one in MODELS], help="default: all that fit")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="that all of it may take")
    arguments = parser.parse_args()
    out, device, clock = arguments.out.resolve(), arguments.device, Clock(arguments.seconds)
    out.mkdir(parents=True, exist_ok=True)
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    lacking = missing(device)
    failed, results = measure(TINY, arguments.methods, device, clock, out, [], profiled=False), list[Any]()
    wanted = [model for model in MODELS if not arguments.tiny and model.shape in (arguments.shapes or model.shape)]
    for model in fitting(wanted, device):
        left_out = {"shira"} if arguments.methods is METHODS and "llama" in model.shape else set[str]()
        methods = [method for method in arguments.methods if method not in left_out]
        failed += measure(model, methods, device, clock, out, results)
    if not arguments.tiny and not {"pytest", "xdist", "hypothesis"} & lacking.keys():
        failed += test(clock, out)
    print(f"\nresults are in {out}")
    for line in failed:
        print(f"FAILED: {line}; see the logs there")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
