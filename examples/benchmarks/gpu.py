"""What a GPU takes, in at most ten minutes: the tests, training steps of four models, and where a step's time goes.

    bash examples/benchmarks/gpu.sh [OUT]

Installs and downloads nothing. Each part is a process with a time limit of its own, and leaves its output as OUT/*.log,
numbers as *.json and pictures as *.png. A part that fails or takes too long does not keep the others from running; the
last lines name it, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
METHODS = "full,lora,shira,static,id3,dense-id3"
GRACE = 10  # seconds that step.py has to end by itself, with what is measured
SHOWN = 40  # last lines of a part's output


class Part(NamedTuple):
    """A command, and the seconds that it may take."""

    name: str
    seconds: float
    command: list[str]


class Model(NamedTuple):
    """A shape of step.py, and what it is measured with."""

    shape: str
    options: tuple[str, ...]
    bench_seconds: int
    profile_seconds: int = 0  # 0: not profiled


MODELS = (
    Model("bert-base", ("--batch", "32", "--seq", "128"), 65, 40),
    Model("deberta-v3-base", ("--batch", "32", "--seq", "128"), 70),
    Model("llama-1b", ("--batch", "1", "--seq", "4096", "--budget", "1_200_000"), 85, 45),
    Model("llama-7b", ("--batch", "1", "--seq", "4096", "--budget", "6_700_000"), 140),
)
SMALL = (Model("tiny", ("--batch", "2", "--seq", "16", "--budget", "1_000"), 300, 100),)
TEST_SECONDS = 140


def parts(out: Path, device: str, models: Iterable[Model]) -> list[Part]:
    """All parts, in the order in which they run."""
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(ROOT / "tests")]
    found = [Part("tests", TEST_SECONDS, tests)]
    for model in models:
        options = [*model.options, "--shape", model.shape, "--device", device, "--dtype", "bfloat16"]
        bench = [
            sys.executable,
            str(ROOT / "examples/benchmarks/step.py"),
            *options,
            "--methods",
            METHODS,
            "--rounds",
            "1",
        ]
        bench += ["--steps", "10", "--limit", str(model.bench_seconds - GRACE)]
        bench += ["--json", f"{out / model.shape}.json", "--plot", f"{out / model.shape}.png"]
        found.append(Part(model.shape, model.bench_seconds, bench))
    for model in models:
        if model.profile_seconds:
            options = [*model.options, "--shape", model.shape, "--device", device, "--dtype", "bfloat16"]
            file = f"profile-{model.shape}"
            command = [sys.executable, str(ROOT / "examples/benchmarks/profile_step.py"), *options]
            command += ["--json", f"{out / file}.json", "--plot", f"{out / file}.png"]
            found.append(Part(file, model.profile_seconds, command))
    return found


def run(part: Part, log: Path) -> str:
    """Runs a part to its end, or kills it with all that it started; why it failed, or nothing."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w") as file:
        process = subprocess.Popen(
            part.command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
        )  # fmt: skip
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            return f"took longer than {part.seconds:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return f"ended with exit code {code}" if code else ""


def run_all(parts: Iterable[Part], out: Path) -> dict[str, str]:
    """Runs the parts one after the other; the failed ones, and why."""
    failed = {}
    for part in parts:
        print(f"\n=== {part.name}, at most {part.seconds:.0f} s: {' '.join(part.command)}", flush=True)
        started, log = time.monotonic(), out / f"{part.name}.log"
        if why := run(part, log):
            failed[part.name] = why
        print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:]))
        print(f"=== {part.name}: {why or 'done'}, {time.monotonic() - started:.0f} s", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("gpu-results"), metavar="OUT")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in place of the four, to try the parts with")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    failed = run_all(parts(out, arguments.device, SMALL if arguments.tiny else MODELS), out)
    print(f"\nresults are in {out}")
    for name, why in failed.items():
        print(f"FAILED: {name} {why}; see {out / name}.log")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
