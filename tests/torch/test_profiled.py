"""`trace times` takes what torch.profiler measured of the loop that was traced."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from click.testing import CliRunner

from tests.torch.small_nets import spec
from tracer.cli.main import trace
from tracer.step.loop import run_step
from tracer.step.step import load_spec
from traces.records.store import load
from traces.records.trace import VIEW

NET = spec("residual")


def test_every_op_of_a_loop_is_found_in_its_profile(tmp_path: Path) -> None:
    step = load_spec(NET, {})("cpu")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            run_step(step, step.model, step.optimizer)
    seen.export_chrome_trace(str(tmp_path / "p.json"))
    run = CliRunner().invoke
    assert run(trace, [NET, "-o", str(tmp_path / "t"), "-q"]).exit_code == 0
    words = ["times", str(tmp_path / "t"), str(tmp_path / "p.json"), "-o", str(tmp_path / "m"), "--json"]
    done = run(trace, words)
    assert done.exit_code == 0, done.output
    told, of = json.loads(done.stdout), load(tmp_path / "m")
    computing = [i for i, flags in enumerate(of.ops.flags) if not flags & VIEW]
    assert told["steps"] == 3
    assert told["measured_ops"] >= 0.8 * len(computing)  # dropout draws its mask otherwise in a graph
    assert told["time_ns"] == of.time_ns == sum(of.ops.time_ns[i] for i in computing)
    again = run(trace, words)
    assert again.exit_code == 2
    assert "--force" in again.output
