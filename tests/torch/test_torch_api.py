"""The releases of torch that Lowtide works with, and the private names that it finds in the installed one."""

from __future__ import annotations

import ast
import inspect
import os
import pkgutil
import re
import tomllib
from pathlib import Path

import pytest
import torch

from tests.commands import python
from tracer import torch_api
from traces.errors import EnvironmentProblem

ROOT = Path(__file__).resolve().parents[2]


# What is replaced while the body of a `with` runs: the names of its parameters (...: and any others, which are
# handed on); "?": Python does not know them.
REPLACED = {
    "torch._C._cuda_memoryStats": "?",
    "torch._C._cuda_resetPeakMemoryStats": "?",
    "torch._meta_registrations._meta_grouped_mm_common": (
        "mat_a mat_b scale_a scale_b offs bias scale_result out_dtype use_fast_accum"
    ),
    "torch._subclasses.fake_tensor.FakeTensor.__deepcopy__": "self memo",
    "torch.autograd.backward": ("tensors grad_tensors retain_graph create_graph grad_variables inputs"),
    "torch.autograd.grad": (
        "outputs inputs grad_outputs retain_graph create_graph "
        "only_inputs allow_unused is_grads_batched materialize_grads"
    ),
    "torch._check_tensor_all": "cond message",
    "torch._dynamo.variables.RandomVariable.__init__": "self rand seed *kwargs",
    "torch.clear_autocast_cache": "?",
    "torch.compiler.is_exporting": "",
    "torch.compile": "model fullgraph dynamic backend ...",
    "torch.nn.utils.clip_grad._has_foreach_support": "tensors device",
    "torch.nn.functional.one_hot": "?",
    "torch.utils.weakref": "?",
    "torch.nn.Parameter.__deepcopy__": "self memo",
}
# Private values that are where they are: torch changes them, they are a switch, or methods of a public class.
READ = {
    "torch.autograd.forward_ad._current_level",
    "torch.nn.Module._call_impl",
    "torch.nn.Module._wrapped_call_impl",
    "torch._C._distributed_c10d.FakeProcessGroup._create_internal",
    "torch._inductor.fx_passes.pad_mm._skip_do_bench_times",
    "torch.distributed.checkpoint.default_planner._validate_global_plan",
}
# Private attributes of objects of torch, transformers, DeepSpeed and Python. Those that Lowtide's own objects have
# too, such as _parameters, do not show.
OF_OBJECTS = {
    "_attn_implementation", "_boxed_call", "_call_impl", "_cdata", "_compiled_call_impl", "_destroy",
    "_dispatch_cache", "_exit", "_fields", "_getframe", "_growth_tracker", "_loaded_ops", "_model_mapping",
    "_orig_mod", "_overloadname", "_overloadpacket", "_post_accumulate_grad_hooks",
    "_get_backend", "_schema", "_validate_launch_command", "_wait_for_pending_works",
}  # fmt: skip
ONLY_WITH_CUDA = {name for name in REPLACED if name.startswith("torch._C._cuda_")}


def missing() -> list[str]:
    """Which of the private names the installed torch lacks."""
    with_cuda = torch_api.USED_WITH_CUDA.values() if torch.version.cuda else ()
    replaced = {*REPLACED} - (set() if torch.version.cuda else ONLY_WITH_CUDA)
    return [
        name
        for name in (*torch_api.USED.values(), *sorted(replaced | READ), *with_cuda)
        if not is_there(name)
    ]


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


def modules() -> dict[str, ast.Module]:
    """What is to know torch by public names and by those of `torch_api`, which apart."""
    files = (path for room in ("tracer", "executor") for path in sorted((ROOT / room).rglob("*.py")))
    return {str(p.relative_to(ROOT)): ast.parse(p.read_text()) for p in files if p.name != "torch_api.py"}


