"""Turn predictions beside measurements into charts: scatter with the diagonal, signed errors, errors by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simulator.report.bars import time_unit
from simulator.report.charts import altair, finish, table
from traces.units import bytes_unit

LOG_FROM = 20.0  # largest over smallest value from which a scatter's axes are logarithmic


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One figure of one case, predicted by one series, beside what was measured."""

    case: str
    model: str
    series: str
    predicted: float  # bytes, ns, or percent
    measured: float
    error: float  # percent, or points


def scatter(points: Sequence[Point], colours: Mapping[str, str], *, title: str, kind: str) -> dict[str, Any]:
    """Predicted against measured with the diagonal; above it the prediction was too high.

    kind: `bytes`, `time` or `percent`; the first two get logarithmic axes where the values span more than LOG_FROM.
    """
    alt = altair()
    values = [v for p in points for v in (p.predicted, p.measured)]
    top, low = max([*values, 1e-9]), min([*values, 0.0] if kind == "percent" else values)
    if kind == "percent":
        unit, unit_name = 1.0, "%"
    elif kind == "bytes":
        unit, unit_name = bytes_unit(int(top))
    else:
        unit, unit_name = time_unit(top)
    log = kind != "percent" and low > 0 and top / low > LOG_FROM
    ends = (low / 1.15, top * 1.15) if log else (min(0.0, low * 1.05), top * 1.05)
    domain = [ends[0] / unit, ends[1] / unit]
    scale = alt.Scale(type="log", domain=domain, nice=False) if log else alt.Scale(domain=domain, nice=False)
    rows = [(p.case, p.model, p.series, p.predicted / unit, p.measured / unit, p.error) for p in points]
    columns = ["case", "model", "series", "predicted", "measured", "error"]
    x = alt.X("measured:Q").title(f"{title}, measured, {unit_name}").scale(scale)
    y = alt.Y("predicted:Q").title(f"predicted, {unit_name}").scale(scale)
    present = [s for s in colours if any(p.series == s for p in points)]
    dots = (
        alt.Chart(table(columns, rows, ["case", "model", "series"]))
        .mark_point(filled=True, size=55, opacity=0.75)
        .encode(
            x,
            y,
            alt.Color("series:N").scale(domain=present, range=[colours[s] for s in present]).title(None),
            alt.Shape("series:N")
            .scale(domain=present, range=["circle", "square"][: len(present)])
            .title(None),
            tooltip=[
                "case:N",
                "series:N",
                alt.Tooltip("predicted:Q", format=",.4f", title=f"predicted, {unit_name}"),
                alt.Tooltip("measured:Q", format=",.4f", title=f"measured, {unit_name}"),
                alt.Tooltip(
                    "error:Q", format="+,.3f", title="error, points" if kind == "percent" else "error, %"
                ),
            ],
        )
    )
    line = (
        alt.Chart(table(["measured", "predicted"], [(d, d) for d in domain]))
        .mark_line(color="#94a3b8", strokeDash=[5, 4], strokeWidth=1.2, clip=True)
        .encode(x, y)
    )
    return finish(alt.layer(line, dots), height=340)


def signed_errors(
    rows: Sequence[tuple[str, str, float]], colours: Mapping[str, str], *, unit: str
) -> dict[str, Any]:
    """Horizontal bars of signed errors, one a case and series: (case, series, error). Left of zero: too low."""
    alt = altair()
    cases = list(dict.fromkeys(r[0] for r in rows))
    present = [s for s in colours if any(r[1] == s for r in rows)]
    y = alt.Y("case:N").sort(cases).title(None).axis(labelLimit=320, ticks=False, domain=False)
    chart = (
        alt.Chart(table(["case", "series", "error"], rows, ["case", "series"]))
        .mark_bar()
        .encode(
            alt.X("error:Q").title(f"error, {unit} (negative: predicted too low)").axis(tickCount=10),
            y,
            alt.YOffset("series:N").sort(present),
            alt.Color("series:N").scale(domain=present, range=[colours[s] for s in present]).title(None),
            tooltip=["case:N", "series:N", alt.Tooltip("error:Q", format="+,.4f", title=f"error, {unit}")],
        )
    )
    zero = (
        alt.Chart(table(["zero"], [(0,)])).mark_rule(color="#475467", strokeWidth=1).encode(alt.X("zero:Q"))
    )
    return finish(alt.layer(chart, zero), height=max(80, (10 * len(present) + 6) * len(cases)))
