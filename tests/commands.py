"""Commands as users type them, in this process, and Python in a fresh one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
from click.testing import CliRunner, Result

from simulator.cli.main import main

ROOT = Path(__file__).resolve().parents[1]


def call(command: click.Command, *words: object) -> Result:
    return CliRunner().invoke(command, [str(w) for w in words])


def simulate(*words: object) -> Result:
    return CliRunner().invoke(main, [str(w) for w in words], prog_name="simulate")


def python(
    *words: object, cwd: Path = ROOT, code: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python WORDS` in a process of its own, which finds Lowtide and ends with this exit code, if one is given."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert code is None or done.returncode == code, f"{done.returncode}: {done.stderr}"
    return done
