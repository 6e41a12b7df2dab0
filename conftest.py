"""What pytest collects beside the tests: a module that needs a package of an extra only where that is installed."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("bitsandbytes") else ["sparsify/masked/bitsandbytes.py"]
