"""Build the stand-in, run random programs on torch's own allocator, and write down what it did."""

from __future__ import annotations

import gzip
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import click

HERE = Path(__file__).parent
NVML_OK = ("nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2")
NVML = (
    "int nvmlInit_v2(void){return 0;}"
    "int nvmlDeviceGetHandleByPciBusId_v2(void){return 0;}"
    "int nvmlDeviceGetComputeRunningProcesses(void*d,unsigned*n,void*p){*n=0;return 0;}"
    "int nvmlDeviceGetGpuFabricInfoV(void){return 3;}"
    "int nvmlDeviceGetNvLinkRemoteDeviceType(void){return 3;}"
    "int nvmlDeviceGetNvLinkRemotePciInfo_v2(void){return 3;}"
    "int nvmlSystemGetCudaDriverVersion_v2(void){return 3;}"
)


def build(folder: Path, headers: str) -> None:
    """The runtime's library, to be loaded first, and two that torch asks for by name and hardly uses."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    lib = Path(spec.origin).parent / "lib"
    nvrtc = lib / "libcaffe2_nvrtc.so"
    wanted = subprocess.run(
        ["nm", "-D", "--undefined-only", nvrtc], capture_output=True, text=True, check=True
    )
    names = [line.split()[-1].partition("@")[0] for line in wanted.stdout.splitlines()]
    driver = "".join(f"int {n}(void){{return 0;}}" for n in names if n.startswith("cu"))
    shared = ["gcc", "-shared", "-fPIC", "-w", "-O1"]
    subprocess.run(
        [*shared, f"-I{headers}", HERE / "runtime.c", "-o", folder / "libstandin.so", "-ldl"], check=True
    )
    for name, text in (("libcuda.so.1", driver), ("libnvidia-ml.so.1", NVML)):
        command = [*shared, "-x", "c", "-", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run(command, input=text, text=True, check=True)


@click.command()
@click.argument("out", type=Path)
@click.option("--headers", required=True, help="Where cuda.h and cuda_runtime_api.h are.")
@click.option("--programs", "count", default=24)
def main(out: Path, headers: str, count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, headers)
        standin = str(folder / "libstandin.so")
        env = os.environ | {"LD_PRELOAD": standin, "LD_LIBRARY_PATH": name, "STANDIN": standin}
        plain = folder / "out.pickle"
        subprocess.run(
            [sys.executable, "-m", "tests.standin.programs", plain, str(count)], env=env, check=True
        )
        rows = pickle.loads(plain.read_bytes())
    out.write_bytes(gzip.compress(pickle.dumps(rows, protocol=4), 9, mtime=0))


if __name__ == "__main__":
    main()
