"""The kernels are Triton that a GPU's compiler takes, shown where there is no GPU: the interpreter takes more."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sparsify

OLDEST = "3.4.0"  # which torch 2.8 comes with, the oldest that is supported

SCRIPT = """
import re, subprocess, sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sparsify.kernels import triton as kernels

DUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
CUBIN = Path(sys.argv[1])


def build(kernel, types, num_warps=4, **constants):
    types = {name: types.get(name, "constexpr" if name in constants else "i32") for name in kernel.arg_names}
    for capability in (80, 90, 100, 120):
        target = GPUTarget("cuda", capability, 32)
        aligned = [i for i, name in enumerate(kernel.arg_names) if types[name][0] == "*"]
        source = ASTSource(kernel, types, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        made = compile(source, target=target, options={"num_warps": num_warps})
        assert "div.full" not in made.asm["ptx"], "a division that rounds otherwise than torch's"
        CUBIN.write_bytes(made.asm["cubin"])
        text = subprocess.run([DUMP, "--dump-resource-usage", CUBIN], capture_output=True, text=True, check=True).stdout
        used = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\\d+)", text)}
        print(f"sm_{capability} {kernel.__name__} {constants} {num_warps} warps {used} shared {made.metadata.shared}")
        assert used["STACK"] == used["LOCAL"] == 0, "registers are spilled"
        assert used["REG"] * 32 * num_warps <= 65536 and made.metadata.shared <= 48 * 1024


for kernel in (kernels._select, kernels._cut, kernels._sddmm, kernels._scatter):  # another number is no other variant
    numbers = {"number", "start", "stop", "offset", "cols", "size", "limit", "id_digits"} - {
        "cols" if kernel is kernels._sddmm else ""}  # as the tokens: a row that begins at 16 bytes is read faster
    free = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    assert free == numbers & set(kernel.arg_names), kernel

CANDIDATES = {"ids": "*i64", "scores": "*fp32", "grads": "*fp32", "weights": "*fp32", "count": "*i64",
              "threshold": "*fp32"}
CUT = {"num_warps": kernels.CUT_WARPS, "counted": kernels.COUNTED, "moved": kernels.MOVED}
for short in ("fp32", "bf16", "fp16"):
    for exact_exp in (0, 1, 2, -1):
        types = CANDIDATES | {"weight": "*" + short, "grad": "*" + short, "rows": "*i64", "entry_ids": "*i64",
                              "finite": "*i8", "start": "i64", "stop": "i64", "offset": "i64", "eps": "fp32",
                              "exp": "fp32"}
        form = {"exact_exp": exact_exp, "has_rows": exact_exp == 2, "has_ids": exact_exp == 1}
        build(kernels._select, types, block=kernels.BLOCK, **form)
    build(kernels._sddmm, {"left": "*" + short, "right": "*" + short, "indices": "*i64", "partial": "*fp32"},
          entries=kernels.ENTRIES, at_once=kernels.TOKENS, share=kernels.SHARE)
build(kernels._cut, CANDIDATES, **CUT)
for bits in ("i16", "i32", "i64"):
    types = {"addresses": "*i64", "ids": "*i64", "values": "*" + bits}
    build(kernels._scatter, types, block=kernels.BLOCK)
print(f"all compiled by Triton {triton.__version__}")
"""


def install(version, folder):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    done = subprocess.run([*pip, f"triton=={version}"], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install Triton {version}: {done.stderr.strip()[-200:]}")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["installed", OLDEST])
def test_every_kernel_compiles_and_spills_no_register_for_gpus_that_are_not_there(tmp_path, version):
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    if version != "installed":
        install(version, tmp_path / "triton")
        paths = [str(tmp_path / "triton"), str(Path(sparsify.__file__).parents[1])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "cubin")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)
    print(run.stdout)
    assert "all compiled by Triton" in run.stdout, run.stderr
    assert version in (run.stdout.split()[-1], "installed")
