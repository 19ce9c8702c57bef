"""The null driver as far as it needs no torch: reading libraries, the generated functions, the C, and refusals."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor.cli.main import execute
from tests.commands import python
from tracer.rehearsal import driver
from tracer.rehearsal.run import is_script, rehearse
from tracer.rehearsal.stubs import stub_source, undefined_symbols
from traces.devices import architecture, device, devices
from traces.errors import EnvironmentProblem, SpecError

LINUX = pytest.mark.skipif(sys.platform != "linux" or shutil.which("cc") is None, reason="needs cc on Linux")


def compiled(folder: Path, source: str, *more: str) -> Path:
    out = folder / "lib.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(out), *more], input=source, text=True, check=True
    )
    return out


@LINUX
def test_undefined_symbols_are_those_that_the_library_does_not_define(tmp_path: Path) -> None:
    library = compiled(
        tmp_path, "int cudaFoo(void); int bar(void) { return 1; } int baz(void) { return cudaFoo() + bar(); }"
    )
    found = undefined_symbols(library)
    assert "cudaFoo" in found
    assert not {"bar", "baz"} & set(found)


@pytest.mark.parametrize(
    "data", [b"", b"not a library", b"\x7fELF\x02\x01" + bytes(70), b"\x7fELF\x01\x01" + bytes(70)]
)
def test_what_is_no_library_is_refused_or_empty(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.so"
    path.write_bytes(data)
    if data[4:5] == b"\x02":  # a header without sections
        assert undefined_symbols(path) == ()
        return
    with pytest.raises(EnvironmentProblem, match=r"x\.so"):
        undefined_symbols(path)


@LINUX
def test_a_damaged_library_is_refused(tmp_path: Path) -> None:
    library = compiled(tmp_path, "int cudaFoo(void); int baz(void) { return cudaFoo(); }")
    library.write_bytes(library.read_bytes()[:-100])  # the section headers stand at the end
    with pytest.raises(EnvironmentProblem, match="ends too early"):
        undefined_symbols(library)


def test_stubs_tell_what_computes_from_what_answers() -> None:
    source = stub_source([
        "cublasSgemm_v2", "cublasCreate_v2", "cudaGraphAddNode", "cusolverDnSgesvd_bufferSize", "cudnnGetVersion",
        "cusparseSpGEMM_compute", "printf", "cuFileRead", "cuptiSubscribe", "cudnnGetRNNSomething", "customer",
    ])  # fmt: skip
    weak = [line for line in source.splitlines() if line.startswith("WEAK int")]
    lines = {line.split("(")[0].split()[-1]: line for line in weak}
    assert "return OK" in lines["cublasSgemm_v2"]
    assert "null_handle" in lines["cublasCreate_v2"]
    assert "*(int *)a3 = 0" in lines["cusolverDnSgesvd_bufferSize"]
    assert 'null_assumed("cuSOLVER")' in lines["cusolverDnSgesvd_bufferSize"]
    for name in ("cudaGraphAddNode", "cusparseSpGEMM_compute", "cudnnGetRNNSomething"):
        assert f'null_missing("{name}")' in lines[name]
    assert not {"cudnnGetVersion", "printf", "cuFileRead", "customer"} & set(lines)
    assert "NOT_SUPPORTED" in lines["cuptiSubscribe"]


@LINUX
def test_the_device_is_full_when_its_memory_is_out_and_missing_functions_say_their_names(
    tmp_path: Path,
) -> None:
    sources = driver._sources(["cudaGraphAddNode", "cudaMalloc"], 13)
    library = driver._build(tmp_path, sources, driver._commands(13)) / driver.LIBRARY
    code = f"""
