"""Reports: complete in themselves, safe against hostile names, and true to the byte."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from shutil import which
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.report import write_measurement
from simulator.allocator.device import setting_of
from simulator.core.problem import Problem
from simulator.prediction.ask import Answer, Question
from simulator.prediction.step import Prediction, predict
from simulator.report import charts
from simulator.report import page as pages
from simulator.report.page import Page, Section, Text, render
from simulator.report.step import activations, at_peak, write_step
from simulator.report.sweep import write_sweep
from simulator.show.tables import Cell, Table
from simulator.studies.sweep import Sweep, SweepRow
from tests import tiny
from traces.errors import EnvironmentProblem
from traces.records import store
from traces.records.measurement import Measurement, RunFigures
from traces.records.plan import ALLOCATED, Action, Plan
from traces.records.trace import Trace
from traces.units import show_bytes, show_time

CHROMIUM = ("chromium", "--headless", "--no-sandbox", "--disable-gpu")
browser = pytest.mark.skipif(which("chromium") is None, reason="no headless Chromium")
HOSTILE = "</script><script>alert('x')</script><img src=http://evil.example/x onerror=alert(1)>&\"'"


def planned(trace: Trace, *storages: int) -> Plan:
    return Plan(meta=trace.meta, planner="by hand", actions=tuple(Action(storage=s) for s in storages))


def predicted(trace: Trace, plan: Plan, budget_bytes: int | None) -> Prediction:
    return predict(Problem(trace), setting_of(trace.meta), replace(plan, budget_bytes=budget_bytes))


def answered(trace: Trace, plan: Plan, budget_bytes: int | None) -> Answer:
    c = predicted(trace, plan, budget_bytes)
    asked = Question(budget=budget_bytes)
    return Answer(
        question=asked, trace_name="t", asked=c, found=c, budget_bytes=budget_bytes, budget_of=ALLOCATED
    )


def names_replaced(trace: Trace, name: str) -> Trace:
    n, m = len(trace.ops), len(trace.storages)
    return replace(
        trace,
        meta=replace(trace.meta, model=name, optimizer=name, options={name: name}),
        ops=replace(trace.ops, name=(name,) * n, target=(name,) * n, module=(name,) * n),
        storages=replace(trace.storages, name=(name,) * m, dtype=(name,) * m),
    )


class Elements(HTMLParser):
    """Tags with their attributes, as a browser would meet them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def specifications(html: str) -> list[dict[str, object]]:
    found = re.findall(r'<script type="application/json" id="spec\d+">(.*?)</script>', html, re.DOTALL)
    return [json.loads(text) for text in found]


@pytest.fixture(scope="module")
def reporting() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")


