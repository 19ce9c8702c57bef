"""Say in three sentences why a run needs the memory that it needs, and what would make it fit, with figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from simulator.allocator.replay import recording_from_snapshot, replay
from simulator.history.read import Source
from simulator.history.run import UNNAMED, History, listed
from simulator.prediction.ask import Question, ask
from simulator.show.tables import Table, table
from traces.errors import LowtideError, TraceError
from traces.files import to_json
from traces.records.plan import RESERVED
from traces.units import show_bytes, show_percent

# What does not grow with the batch.
FIXED: Final = ("parameter", "optimizer state", "buffer", "gradient", "gathered and reduced")
OFFLOAD: Final = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One thing that may be done, and what comes of it, as far as that can be known."""

    name: str
    words: str
    saves_bytes: int | None = None
    overhead_percent: float | None = None
    batch_share: float | None = None  # of the batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """The answer."""

    history: History
    over_bytes: (
        int | None
    )  # by which the run exceeds its limit; negative: what is left; None: no limit is known
    remedies: tuple[Remedy, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """What held it; what of the rest is fragmentation, and outside torch; what would make it fit."""
        h = self.history
        where = f" ({h.where})" if h.where else ""
        held = "; most of it ".join(
            filter(None, (listed(h.parts.get(p, {}), 3) for p in ("category", "line")))
        )
        at = "At the peak" if h.refused is None else "When memory ran out"
        first = f"{at}{where} {show_bytes(h.peak_bytes)} are in use{f': {held}' if held else ''}."
        over = self.over_bytes
        words = "; ".join(r.words for r in self.remedies if r.saves_bytes is None or r.saves_bytes > 0)
        if over is None:
            last = f"What would help: {words}." if words else ""
        elif over <= 0:
            last = f"It fits, with {show_bytes(-over)} left."
        else:
            last = f"It lacks {show_bytes(over)}; what would make it fit: {words or 'nothing that is known here'}."
        return tuple(filter(None, (first, _rest(h), last)))

    def tables(self, most: int) -> Iterator[Table]:
        """What held the memory at the peak, a table a part."""
        peak = max(1, self.history.peak_bytes)
        for part, of in self.history.parts.items():
            yield table(
                list(of.items())[:most],
                (
                    (part, "", lambda row: row[0] or UNNAMED),
                    ("at the peak", "bytes", lambda row: row[1]),
                    ("share", "share", lambda row: 100 * row[1] / peak),
                ),
            )

    def to_json(self) -> dict[str, Any]:
        more = {"over_bytes": self.over_bytes, "sentences": self.sentences(), "remedies": self.remedies}
        return {**self.history.to_json(), **{k: to_json(v) for k, v in more.items()}}


def _rest(h: History) -> str:
    """What torch has beyond that, and what lies outside of it."""
    parts = []
    if h.reserved_bytes is not None:
        gap = h.reserved_bytes - h.peak_bytes
        share = show_percent(100 * gap / max(1, h.reserved_bytes), digits=1)
        text = f"torch has {show_bytes(h.reserved_bytes)} reserved, of which {show_bytes(gap)} ({share}) are free"
        if (f := h.free) is not None:
            of = [f"{f.pieces:,} pieces between what is in use ({show_bytes(f.pieces_bytes)}, the largest "
                  f"{show_bytes(f.largest_bytes)})"] if f.pieces else []  # fmt: skip
            of += [f"{show_bytes(f.rests_bytes)} rests too small to be split off"] if f.rests_bytes else []
            of += [f"{show_bytes(f.cached_bytes)} whole segments, kept for later"] if f.cached_bytes else []
            text += f": {', '.join(of)}" if of else ""
        parts.append(text)
    if h.refused is not None:
        parts.append(
            f"it was asked for {show_bytes(h.refused.asked_bytes)} more and the device had "
            f"{show_bytes(h.refused.free_bytes)} free"
        )
    if h.outside_bytes is not None:
        parts.append(f"outside of torch lie {show_bytes(h.outside_bytes)}, assumed")
    elif h.device_bytes is not None and h.refused is not None and h.reserved_bytes is not None:
        outside = h.device_bytes - h.reserved_bytes - h.refused.free_bytes
        parts.append(
            f"outside of torch lie {show_bytes(max(0, outside))} (its context, libraries, other processes)"
        )
    return "; ".join(parts)[:1].upper() + "; ".join(parts)[1:] + "." if parts else ""


def why(source: Source, question: Question) -> Why:
    """Explain a run. Of a trace the question says which budget or device it is to fit; a plan is looked for if it does
    not.
    """
    h, c = source.history, source.prediction
    over: int | None = None
    if h.refused is not None:
        over = h.refused.asked_bytes - h.refused.free_bytes
    elif c is not None:
        limit, of = question.limit(c)
        limit = c.setting.device.usable_bytes if limit is None and c.setting.device is not None else limit
        device_reserves = of == RESERVED or (question.budget is None and h.reserved_bytes is not None)
        needs = c.planned_fit.needs_bytes if device_reserves else h.peak_bytes
        over = None if limit is None else needs - limit
    elif h.device_bytes is not None and h.reserved_bytes is not None:
        over = h.reserved_bytes + (h.outside_bytes or 0) - h.device_bytes
    remedies: list[Remedy] = []
    if over is None or over > 0:
        remedies += _by_settings(source)
    if over is not None and over > 0:
        if c is not None and not c.plan.changes:
            remedies += _by_plan(source, question)
        remedies += _by_batch(h, over)
    if over is None and c is not None:
        remedies.append(Remedy(name="ask", words="name --gpu or --budget to be told what makes it fit"))
    elif over is None or over > 0:
        remedies += _by_line(h)
    return Why(history=h, over_bytes=over, remedies=tuple(remedies))


def _by_settings(source: Source) -> list[Remedy]:
    """What the same requests come to with expandable segments. Ignores: what the program would have done otherwise."""
    if source.snapshot is None:
        return []
    try:
        recording = recording_from_snapshot(source.snapshot, source.history.name)
    except TraceError:
        return [Remedy(name="settings", words="what expandable_segments:True would do is not known, since the "
                       "recording begins midway or has private pools")]  # fmt: skip
    settings = recording.settings
    if settings.expandable_segments:
        return []
    now = replay(recording, settings).figures.peak_reserved_bytes
    grown = replay(recording, replace(settings, expandable_segments=True)).figures.peak_reserved_bytes
    conf, peaks = (
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        f"{show_bytes(grown)} in place of {show_bytes(now)}",
    )
    words = (
        f"{conf} {'reserves' if grown < now else 'would not help: it reserves'} {peaks} for the same requests"
    )
    return [Remedy(name="settings", words=words, saves_bytes=now - grown)]


def _by_plan(source: Source, question: Question) -> list[Remedy]:
    c, h = source.prediction, source.history
    assert c is not None
    limited = question if question.budget is not None else replace(question, budget="device")
    asks = [("plan", limited)]
    if question.levers.kinds is None:
        asks.append((OFFLOAD, replace(limited, levers=replace(question.levers, kinds=(OFFLOAD,)))))
    for name, asked in asks:
        try:
            answer = ask(c.problem, asked, refusals=(LowtideError,))
            plan = answer.planned
        except LowtideError:
            continue
        added = show_percent(plan.overhead_percent, signed=True)
        how = " with values copied to host memory" if name == OFFLOAD else ""
        conf = f" under {plan.setting.alloc_conf}" if plan.setting.alloc_conf else ""
        return [
            Remedy(
                name=name,
                words=f"a plan{how} keeps it within {show_bytes(answer.budget_bytes)}{conf} at {added} time",
                saves_bytes=h.peak_bytes - plan.planned.timeline.peak_allocated_bytes,
                overhead_percent=plan.overhead_percent,
            )
        ]
    return [Remedy(name="plan", words="no plan was found that fits")]


def _by_batch(h: History, over: int) -> list[Remedy]:
    """By the straight line. Counts: that all but FIXED is in proportion to the batch. Ignores: fragmentation."""
    grows = sum(n for name, n in h.parts.get("category", {}).items() if name not in FIXED)
    if grows <= over:
        words = "no smaller batch does, since parameters, gradients and optimizer state alone are too large"
        return [Remedy(name="batch", words=words)] if grows else []
    share = 1 - over / grows
    words = (
        f"a batch of {show_percent(100 * share, digits=0)} of this one, if memory grows in proportion to it"
    )
    return [Remedy(name="batch", words=words, saves_bytes=over, batch_share=share)]


def _by_line(h: History) -> list[Remedy]:
    line, nbytes = next(((k, n) for k, n in h.parts.get("line", {}).items() if k), ("", 0))
    return (
        [Remedy(name="line", words=f"{line} alone holds {show_bytes(nbytes)}", saves_bytes=nbytes)]
        if line
        else []
    )
