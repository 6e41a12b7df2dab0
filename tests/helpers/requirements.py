"""Which transformers the tests run with. The lowest that sparsify supports is 4.57: test_compat_adapterhub.py."""

import pytest
import transformers

IS_TRANSFORMERS_4 = transformers.__version__.startswith("4.")


def needs_transformers_5(reason):
    """Marks a test of what transformers 4 does not do, or does otherwise."""
    return pytest.mark.skipif(IS_TRANSFORMERS_4, reason=f"needs transformers 5: {reason}")


fuses_at_load = needs_transformers_5("4 neither fuses nor splits tensors at load")
