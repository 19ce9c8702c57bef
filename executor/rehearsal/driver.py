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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from executor.rehearsal.elf import undefined_symbols
from executor.rehearsal.stubs import stub_source
from traces.device_profile import cache_directory
from traces.devices import Device, architecture
from traces.errors import EnvironmentProblem

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
    """The torch of this interpreter.

    Raises:
        EnvironmentProblem: there is none, it was built without CUDA, or this is not Linux; says what to install.
    """
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
    """Where the driver for that torch is; built there if it is not yet.

    Raises:
        EnvironmentProblem: there is no C compiler, or it fails.
    """
    sources = [
        *sorted(SOURCES.glob("*.[ch]")),
        *(SOURCES.parent / name for name in ("stubs.py", "elf.py", "driver.py")),
    ]
    libraries = [torch.libraries / name for name in _CALLERS]
    known = [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}".encode() for p in libraries]
    digest = hashlib.sha256(b"".join([*known, *(p.read_bytes() for p in sources)])).hexdigest()
    place = cache_directory() / f"null-driver-{torch.release}-{digest[:16]}"
    if not (place / LIBRARY).is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as name:
            stubs = stub_source(n for p in libraries for n in undefined_symbols(p))
            _build(Path(name), stubs, cuda_major=torch.cuda[0])
            folder = Path(name) / "built"
            try:
                os.replace(folder, place)
            except OSError:  # another process was faster
                if not (place / LIBRARY).is_file():
                    raise
    return place


def _build(folder: Path, stubs: str, *, cuda_major: int) -> None:
    (folder / "stubs.c").write_text(stubs, encoding="utf-8")
    compiler = _compiler_library(cuda_major)
    # torch asks for NVRTC's functions with a version, which is called like the library.
    versions = folder / "versions"
    versions.write_text(f"{compiler} {{ global: *; }};\n", encoding="utf-8")
    built = folder / "built"
    built.mkdir()
    cuda = [SOURCES / "cuda.c", SOURCES / "libraries.c", folder / "stubs.c"]
    for name, parts in (
        (LIBRARY, cuda),
        (MANAGEMENT, [SOURCES / "nvml.c"]),
        (compiler, [SOURCES / "nvrtc.c", f"-Wl,--version-script={versions}"]),
    ):
        options = f"-shared -fPIC -w -O1 -DCUDA_MAJOR={cuda_major} -Wl,-soname,{name}".split()
        out = ["-o", str(built / name), "-ldl", "-lpthread"]
        _run([*_compiler(), *options, f"-I{SOURCES}", *map(str, parts), *out])


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


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise EnvironmentProblem(f"the C compiler {command[0]!r} cannot be run: {error}.") from None
    if done.returncode:
        tail = " / ".join(done.stderr.strip().splitlines()[-3:])[:600]
        raise EnvironmentProblem(f"the null driver does not compile with {command[0]}: {tail}")


def driver_environment(
    torch: CudaTorch, gpu: Device, *, context_bytes: int = 0, devices: int = 1
) -> dict[str, str]:
    """The variables under which a fresh process finds that GPU, and torch's CUDA code runs without one.

    Args:
        torch: for whose imports the driver is built.
        gpu: of the device table.
        context_bytes: what the CUDA context takes of the device's memory before torch asks for any.
        devices: how many such GPUs there are.
    """
    place = driver_directory(torch)
    limits = architecture(gpu)
    own = os.pathsep.join(str(place / n) for n in (LIBRARY, MANAGEMENT, _compiler_library(torch.cuda[0])))
    before = os.environ.get("LD_PRELOAD", "")
    values = {
        "NAME": f"{gpu.name} (rehearsed)",
        "MAJOR": gpu.sm[0],
        "MINOR": gpu.sm[1],
        "MULTIPROCESSORS": gpu.multiprocessors,
        "MEMORY": gpu.memory_bytes,
        "CONTEXT": context_bytes,
        "L2": gpu.l2_bytes,
        "THREADS": limits.threads,
        "BLOCKS": limits.blocks,
        "SHARED": limits.shared_bytes,
        "SHARED_OPTIN": limits.block_shared_bytes,
        "COUNT": devices,
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
        **{f"LOWTIDE_NULL_{k}": str(v) for k, v in values.items()},
    }
