"""The CPU's hot loops in C++, compiled once per machine.

Without a compiler, or with ``SPARSIFY_NATIVE=0`` in the environment, the plain torch forms run instead. The logger
``sparsify.kernels.cpu.library`` gets one record, INFO for a compilation and WARNING for a missing library.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-fopenmp")
LIBRARIES = ("-lstdc++",)  # a C++ compiler links it by itself; gcc, a common CXX, does not
SWITCH = "SPARSIFY_NATIVE"  # environment variable
OFF = ("0", "false", "no", "off")  # its values that switch the loops off
COMPILERS = ("c++", "g++", "clang++")
RESULTS = {  # the types that the loops return
    f"{loop}_{dtype}": result
    for loop, result in {"sddmm": None, "screen": ctypes.c_int64}.items()
    for dtype in ("float32", "bfloat16")
} | {"has_matrix_units": ctypes.c_bool}

# of the compiler, the cache folder, the library; a home that cannot be found, a CXX that cannot be read
FAILURES = (OSError, subprocess.SubprocessError, AttributeError, RuntimeError, ValueError)


class Address(ctypes.c_void_p):
    """The address of a contiguous tensor's numbers, null for ``None``; keeps the tensor alive."""

    def __init__(self, tensor: Tensor | None) -> None:
        assert tensor is None or tensor.is_contiguous()
        super().__init__(None if tensor is None else tensor.data_ptr())
        self._tensor = tensor


Size = ctypes.c_int64


@cache
def library() -> ctypes.CDLL | None:
    """Returns the compiled loops, or ``None`` where there are none; the first call on a machine compiles them."""
    if os.environ.get(SWITCH, "").strip().lower() in OFF:
        return None
    try:
        compiler = _compiler()
        if compiler is None:
            logger.warning(
                "no C++ compiler was found (CXX, %s), so the plain torch forms run: slower, and the same results. "
                f"Install one, or set {SWITCH}=0, which silences this warning.",
                ", ".join(COMPILERS),
            )
            return None
        return _load(_compiled(compiler))
    except FAILURES as error:
        details = getattr(error, "stderr", None) or error
        logger.warning("the C++ loops could not be compiled, so the plain torch forms run: %s", details)
        return None


def _compiler() -> list[str] | None:
    """The command in the environment's ``CXX``, or the first compiler on the path."""
    named = shlex.split(os.environ.get("CXX", ""))
    found = named if named and shutil.which(named[0]) else [path for path in map(shutil.which, COMPILERS) if path][:1]
    return found or None


def _compiled(compiler: list[str]) -> Path:
    """Returns the library's file, compiled unless the cache folder has it."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    target = Path(root) / "sparsify" / f"native-{_fingerprint(compiler)}.so"
    if not target.exists():
        logger.info("compiling the C++ loops with `%s`, once for this machine, into %s", shlex.join(compiler), target)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            for source in _sources(".cpp"):
                _run([*compiler, *FLAGS, "-c", str(source), "-o", str(Path(folder, f"{source.stem}.o"))])
            shared = Path(folder, "native.so")
            # without -fopenmp, so that the loops use the OpenMP that torch has loaded, and its threads
            objects = map(str, sorted(Path(folder).glob("*.o")))
            _run([*compiler, "-shared", *objects, *LIBRARIES, "-o", str(shared)])
            shared.replace(target)  # atomic: another process may compile it at the same time
    return target


def _sources(*suffixes: str) -> list[Path]:
    return sorted(path for path in FOLDER.iterdir() if path.suffix in suffixes)


def _fingerprint(compiler: list[str]) -> str:
    """Hash of what the library depends on, the processor included, since machines may share a cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    processor = [line for line in lines if line.startswith("flags")][:1]
    sources = [path.read_text() for path in _sources(".cpp", ".h")]
    parts = [*sources, *FLAGS, *LIBRARIES, *compiler, _run([*compiler, "--version"]), platform.machine(), *processor]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout


def _load(path: Path) -> ctypes.CDLL:
    found = ctypes.CDLL(str(path))
    for name, result in RESULTS.items():
        getattr(found, name).restype = result
    return found
