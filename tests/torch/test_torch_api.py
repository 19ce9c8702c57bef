"""The releases of torch that Lowtide works with, and the private names that it finds in the installed one."""

from __future__ import annotations

import ast
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tracer import torch_api  # noqa: E402
from traces.errors import EnvironmentProblem  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


# What is replaced, while the body of a `with` runs.
REPLACED = (
    "torch._decomp.decompositions:_rnn_helper",
    "torch._decomp.decompositions:one_layer_lstm",
    "torch._decomp.decompositions:select_one_layer_lstm_function",
    "torch._meta_registrations:_meta_grouped_mm_common",
    "torch._C:_get_deterministic_algorithms",
    "torch.compiler:_is_compiling_flag",
    "torch.cuda:_lazy_init",
    "torch.nn:Module._apply",
    "torch.nn.init:_no_grad_fill_",
    "torch.nn.init:_no_grad_normal_",
    "torch.nn.init:_no_grad_trunc_normal_",
    "torch.nn.init:_no_grad_uniform_",
    "torch.nn.init:_no_grad_zero_",
    "torch.nn.modules.transformer:_detect_is_causal_mask",
    "torch.nn.modules.transformer:_generate_square_subsequent_mask",
)


def missing() -> list[str]:
    """Which of the private names the installed torch lacks."""
    with_cuda = torch_api.USED_WITH_CUDA.values() if torch.version.cuda else ()
    return [name for name in (*torch_api.USED.values(), *REPLACED, *with_cuda) if not is_there(name)]


def is_there(where: str) -> bool:
    try:
        pkgutil.resolve_name(where)
    except (ImportError, AttributeError):
        return False
    return True


def test_the_installed_torch_has_every_private_name() -> None:
    torch_api.require_torch()
    assert missing() == []


def test_a_name_that_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_api.USED, "pytree", "torch.utils._moved")
    assert missing() == ["torch.utils._moved"]
    message = (
        rf"torch {re.escape(torch.__version__)} .* no torch\.utils\._moved, .* 2\.11 to 2\.15.*pip install"
    )
    with pytest.raises(EnvironmentProblem, match=message):
        from tracer.torch_api import pytree  # noqa: F401


def test_what_torch_lacks_is_not_replaced_and_what_was_replaced_is_back() -> None:
    before = torch.compiler._is_compiling_flag
    with torch_api.replaced(torch.compiler, _is_compiling_flag=not before):
        assert torch.compiler._is_compiling_flag is not before
    assert torch.compiler._is_compiling_flag is before
    with (
        pytest.raises(EnvironmentProblem, match=r"no torch\.compiler\._no_such"),
        torch_api.replaced(torch.compiler, _is_compiling_flag=True, _no_such=1),
    ):
        pass
    assert torch.compiler._is_compiling_flag is before


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("2.10.1", False),
        ("2.11.0", True),
        ("2.13.0+cpu", True),
        ("2.15.0a0+git", True),
        ("2.16.0", False),
        ("3.0.0", False),
    ],
)
def test_other_releases_are_refused(monkeypatch: pytest.MonkeyPatch, version: str, known: bool) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    if known:
        torch_api.require_torch()
        return
    with pytest.raises(
        EnvironmentProblem, match=rf"torch {re.escape(version)} cannot be used.*2\.11 to 2\.15"
    ):
        torch_api.require_torch()


def test_what_pip_may_install_is_what_the_module_knows() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (low, high), (major, newest) = torch_api.OLDEST, torch_api.NEWEST
    assert f"torch>={low}.{high},<{major}.{newest + 1}" in extras["torch"]


def test_no_other_module_reaches_into_torch() -> None:
    private = re.compile(r"\btorch\.[\w.]*\b_[a-zA-Z]|from torch[\w.]* import .*\b_[a-zA-Z]")
    found = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for room in ("tracer", "executor")
        for path in sorted((ROOT / room).rglob("*.py"))
        if path.name != "torch_api.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.Attribute, ast.Import, ast.ImportFrom))
        and private.search(ast.unparse(node))
        and "torch.ops.aten." not in ast.unparse(node)
    ]
    assert found == []


def test_ctrl_c_while_numpy_is_imported_is_not_swallowed(tmp_path: Path) -> None:
    once = "if not hasattr(sys, 'seen'):\n    sys.seen = True\n    raise KeyboardInterrupt"
    (tmp_path / "numpy.py").write_text(f"import sys\n{once}\nraise ImportError")
    code = "from tracer.torch_api import require_torch; require_torch()"
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode
