"""Starting a command imports no more than it needs, seen from outside in a fresh process."""

from __future__ import annotations

import json
import pkgutil
import subprocess
from pathlib import Path

import pytest

from tests.commands import python

ROOT = Path(__file__).resolve().parents[2]
TORCH = {"torch", "torchvision", "transformers"}
HEAVY = TORCH | {"pandas", "altair", "vl_convert", "numpy", "pyarrow"}
COMMANDS = {"trace": "tracer", "simulate": "simulator", "execute": "executor"}


def run(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    return python("-c", code, *args, code=None)


def loaded_by(code: str, says: str = "") -> set[str]:
    """Top-level modules that a fresh process holds after running `code`; it may end in SystemExit."""
    wrapper = (
        "import sys, json\n"
        "try:\n    exec(sys.argv[1])\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "sys.stderr.write('\\n' + json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    done = run(wrapper, code)
    assert done.returncode == 0, done.stderr
    said, modules = done.stderr.rsplit("\n", 1)
    assert (says in done.stdout, said) == (True, "")
    return set(json.loads(modules))


@pytest.mark.parametrize("package", COMMANDS.values())
def test_help_works_and_imports_nothing_heavy(package: str) -> None:
    code = (
        f"import runpy; sys.argv[:] = ['{package}', '--help']\n"
        f"runpy.run_module('{package}', run_name='__main__')"
    )
    assert not loaded_by(code, "Usage:") & HEAVY


def test_no_module_of_traces_or_simulator_imports_torch() -> None:
    names = []
    for package in ("traces", "simulator"):
        names += [package, *(m.name for m in pkgutil.walk_packages([str(ROOT / package)], f"{package}."))]
    names = [n for n in names if not n.endswith("__main__")]
    assert {"simulator.cli.main", "simulator.core.problem", "traces.records.trace"} <= set(names)
    code = "import importlib\n" + "\n".join(f"importlib.import_module({n!r})" for n in names)
    assert not loaded_by(code) & (TORCH | {"pandas", "altair", "vl_convert", "jinja2"})


def test_listing_the_models_needs_no_torch() -> None:
    code = "from tracer.step.named.models import list_models; assert any(m.name == 'resnet152' for m in list_models())"
    assert not loaded_by(code) & HEAVY


@pytest.mark.parametrize("package", COMMANDS.values())
def test_ctrl_c_while_modules_are_imported_ends_a_command_with_its_exit_code(package: str) -> None:
    code = (
        "import runpy, sys\n"
        "class Stop:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'click':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Stop())\n"
        f"sys.argv[:] = ['{package}', '--help']\n"
        f"runpy.run_module('{package}', run_name='__main__')"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Error: stopped.\n")


def test_a_plan_loads_few_modules() -> None:
    code = (
        "import sys\nfrom simulator import plan\nplan('bert-base', '60%', seconds=0)\n"
        "ours = [m for m in sys.modules if m.partition('.')[0] in ('traces', 'simulator', 'tracer', 'executor')]\n"
        "assert len(ours) <= 45, ours"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