class Names:
    """What the names in a module stand for in torch: what it imports, and what it calls otherwise."""

    def __init__(self, module: ast.Module) -> None:
        used = {**torch_api.USED, **torch_api.USED_WITH_CUDA}
        self.known: dict[str, str] = {}
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                found = {
                    (a.asname or "torch"): (a.name if a.asname else "torch")
                    for a in node.names
                    if a.name.split(".")[0] == "torch"
                }
            elif isinstance(node, ast.ImportFrom) and node.module == "tracer.torch_api":
                found = {
                    (a.asname or a.name): used[a.name].replace(":", ".") for a in node.names if a.name in used
                }
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
                found = {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
            else:
                continue
            self.known |= found
        for _ in range(2):  # aliases of aliases
            for node in ast.walk(module):
                if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                    if isinstance(target, ast.Name) and (where := self.path(node.value)):
                        self.known.setdefault(target.id, where)

    def path(self, node: ast.AST) -> str:
        """Where torch has it; "" if it is none of torch's."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, "")
        base = self.path(node.value) if isinstance(node, ast.Attribute) else ""
        return f"{base}.{node.attr}" if base and isinstance(node, ast.Attribute) else ""


def is_private(name: str) -> bool:
    return re.fullmatch(r"_[a-zA-Z]\w*", name) is not None


def reached(module: ast.Module) -> set[str]:
    """The private names of torch that a module uses, also by another name: `clips = torch.nn.utils.clip_grad`."""
    names = Names(module)
    found = {names.path(n) for n in ast.walk(module) if isinstance(n, ast.Attribute) and is_private(n.attr)}
    for n in ast.walk(module):
        if isinstance(n, ast.ImportFrom) and (n.module or "").split(".")[0] == "torch":
            parts = [f"{n.module}.{a.name}" for a in n.names]
            found |= {x for x in parts if any(map(is_private, x.split(".")))}
    return {x for x in found if x and not x.startswith("torch.ops.")}


def exchanged(module: ast.Module) -> set[str]:
    """What of torch's a module replaces."""
    names = Names(module)
    calls = [n for n in ast.walk(module) if isinstance(n, ast.Call) and ast.unparse(n.func) == "replaced"]
    found = {(names.path(n.args[0]), k.arg) for n in calls for k in n.keywords}
    return {f"{owner}.{name}" for owner, name in found if owner and name}


def test_no_other_module_reaches_into_torch() -> None:
    allowed = {name.replace(":", ".") for name in torch_api.USED.values()} | {*REPLACED} | READ
    found = {path: reached(module) - allowed for path, module in modules().items()}
    assert {path: names for path, names in found.items() if names} == {}


def test_names_are_seen_by_any_other_name() -> None:
    module = ast.parse(
        "import torch\nfrom torch import nn\nfrom tracer.torch_api import meta_registrations\n"
        "clips: Any = nn.utils.clip_grad\nagain = clips\nagain._has_foreach_support(1)\n"
        "meta_registrations._meta_x\nfrom torch._C import x\nwith replaced(clips, _other=1): pass\n"
        "torch.ops.aten._to_copy.default\nself._mine"
    )
    assert reached(module) == {
        "torch.nn.utils.clip_grad._has_foreach_support", "torch._meta_registrations._meta_x", "torch._C.x",
    }  # fmt: skip
    assert exchanged(module) == {"torch.nn.utils.clip_grad._other"}


def test_what_is_exchanged_is_known_and_takes_what_it_took() -> None:
    found = set[str]().union(*map(exchanged, modules().values()))
    assert found <= {*REPLACED}
    assert len(REPLACED) <= 15
    there = {*REPLACED} - (set() if torch.version.cuda else ONLY_WITH_CUDA)
    for name in there:
        first, more, _ = REPLACED[name].partition(" ...")
        assert parameters(name).startswith(first) if more else parameters(name) == first, name


def parameters(name: str) -> str:
    try:
        found = inspect.signature(pkgutil.resolve_name(name)).parameters.values()
    except (TypeError, ValueError):
        return "?"
    return " ".join("*" * (p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)) + p.name for p in found)


def test_private_attributes_of_torch_s_objects_are_known() -> None:
    trees = modules().values()
    own = {n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {
        n.target.id
        for t in trees
        for n in ast.walk(t)
        if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }
    found = set[str]()
    for tree in trees:
        names = Names(tree)
        for n in ast.walk(tree):
            if isinstance(n, ast.Attribute) and not names.path(n):
                (own if ast.unparse(n.value) in ("self", "cls") else found).add(n.attr)
            elif isinstance(n, ast.Call) and ast.unparse(n.func) in ("getattr", "hasattr"):
                found |= {x.value for x in n.args[1:2] if isinstance(x, ast.Constant)}
    assert {x for x in found - own if is_private(x) and not x.startswith("_lowtide")} == OF_OBJECTS


def test_ctrl_c_while_numpy_is_imported_is_not_swallowed(tmp_path: Path) -> None:
    once = "if not hasattr(sys, 'seen'):\n    sys.seen = True\n    raise KeyboardInterrupt"
    (tmp_path / "numpy.py").write_text(f"import sys\n{once}\nraise ImportError")
    code = "from tracer.torch_api import require_torch; require_torch()"
    done = python("-c", code, code=None, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert done.stderr.rstrip().endswith("KeyboardInterrupt")
    assert done.returncode
