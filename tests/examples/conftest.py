"""The scripts of examples/benchmarks can be imported."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))
