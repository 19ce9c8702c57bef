"""A predicted step as torch's snapshot, and the pages of runs: figures are the replay's."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.allocator.replay import peak_reserved
from simulator.cli.main import main
from simulator.core.problem import peak_by_category
from simulator.history.export import AGAIN, snapshot_of
from simulator.history.snapshot import history_of, recording_of
from simulator.prediction.ask import simulate
from tests import tiny
from tests.core.test_history import chain
from traces.records.measurement import RunFigures
from traces.records.store import save


@pytest.mark.parametrize("recomputed", [(), (3, 4, 5)])
def test_an_exported_step_is_what_the_replay_says(recomputed: tuple[int, ...]) -> None:
    c = chain(*recomputed)
    data = snapshot_of(c)
    h, there = history_of(data, "s"), peak_by_category(c.step.trace, c.planned.schedule, c.planned.timeline)
    assert h.peak_bytes == c.planned.timeline.peak_allocated_bytes
    assert h.parts["category"] == {k: n for k, n in there.items() if n}
    assert "net.1" in h.parts["module"]
    recording = recording_of(data, "s")
    assert peak_reserved(recording, recording.settings) == h.most_reserved_bytes
    for s in data["segments"]:
        assert s["total_size"] == sum(b["size"] for b in s["blocks"])
    told = {f["name"]: f["line"] for e in data["device_traces"][0] for f in e["frames"]}
    assert len({*told.values()}) == len(told)  # tools that group by file and line must not mix names
    assert (AGAIN in told) == bool(recomputed)
    phases = [(a["name"], a["stage"]) for a in data["external_annotations"]]
    once = [(phase, stage) for phase in ("forward", "backward") for stage in ("START", "END")]
    assert phases == once * (len(phases) // len(once))


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_an_exported_step_of_a_gpu_reserves_what_is_predicted(conf: str) -> None:
    c = simulate("bert-base", alloc_conf=conf)
    data, reserved = snapshot_of(c), c.planned_fit.reserved
    assert reserved is not None
    h = history_of(data, "s")
    assert h.peak_bytes == reserved.iterations[-1].peak_requested_bytes
    assert h.most_reserved_bytes == reserved.peak_reserved_bytes == max(there for _, there in h.curve)
    recording = recording_of(data, "s")
    assert peak_reserved(recording, recording.settings) == reserved.peak_reserved_bytes


def test_files_and_pages_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vl_convert = pytest.importorskip("vl_convert")
    from tests.core.test_report import specifications

    monkeypatch.chdir(tmp_path)
    save(chain().step.trace, "t")
    run = RunFigures(peak_allocated_bytes=12, step_time_ns=3, peaks_bytes=(11, 12))
    tiny.measurement(run).save("m.json")
    Path("m.txt").write_text("CUDA out of memory. Tried to allocate 2.00 GiB")
    for asked in ("t --export s.pickle", "t --export p.json", "why s.pickle --report 1.html", "diff t m.json --report "
                  "2.html", "diff t s.pickle --report 3.html", "why m.txt --report 4.html"):  # fmt: skip
        said = CliRunner().invoke(main, [*asked.split(), "-q"])
        assert said.exit_code == 0, said.output
    assert json.loads(Path("p.json").read_text())["traceEvents"]
    assert "torch was asked for 2.00 GiB" in Path("4.html").read_text("utf-8")
    for k, curves in enumerate((1, 2, 2), 1):
        (spec,) = specifications(Path(f"{k}.html").read_text("utf-8"))
        vl_convert.vegalite_to_vega(spec)
        (points,) = spec["datasets"].values()
        assert len({row["run"] for row in csv.DictReader(points.splitlines())}) == curves
    refused = CliRunner().invoke(main, ["t", "--export", "x.txt"])
    assert (refused.exit_code, "memory_viz" in refused.output) == (2, True)
