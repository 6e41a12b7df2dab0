"""The lowest transformers that sparsify supports, 4.57, which is also the one that AdapterHub's `adapters` pins.

A virtual environment has both in front of the packages that the tests run with. There, sparsify is compared with
`adapters` and trains its models (compat/adapterhub.py), and the main tests run that transformers has a part in.
"""

import os
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parents[1]
ADAPTERS, TRANSFORMERS = "1.3.0", "4.57.6"
DATASETS = "4.4.2"  # transformers' Trainer imports whatever it finds; later ones need a later huggingface-hub
MAIN = [
    "adapters/test_adapters.py", "behaviour/test_architectures.py", "behaviour/test_end_to_end.py",
    "behaviour/test_loops.py", "delta/test_conversion.py", "delta/test_diff.py", "delta/test_hub.py",
    "delta/test_merge.py", "delta/test_peft_files.py", "integrations/test_trainer.py",
    "integrations/test_trainer_checkpoints.py", "masked/test_linear.py", "strategies/test_targets.py",
    "test_loading.py", "training/test_new_parameters.py", "training/test_state.py",
]  # fmt: skip

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old_python(tmp_path_factory):
    """The interpreter of a virtual environment with the old packages; skips where pip reaches no index."""
    folder = tmp_path_factory.mktemp("old") / "venv"
    venv.create(folder, with_pip=True)
    python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"
    # torch and the others come from where the tests run: what the environment has itself is found first
    site = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(folder)}))
    (site / "current.pth").write_text(sysconfig.get_path("purelib") + "\n")
    reach = pip(python, "download", "--no-deps", "--dest", folder, f"adapters=={ADAPTERS}")
    if reach.returncode:
        pytest.skip(f"pip cannot get AdapterHub's adapters {ADAPTERS}: {reach.stderr.strip().splitlines()[-1]}")
    packages = (f"adapters=={ADAPTERS}", f"transformers=={TRANSFORMERS}", f"datasets=={DATASETS}")
    install = pip(python, "install", *packages)
    assert install.returncode == 0, install.stderr
    return python


def pip(python, *arguments):
    return run(python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


def run(*command):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**inherited, "PYTHONPATH": str(TESTS.parent)}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, timeout=1800, env=environment, check=False)


def run_tests(python, *files):
    """Runs test files in the environment; shows their report where one fails."""
    result = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", TESTS.parent, *files)
    assert result.returncode == 0, result.stdout[-20_000:] + result.stderr[-2_000:]


def test_the_environment_has_the_old_packages_and_this_torch(old_python):
    code = "import adapters, torch, transformers as t; print(adapters.__version__, t.__version__, torch.__version__)"
    assert run(old_python, "-c", code).stdout.split() == [ADAPTERS, TRANSFORMERS, torch.__version__]


def test_ours_are_adapterhubs_adapters_and_theirs_are_trained(old_python):
    run_tests(old_python, TESTS / "adapters" / "compat" / "adapterhub.py")


def test_the_lowest_transformers_passes_the_main_tests(old_python):
    run_tests(old_python, *(TESTS / name for name in MAIN))
