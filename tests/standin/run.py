"""Run random programs on torch's own allocator over the null driver, and write down what it did."""

from __future__ import annotations

import gzip
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from tests.standin.programs import TOTAL_BYTES
from tracer.rehearsal.driver import driver_environment, find_cuda_torch
from traces.devices import device


@click.command()
@click.argument("out", type=Path)
@click.option("--programs", "count", default=24)
def main(out: Path, count: int) -> None:
    gpu = replace(device("a100-80"), memory_bytes=TOTAL_BYTES)
    env = {**os.environ, **driver_environment(find_cuda_torch(), gpu, devices=2)}
    with tempfile.TemporaryDirectory() as name:
        plain = Path(name) / "out.pickle"
        subprocess.run(
            [sys.executable, "-m", "tests.standin.programs", plain, str(count)], env=env, check=True
        )
        rows = pickle.loads(plain.read_bytes())
    out.write_bytes(gzip.compress(pickle.dumps(rows, protocol=4), 9, mtime=0))


if __name__ == "__main__":
    main()
