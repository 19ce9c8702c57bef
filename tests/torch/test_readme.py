"""What the manuals say of the command that needs torch, and their own example."""

from __future__ import annotations

import re
from pathlib import Path

from tests.commands import python
from tests.core.test_readme import FORMATS, README, blocks, quoted, rows, section
from tests.tiny import measurement
from traces.records.measurement import RunFigures


def test_every_key_of_executes_json_is_documented() -> None:
    told = quoted(section(FORMATS, "What the commands print with --json"))
    assert {*measurement(RunFigures()).to_json(), "plan", "within_budget"} <= told | {
        *rows(section(FORMATS, "A measurement"))
    }


# Runs what the manual shows one after another in one process: the commands (also where a script starts `trace` for each
# batch size), the scripts, and last the loop whose output is shown.
ONE_PROCESS = """
import runpy, sys
from simulator.cli.main import main as simulate
from simulator.studies import tracing
from tracer.cli.main import trace
tracing.run_command = lambda words, *_: trace([*words[1:], "-q"], standalone_mode=False)
trace(["my_training.py:build", "--batch-size", "16", "--device", "cpu", "--rounds", "1", "-o", "my-trace"],
      standalone_mode=False)
simulate(["my-trace", "--budget", "80%", "-o", "my-plan.json"], standalone_mode=False)
for script in sys.argv[1:]:
    print("RUN", script)
    runpy.run_path(script, run_name="__main__")
"""


def test_the_example_runs_as_shown(tmp_path: Path) -> None:
    scripts = []
    for number, block in enumerate(blocks(README, "python")):
        first = block.splitlines()[0]
        name = first.removeprefix("# ") if first.endswith(".py") else f"block_{number}.py"
        less = block.replace("resnet50", "resnet18").replace("seconds=10", "seconds=1")
        (tmp_path / name).write_text(less, encoding="utf-8")
        if name not in ("my_training.py", "train.py"):
            scripts.append(name)
    assert scripts
    done = python("-c", ONE_PROCESS, *scripts, "train.py", cwd=tmp_path)
    assert '"recompute"' in (tmp_path / "my-plan.json").read_text(encoding="utf-8")
    lines = done.stdout.partition("RUN train.py\n")[2].splitlines()
    shown = blocks(section(README, "`apply_plan`"), "")[0].splitlines()
    # The losses' digits belong to a machine; all else does not.
    digits = re.compile(r"\d+\.\d+")
    assert [digits.sub("", line) for line in lines] == [digits.sub("", line) for line in shown]
