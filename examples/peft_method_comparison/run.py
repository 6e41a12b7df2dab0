"""Runs an experiment of this folder by the runner of PEFT's method comparison, which is used as it is.

    python -m examples.peft_method_comparison.run peft/method_comparison/MetaMathQA llama-3.2-3B-id3

The first argument is the folder with that runner in a clone of PEFT, where it also writes its results.
"""

import os
import runpy
import sys
from pathlib import Path

import sparsify  # noqa: F401 - with it PEFT knows configs of the type SPARSIFY

HERE = Path(__file__).parent


def run(suite: Path, experiment: str, home: Path = HERE) -> None:
    """Runs ``home/experiments/sparsify/<experiment>``; the runner expects a relative path of three parts."""
    suite = suite.resolve()
    os.chdir(home)
    sys.path.insert(0, str(suite))  # for its modules `utils` and `data`
    sys.argv = ["run.py", "--verbose", f"experiments/sparsify/{experiment}"]
    runpy.run_path(str(suite / "run.py"), run_name="__main__")


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