@pytest.fixture(scope="module")
def page_file(reporting: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    trace = tiny.chain(60, size=2**20, time_ns=1000)
    place = tmp_path_factory.mktemp("page") / "r.html"
    return write_step(place, answered(trace, planned(trace, *range(3, 50, 2)), 45 * 2**20))


@pytest.fixture
def page(page_file: Path) -> str:
    return page_file.read_text("utf-8")


def test_the_page_loads_nothing(page: str) -> None:
    # The names of the SVG standard's namespaces look like addresses; nobody fetches them.
    assert not re.findall(r"https?://(?!www\.w3\.org/)[^\"' ]*", page)
    for tag, attributes in Elements(page).tags:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base", "form"}
        assert "src" not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "connect-src" not in policy[1]
    assert page.count("window.vegaEmbed=") == 1
    assert len(page) < 1_400_000


def test_every_chart_can_be_compiled(page: str) -> None:
    import vl_convert

    specs = specifications(page)
    assert len(specs) == 2
    for spec in specs:
        vl_convert.vegalite_to_vega(spec)


@browser
@pytest.mark.parametrize("look", [[], ["--force-dark-mode", "--window-size=400,800"]])
def test_a_browser_draws_every_chart_without_complaint(page_file: Path, look: list[str]) -> None:
    words = [*CHROMIUM, "--enable-logging=stderr", *look, "--virtual-time-budget=20000", "--dump-dom"]
    words += [page_file.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300)
    assert "CONSOLE" not in done.stderr
    assert done.stdout.count('<svg xmlns="http://www.w3.org/2000/svg"') == 2
    assert "cannot be drawn:" not in done.stdout.replace('"This chart cannot be drawn: "', "")


def test_hostile_names_stay_text(tmp_path: Path, reporting: None) -> None:
    trace = names_replaced(tiny.chain(10, size=1000, time_ns=5), HOSTILE)
    plan = replace(planned(trace, 3, 5), meta=trace.meta, planner=HOSTILE)
    html = write_step(tmp_path / "r.html", answered(trace, plan, None)).read_text("utf-8")
    harmless = write_step(
        tmp_path / "s.html", answered(names_replaced(trace, "name"), replace(plan, planner="p"), None)
    ).read_text("utf-8")
    assert [t for t, _ in Elements(html).tags] == [t for t, _ in Elements(harmless).tags]
    assert HOSTILE[:30] not in html
    assert "&lt;/script&gt;" in html
    in_csv = HOSTILE.replace('"', '""')
    assert any(in_csv in json.dumps(s, ensure_ascii=False).replace('\\"', '"') for s in specifications(html))


def test_a_page_without_charts_has_no_bundle() -> None:
    html = render(Page(title="t", subtitle="s", sections=(Section(title="A", blocks=(Text(text="b"),)),)))
    assert len(html) < 20_000


@settings(max_examples=60, deadline=None)
@given(
    totals=st.lists(st.integers(0, 10**12), min_size=1, max_size=400),
    gaps=st.lists(st.integers(0, 10**9), min_size=400, max_size=400),
    points=st.integers(6, 120),
)
def test_thinning_keeps_the_extremes(totals: list[int], gaps: list[int], points: int) -> None:
    clock = [0]
    for gap in gaps[: len(totals) - 1]:
        clock.append(clock[-1] + gap)
    with mock.patch.object(charts, "MOST_POINTS", points):
        kept = charts.thin(totals, clock)
    assert len(kept) <= max(points, 2)
    assert list(kept) == sorted(set(kept))
    assert max(totals[k] for k in kept) == max(totals)
    assert min(totals[k] for k in kept) == min(totals)
    assert kept[0] == 0
    assert kept[-1] == len(totals) - 1


def test_the_first_peak_survives_thinning() -> None:
    # The peak's marker names the first step that reaches it, so that one must be drawn.
    totals = [5, 1, 9, 9, 2] * 1000
    kept = charts.thin(totals, range(5000))
    assert totals.index(max(totals)) in kept


def test_the_peak_shown_sums_to_the_peak(page: str) -> None:
    trace = tiny.chain(60, size=2**20, time_ns=1000)
    c = predicted(trace, planned(trace, *range(3, 50, 2)), None)
    _, parts = at_peak(c)
    for column, timeline in ((1, c.saved.timeline), (2, c.planned.timeline)):
        cells = [row[column] for row in parts.rows if isinstance(row[column], Cell)]
        assert sum(cell.sort or 0 for cell in cells) == timeline.peak_allocated_bytes
    assert f'<td>peak</td><td class="n">{show_bytes(c.saved.timeline.peak_allocated_bytes)}</td>' in page


def test_an_activation_costs_what_runs_only_for_others() -> None:
    # a is not read by backward, so rebuilding b runs a's op as well.
    ops = [
        tiny.fwd({"a": 8}, "w", time_ns=3),
        tiny.fwd({"b": 8}, "a", time_ns=5),
        tiny.bwd({"g": 8}, "w"),
        tiny.bwd({"h": 8}, "g", "b"),
    ]
    trace = tiny.trace(ops, {"w": 8})
    (row,) = activations(Problem(trace))
    assert (row.storage, row.recompute_ns) == (2, 3 + 5)
    assert row.idle_ns == 1  # op 2 runs between b's end and op 3


def test_long_timelines_stay_small(tmp_path: Path, reporting: None) -> None:
    trace = tiny.chain(2000, size=1_234_567, time_ns=987)
    path = write_step(tmp_path / "r.html", answered(trace, planned(trace, *range(3, 2000, 3)), 10**9))
    assert path.stat().st_size < 1_600_000
    peak = predicted(trace, planned(trace, *range(3, 2000, 3)), None).planned.timeline.peak_allocated_bytes
    drawn = [s for s in specifications(path.read_text("utf-8")) if "hover" in json.dumps(s)]
    csv = next(t for t in drawn[0]["datasets"].values() if t.startswith("ms,step,op,total"))  # type: ignore[attr-defined]
    totals = [float(line.split(",")[3]) for line in csv.splitlines()[1:]]
    assert len(totals) <= 1500
    assert max(totals) == round(peak / GIB, 4)


def test_an_empty_plan_and_no_times(tmp_path: Path, reporting: None) -> None:
    trace = tiny.chain(3, time_ns=0)
    assert write_step(tmp_path / "r.html", answered(trace, planned(trace), None)).is_file()


GIB = 2**30


def figures(peak_gib: float, time_ns: int = 5_000_000, **more: object) -> RunFigures:
    return RunFigures(peak_allocated_bytes=int(peak_gib * GIB), step_time_ns=time_ns, **more)  # type: ignore[arg-type]


def sweep_row(batch: int, *, feasible: bool = True, **more: object) -> SweepRow:
    values: dict[str, object] = {
        "batch_size": batch,
        "planner": "mu-two",
        "budget_bytes": batch * GIB * 3 // 4,
        "feasible": feasible,
        "baseline": figures(batch),
        "plan": figures(batch * 0.7) if feasible else RunFigures(),
        "overhead_percent": 12.5 if feasible else None,
        "recomputed_ops": 3,
        "breakdown_baseline": {"parameter": GIB // 2, "activation": batch * GIB - GIB // 2},
        "breakdown_plan": {"parameter": GIB // 2, "activation": batch * GIB // 2} if feasible else {},
        "activation_bytes": batch * GIB,
        "parameter_bytes": GIB // 2,
        "ops": 10,
        "storages": 20,
        "flops": 10**9,
        "message": "" if feasible else "the floor is <b>9 GiB</b>",
    }
    return SweepRow(**(values | more))  # type: ignore[arg-type]


def series_of(spec: dict[str, object]) -> set[str]:
    """The series of a grouped bar chart; empty for other charts."""
    out: set[str] = set()
    for text in spec["datasets"].values():  # type: ignore[attr-defined]
        lines = list(csv.reader(io.StringIO(text)))
        if {"group", "series"} <= {*lines[0]}:
            out |= {line[lines[0].index("series")] for line in lines[1:]}
    return out


def test_a_sweep_is_predicted_and_shows_the_activations_of_its_largest_batch(
    tmp_path: Path, reporting: None
) -> None:
    trace = tiny.chain(9, size=1000, time_ns=10)
    store.save(trace, tmp_path / "t")
    planned(trace, 3).save(tmp_path / "plan.json")
    rows = (sweep_row(8, trace_path="t", plan_path="plan.json"), sweep_row(4, feasible=False))
    sweep = Sweep(model="m", options={}, target="H200", rows=rows)
    html = write_sweep(tmp_path / "s.html", sweep, tmp_path).read_text("utf-8")
    assert "Every figure on this page is predicted" in html
    assert "the floor is &lt;b&gt;9 GiB&lt;/b&gt;" in html
    assert set().union(*map(series_of, specifications(html))) == {"save-all", "plan"}
    assert "At batch size 8." in html
    assert ">recomputed</td>" in html


def test_a_column_that_no_row_knows_is_left_out() -> None:
    made = Table(
        columns=("run", "blocks", "peak", "op"),
        rows=(("a", "–", Cell(text="1 B", sort=1), "–"), ("b", Cell(text="–"), "–", "mm")),
        numbers=frozenset({1, 2}),
        code=frozenset({3}),
        total=("", "x", "y", "z"),
    ).known()
    assert made.columns == ("run", "peak", "op")
    assert [len(row) for row in made.rows] == [3, 3]
    assert (made.numbers, made.code, made.total) == (frozenset({1}), frozenset({2}), ("", "y", "z"))


def measurement(trace: Trace, **more: object) -> Measurement:
    values: dict[str, object] = {
        "budget_bytes": 2 * GIB,
        "fingerprint": trace.meta.fingerprint,
        "environment": {"torch": HOSTILE},
        "predicted": figures(1.5),
        "measured": figures(1.6, peaks_bytes=(5, 6), times_ns=(7, 8)),
        "verified": True,
        "max_abs_difference": {"loss": 0.0},
        "steps": 10,
    }
    return tiny.measurement(figures(2.0), **(values | more))


def test_a_measurement_shows_signed_errors(tmp_path: Path, reporting: None) -> None:
    trace = tiny.chain(20, size=2**20, time_ns=1000)
    plan = planned(trace, 3, 5)
    html = write_measurement(tmp_path / "m.html", measurement(trace), trace, plan).read_text("utf-8")
    assert "-6.250 %" in html  # 1.5 against 1.6
    assert "measured on CPU" in html
    assert "roofline" in html  # the trace was not measured, and the page says so
    assert "budget 2.00 GiB: kept" in html
    assert HOSTILE[:30] not in html
    assert len(html) < 1_300_000


def test_an_unverified_measurement_says_so(tmp_path: Path, reporting: None) -> None:
    trace = tiny.chain(5)
    for verified, words in ((False, "NOT equal to eager"), (None, "not verified")):
        m = measurement(
            trace,
            verified=verified,
            budget_bytes=None,
            provenance="measured-cuda",
            environment={"gpu": "H200"},
        )
        html = write_measurement(tmp_path / "m.html", m, trace, planned(trace)).read_text("utf-8")
        assert words in html
        assert "measured on GPU (H200)" in html
        assert "Solid line" not in html


@pytest.mark.parametrize("missing", ["altair", "vl_convert", "jinja2"])
def test_a_missing_package_is_named(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reporting: None
) -> None:
    monkeypatch.setattr(pages, "bundle", pages.bundle.__wrapped__)  # which an earlier page has loaded
    monkeypatch.setitem(sys.modules, missing, None)
    trace = tiny.chain(3)
    with pytest.raises(EnvironmentProblem, match=re.escape("pip install 'lowtide[all]'")):
        write_step(tmp_path / "r.html", answered(trace, planned(trace), None))
    assert list(tmp_path.iterdir()) == []


def test_the_bundle_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reporting: None) -> None:
    import vl_convert

    monkeypatch.setattr(pages, "cache_from_source", lambda _: str(tmp_path / "page.pyc"))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    made = pages.bundle.__wrapped__()
    monkeypatch.setattr(vl_convert, "javascript_bundle", None)
    assert pages.bundle.__wrapped__() == made


def test_figures_read_well() -> None:
    assert [show_bytes(b) for b in (None, 0, 1023, 2**20, 5 * 2**30, -(2**21))] == [
        "–", "0 B", "1023 B", "1.00 MiB", "5.00 GiB", "-2.00 MiB",
    ]  # fmt: skip
    assert [show_time(t) for t in (None, 0, 999, 1500, 2_500_000, 3e9)] == [
        "–", "0 ns", "999 ns", "1.50 µs", "2.50 ms", "3.00 s",
    ]  # fmt: skip