import ctypes
d = ctypes.CDLL({str(library)!r})
d.null_missing_names.restype = d.cudaGetErrorString.restype = ctypes.c_char_p
p, q = ctypes.c_void_p(), ctypes.c_void_p()
assert d.cudaMalloc(ctypes.byref(p), ctypes.c_size_t(700)) == 0
assert d.cudaMalloc(ctypes.byref(q), ctypes.c_size_t(201)) == 2 and not q.value  # 100 are the context's
assert d.cudaPeekAtLastError() == 2 and d.cudaGetLastError() == 2 and d.cudaGetLastError() == 0
assert d.cudaFree(p) == 0 and d.cudaFree(p) == 1
assert d.cudaMalloc(ctypes.byref(q), ctypes.c_size_t(900)) == 0
byte, four = ctypes.c_ubyte(9), ctypes.c_int(9)
assert d.cudaMemcpy(ctypes.byref(four), q, ctypes.c_size_t(4), 2) == 0 and four.value == 0
assert d.cudaMemcpy(ctypes.byref(byte), q, ctypes.c_size_t(1), 2) == 0 and byte.value == 1
d.cudaMemcpy(q, ctypes.byref(ctypes.c_int(7)), ctypes.c_size_t(4), 1)
assert d.cudaMemcpy(ctypes.byref(four), q, ctypes.c_size_t(4), 2) == 0 and four.value == 7  # the host wrote it itself
d.cudaLaunchKernel(None, *[0] * 9)  # which may change it
assert d.cudaMemcpy(ctypes.byref(four), q, ctypes.c_size_t(4), 2) == 0 and four.value == 0
assert d.cudaGraphAddNode() == 801 and d.null_missing_names() == b"cudaGraphAddNode\\n"
assert b"cudaGraphAddNode" in d.cudaGetErrorString(801)
s, e = ctypes.c_void_p(), ctypes.c_void_p()
d.cudaStreamCreate(ctypes.byref(s)); d.cudaEventCreate(ctypes.byref(e)); d.cudaEventRecord(e, s)
assert d.cudaEventQuery(e) == 600  # the device lags
d.cudaStreamWaitEvent(None, e, 0); d.cudaEventRecord(e, None) ; d.cudaStreamSynchronize(None)
assert d.cudaEventQuery(e) == 0
groups = (ctypes.c_int * 24)()
assert d._ZN8mb_tools11hasValidVSLERKSt5arrayIiLm24EE(groups) and list(groups[:9]) == [16] * 7 + [14, 6]
"""
    python("-c", code, LOWTIDE_NULL_MEMORY="1000", LOWTIDE_NULL_CONTEXT="100")


@LINUX
def test_a_driver_is_found_again_by_the_very_text_that_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(driver, "_CALLERS", ())
    torch = driver.CudaTorch(release="2.15.0", cuda=(13, 0), libraries=tmp_path)
    place = driver.driver_directory(torch)
    assert driver.driver_directory(torch) == place
    built = (place / driver.LIBRARY).stat().st_mtime_ns
    monkeypatch.setattr(driver, "stub_source", lambda names: stub_source([*names, "cudaGraphAddNode"]))
    other = driver.driver_directory(torch)
    assert other != place
    assert b"cudaGraphAddNode" in (other / driver.LIBRARY).read_bytes()
    assert (place / driver.LIBRARY).stat().st_mtime_ns == built


def test_every_gpu_of_the_table_can_be_rehearsed() -> None:
    for gpu in devices():
        if gpu.kind == "cuda":
            assert architecture(gpu)["threads"] >= 1024
    with pytest.raises(SpecError, match="no NVIDIA GPU"):
        architecture(device("cpu"))


def test_which_files_are_scripts(tmp_path: Path) -> None:
    build, script = tmp_path / "a.py", tmp_path / "b.py"
    build.write_text("def build():\n    return 1\n")
    script.write_text("print(1)\n")
    assert is_script(str(script))
    assert not is_script(str(build))
    assert not is_script(f"{script}:make")
    assert not is_script("bert-base")


@pytest.mark.parametrize("version", [None, "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"])
def test_without_a_cuda_build_it_says_what_to_install(
    version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spec:
        origin = str(tmp_path / "__init__.py")

    if version is not None:
        (tmp_path / "version.py").write_text(version)
    spec = None if version is None else Spec
    monkeypatch.setattr(driver.importlib.util, "find_spec", lambda name: spec)
    done = CliRunner().invoke(execute, ["rehearse", "resnet18", "--gpu", "h100"])
    assert done.exit_code == 2
    assert "pip install torch" in done.output


def test_refusals_name_what_is_wrong() -> None:
    done = CliRunner().invoke(execute, ["rehearse", "resnet18", "--gpu", "h1000"])
    assert done.exit_code == 2
    assert "device 'h1000' is unknown" in done.output


def test_what_would_be_passed_over_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)\n")
    with pytest.raises(SpecError, match="run as a script"):
        rehearse(str(script), "h100", options={"batch_size": 2})
    with pytest.raises(SpecError, match="leave --plan out"):
        rehearse(str(script), "h100", apply=("a:b", "plan.json"))
    with pytest.raises(SpecError, match="no script"):
        rehearse("resnet18", "h100", arguments=("--epochs", "1"))
