"""Build the null driver for the torch at hand, and say with which environment a process runs on it.

The driver is C (`driver/`), compiled once for each version of torch and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tracer.rehearsal.stubs import stub_source, undefined_symbols
from traces.devices import CONTEXT_BYTES, Device, architecture
from traces.errors import EnvironmentProblem
from traces.files import cache_directory
from traces.provenance import ABSENT, NAME

SOURCES: Final = Path(__file__).parent / "driver"
LIBRARY: Final = "libcuda.so.1"  # by this name torch, NVRTC and Triton ask for the driver, and find it loaded
MANAGEMENT: Final = "libnvidia-ml.so.1"
INSTALL: Final = "pip install torch gives one on Linux; it needs 5 GB of disk and no GPU"
# Torch's libraries that call CUDA.
_CALLERS: Final = (
    "libc10_cuda.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_python.so", "libcaffe2_nvrtc.so",
    "libtorch_cpu.so",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaTorch:
    """A CUDA build of torch, found without importing it."""

    release: str  # "2.15.0+cu132"
    cuda: tuple[int, int]
    libraries: Path


def find_cuda_torch() -> CudaTorch:
    """The torch of this interpreter. Raises EnvironmentProblem: there is none, or it has no CUDA, or this is not Linux;
    says what to install."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EnvironmentProblem(
            f"a rehearsal runs torch's own CUDA code, and torch is not installed; {INSTALL}."
        )
    root = Path(spec.origin).parent
    text = (root / "version.py").read_text(encoding="utf-8")
    release = re.search(r"__version__\s*=\s*'([^']+)'", text)
    cuda = re.search(r"^cuda\b[^=]*=\s*'(\d+)\.(\d+)'", text, re.MULTILINE)
    if release is None or cuda is None or not (root / "lib" / "libtorch_cuda.so").is_file():
        name = release[1] if release else "this one"
        raise EnvironmentProblem(
            f"a rehearsal runs torch's own CUDA code, and torch {name} was built without it. Install a CUDA build: "
            f"{INSTALL}."
        )
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise EnvironmentProblem("a rehearsal needs Linux on x86-64, for which the null driver is written.")
    return CudaTorch(release=release[1], cuda=(int(cuda[1]), int(cuda[2])), libraries=root / "lib")


def driver_directory(torch: CudaTorch) -> Path:
    """Where the driver for that torch is; it is built once. Raises EnvironmentProblem: no C compiler, or it fails."""
    imported = (n for name in _CALLERS for n in undefined_symbols(torch.libraries / name))
    sources, commands = _sources(imported, torch.cuda[0]), _commands(torch.cuda[0])
    # The very text that is compiled, so that no driver is found under the name of others.
    digest = hashlib.sha256(repr((sorted(sources.items()), commands)).encode()).hexdigest()
    place = cache_directory() / f"null-driver-{torch.release}-{digest[:16]}"
    if not (place / LIBRARY).is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as name:
            built = _build(Path(name), sources, commands)
            try:
                os.replace(built, place)
            except OSError:  # another process was faster
                if not (place / LIBRARY).is_file():
                    raise
    return place


def _sources(imported: Iterable[str], cuda_major: int) -> dict[str, str]:
    """Return what is compiled, by file name: the C that is there, and what is written for a torch."""
    return {
        **{p.name: p.read_text(encoding="utf-8") for p in SOURCES.glob("*.[ch]")},
        "stubs.c": stub_source(imported),
        # torch asks for NVRTC's functions with a version, which is called like the library.
        "versions": f"{_compiler_library(cuda_major)} {{ global: *; }};\n",
    }


def _commands(cuda_major: int) -> list[list[str]]:
    """The compiler's arguments for each library, in a folder with the sources and an empty `built`."""
    compiler = _compiler_library(cuda_major)
    parts = (
        (LIBRARY, ["cuda.c", "libraries.c", "nccl.c", "stubs.c"]),
        (MANAGEMENT, ["nvml.c"]),
        (compiler, ["nvrtc.c", "-Wl,--version-script=versions"]),
    )
    options = ["-shared", "-fPIC", "-w", "-O1", f"-DCUDA_MAJOR={cuda_major}"]
    return [
        [*options, f"-Wl,-soname,{name}", *words, "-o", f"built/{name}", "-ldl", "-lpthread"]
        for name, words in parts
    ]


def _build(folder: Path, sources: Mapping[str, str], commands: list[list[str]]) -> Path:
    for name, text in sources.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "built").mkdir()
    for command in ([*_compiler(), *words] for words in commands):
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        except OSError as error:
            raise EnvironmentProblem(f"the C compiler {command[0]!r} cannot be run: {error}.") from None
        if done.returncode:
            tail = " / ".join(done.stderr.strip().splitlines()[-3:])[:600]
            raise EnvironmentProblem(f"the null driver does not compile with {command[0]}: {tail}")
    return folder / "built"


def _compiler_library(cuda_major: int) -> str:
    return f"libnvrtc.so.{cuda_major}"


def _compiler() -> list[str]:
    given = os.environ.get("CC", "").split()
    if given:
        return given
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    raise EnvironmentProblem(
        "the null driver is compiled once, and no C compiler was found: install gcc or clang, pip install ziglang, or "
        "name one in CC."
    )


def driver_environment(torch: CudaTorch, gpu: Device, *, devices: int = 1) -> dict[str, str]:
    """The variables under which a fresh process finds so many such GPUs, and torch's CUDA code runs without one."""
    place = driver_directory(torch)
    own = os.pathsep.join(str(place / n) for n in (LIBRARY, MANAGEMENT, _compiler_library(torch.cuda[0])))
    before = os.environ.get("LD_PRELOAD", "")
    text = (torch.libraries / "libtorch_python.so").read_bytes()  # has what torch.cuda.get_arch_list() splits
    flags = re.search(rb"\0((?:sm|compute)_\d+[af]?(?: (?:sm|compute)_\d+[af]?)*)\0", text)
    known = [int(n) for n in re.findall(rb"sm_(\d+)", flags[1])] if flags else []
    major, minor = gpu.sm
    values = {
        "MAJOR": major,
        "MINOR": minor,
        "MULTIPROCESSORS": gpu.multiprocessors,
        "MEMORY": gpu.memory_bytes,
        "MEMORY_MHZ": gpu.memory_mhz,
        "CONTEXT": CONTEXT_BYTES,
        "L2": gpu.l2_bytes,
        **{k.upper(): v for k, v in architecture(gpu).items() if k != "sm"},
        "COUNT": devices,
        # For which capability (as 90) the kernels of that torch were compiled that this GPU runs.
        "BINARY": max((k for k in known if k // 10 == major and k % 10 <= minor), default=10 * major + minor),
        "CUDA": torch.cuda[0] * 1000 + torch.cuda[1] * 10,
    }
    return {
        "LD_PRELOAD": f"{own}{os.pathsep}{before}" if before else own,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(devices))),
        "TRITON_LIBCUDA_PATH": str(place),
        # What is compiled or chosen here must not be found by a process with a real GPU.
        "USE_PYTORCH_KERNEL_CACHE": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(place / "inductor"),
        "TRITON_CACHE_DIR": str(place / "triton"),
        NAME: f"{gpu.name}{ABSENT}",
        **{f"LOWTIDE_NULL_{k}": str(v) for k, v in values.items()},
    }
