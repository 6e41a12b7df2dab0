"""The kernels are Triton that a GPU's compiler takes, shown where there is no GPU: the interpreter takes more."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re, subprocess, sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sparsify.kernels.triton import norm_bound, norms, packed, scatter, sddmm, select

DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CUBIN = Path(sys.argv[1])


def build(kernel, types, num_warps=4, most_shared=48, **constants):
    types = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    for capability in (80, 90):
        target = GPUTarget("cuda", capability, 32)
        aligned = [i for i, name in enumerate(kernel.arg_names) if types[name][0] == "*" or name in ALIGNED]
        source = ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        made = compile(source, target=target, options={"num_warps": num_warps})
        assert "div.full" not in made.asm["ptx"], "a division that rounds otherwise than torch's"
        CUBIN.write_bytes(made.asm["cubin"])
        text = subprocess.run([DUMP, "--dump-resource-usage", CUBIN], capture_output=True, text=True, check=True).stdout
        used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\\d+)", text)}
        print(f"sm_{capability} {kernel.__name__} {constants} {num_warps} warps {used} shared {made.metadata.shared}")
        assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
        assert used["REG"] * 32 * num_warps <= 65536 and made.metadata.shared <= most_shared * 1024


ALIGNED = ("left_places", "pitch")  # whole tiles
CANDIDATES = {"ids": "*i64", "scores": "*fp32", "grads": "*fp32", "weights": "*fp32", "count": "*i64",
              "threshold": "*fp32"}
CUT = {"num_warps": select.CUT_WARPS, "block": select.CUT_BLOCK}
for short in ("fp32", "bf16", "fp16"):
    for exact_exp in (0, 1, 2, -1):
        types = CANDIDATES | {"weight": "*" + short, "grad": "*" + short, "rows": "*i64", "entry_ids": "*i64",
                              "finite": "*i8", "start": "i64", "stop": "i64", "offset": "i64", "eps": "fp32",
                              "exp": "fp32"}
        form = {"exact_exp": exact_exp, "has_rows": exact_exp == 2, "has_ids": exact_exp == 1}
        build(select._select, types, block=select.BLOCK, **form)
        if short == "fp32":
            build(select._select_again, types, num_warps=select.AGAIN_WARPS, block=select.BLOCK, **form)
    build(sddmm._sddmm, {"left": "*" + short, "right": "*" + short, "indices": "*i64", "partial": "*fp32"},
          entries=sddmm.ENTRIES, at_once=sddmm.TOKENS, share=sddmm.SHARE)
    factors = {"left": "*" + short, "right": "*" + short, "scales": "*fp32", "finite": "*i8", "norms": "*fp32",
               "left_underflow": "fp32", "right_underflow": "fp32", "underflow": "fp32", "largest": "fp32",
               "order": "*i64", "keys": "*i64", "values": "*" + short, "places": "*i32", "indices": "*i64",
               "out": "*fp32"}
    tokens, width = norms.AT_ONCE
    build(norms._scales, factors, block=tokens, at_once=width)
    build(norms._norms, factors, width=norms.WIDTH, at_once=norms.TOKENS)
    for has_order in (True, False):
        build(packed._pack, factors, has_order=has_order, block=packed.BLOCK)
    build(packed._packed_sddmm, factors, entries=packed.ENTRIES, at_once=packed.TOKENS)
    types = CANDIDATES | factors | {"marks": "*i32", "noted": "*i64", "lowest": "fp32", "slack": "fp32", "eps": "fp32",
                                    "rounding": "fp32", "weight": "*" + short, "offset": "i64", "exp": "fp32"}
    tile = {"widens": False, "tile": packed.TILE, "depth": norm_bound.depth_of(2 if short != "fp32" else 4)}
    build(norm_bound._screen, types, norm_bound.SCREEN_WARPS, 100, second=0, **tile, group=norm_bound.GROUP)
    build(norm_bound._verify, types, second=1, exact_exp=-1, block=norm_bound.VERIFIED, at_once=packed.TOKENS)
    tile |= {"tile": norm_bound.SMALL_TILE, "depth": norm_bound.SMALL_DEPTH}
    build(norm_bound._screen_again, types, select.AGAIN_WARPS, exact_exp=-1, **tile)
build(norm_bound._mark, {"marks": "*i32", "indices": "*i64"}, block=1024)
build(norm_bound._raise, CANDIDATES, **CUT)
build(select._cut, CANDIDATES, **CUT)
for bits in ("i16", "i32", "i64"):
    types = {"addresses": "*i64", "indices": "*i64", "values": "*" + bits}
    build(scatter._scatter, types, block=scatter.BLOCK)
print("all compiled")
"""


@pytest.mark.slow
def test_every_kernel_compiles_and_spills_no_register_for_gpus_that_are_not_there(tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cubin")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    print(run.stdout)
    assert run.stdout.endswith("all compiled\n"), run.stderr
