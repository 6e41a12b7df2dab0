"""Without AdapterHub's `adapters` there is nothing to run here: tests/test_compat_adapterhub.py installs them."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("adapters") else ["adapterhub.py"]
