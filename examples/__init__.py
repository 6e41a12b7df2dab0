"""Examples; `python -m examples.paper.run` needs them as a package."""
