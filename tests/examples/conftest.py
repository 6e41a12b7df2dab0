"""The scripts of examples/benchmarks, and the package `examples`, can be imported."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "benchmarks")]
