"""The kernels are Triton that a GPU's compiler takes, shown where there is no GPU: the interpreter takes more."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sparsify.kernels.triton import scatter as triton_scatter, sddmm as triton_sddmm, select as triton_select

TARGETS = [GPUTarget("cuda", capability, 32) for capability in (80, 90)]


def build(kernel, types, **constants):
    types = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    for target in TARGETS:
        made = compile(ASTSource(kernel, types, constexprs=constants), target=target)
        assert "div.full" not in made.asm["ptx"], "a division that rounds otherwise than torch's"
        assert len(made.asm["cubin"]) > 0


POOL = {"ids": "*i64", "scores": "*fp32", "grads": "*fp32", "count": "*i64", "threshold": "*fp32"}
for short in ("fp32", "bf16", "fp16"):
    for exact_exp in (0, 1, 2, -1):
        types = POOL | {"weight": "*" + short, "grad": "*" + short, "rows": "*i64", "finite": "*i8", "start": "i64",
                        "stop": "i64", "offset": "i64", "eps": "fp32", "exp": "fp32"}
        build(triton_select._select, types, exact_exp=exact_exp, has_rows=exact_exp == 2, block=triton_select.BLOCK)
    build(triton_sddmm._sddmm, {"left": "*" + short, "right": "*" + short, "indices": "*i64", "partial": "*fp32"},
          entries=triton_sddmm.ENTRIES, at_once=triton_sddmm.TOKENS, share=triton_sddmm.SHARE)
build(triton_select._cut, POOL, block=triton_select.CUT_BLOCK)
for bits in ("i16", "i32", "i64"):
    types = {"addresses": "*i64", "indices": "*i64", "values": "*" + bits}
    build(triton_scatter._scatter, types, block=triton_scatter.BLOCK)
print("all compiled")
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_gpus_that_are_not_there(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    script = tmp_path / "build.py"
    script.write_text(SCRIPT, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment, check=False
    )
    assert run.stdout.strip() == "all compiled", run.stderr
