"""Say in three sentences why a run needs the memory that it needs, and what would make it fit, with figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from simulator.allocator.device import GROWING
from simulator.allocator.replay import peak_reserved
from simulator.allocator.settings import parse_alloc_conf
from simulator.history.read import Source
from simulator.history.run import UNNAMED, History, listed
from simulator.history.snapshot import recording_of
from simulator.prediction.ask import Question, ask
from simulator.prediction.step import Prediction
from simulator.show.tables import Table, table
from traces.errors import LowtideError, TraceError
from traces.files import to_json
from traces.records.plan import RESERVED
from traces.units import show_bytes, show_percent

# What does not grow with the batch.
FIXED: Final = ("parameter", "optimizer state", "buffer", "gradient", "gathered and reduced")


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
    over_bytes: int | None  # the limit; negative: what is left of it; None: no limit is known
    remedies: tuple[Remedy, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """What held it; what of the rest is fragmentation, and outside torch; what would make it fit."""
        h, over = self.history, self.over_bytes
        held = [text for part in ("category", "line") if (text := listed(h.parts.get(part, {}), 3))]
        first = "At the peak" if h.refused is None else "When memory ran out"
        first += f"{f' ({h.where})' * bool(h.where)} {show_bytes(h.peak_bytes)} are in use"
        words = "; ".join(r.words for r in self.remedies if r.saves_bytes is None or r.saves_bytes > 0)
        words = words or "nothing that is known here"
        last = f"What would help: {words}."
        if over is not None:
            last = f"It fits, with {show_bytes(-over)} left."
            if over > 0:
                last = f"It lacks {show_bytes(over)}; what would help: {words}."
        first += f": {'; the largest lines: '.join(held)}." if held else "."
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
            largest = show_bytes(f.largest_bytes)
            why_free = {
                f"in {f.pieces:,} pieces between what is in use (the largest {largest})": f.pieces_bytes,
                "in rests too small to be split off": f.rests_bytes,
                "in whole segments, kept for later": f.cached_bytes,
            }
            text += f": {of}" if (of := listed(why_free, 3)) else ""
        parts.append(text)
    lie = show_bytes(h.outside_bytes)
    outside = f"outside of torch lie {lie}, assumed" * (h.outside_bytes is not None)
    if (r := h.refused) is not None:
        asked, free = show_bytes(r.asked_bytes), show_bytes(r.free_bytes)
        parts.append(f"it was asked for {asked} more and the device had {free} free")
        if h.device_bytes is not None:
            lie = show_bytes(max(0, h.device_bytes - (h.reserved_bytes or 0) - r.free_bytes))
            outside = f"outside of torch lie {lie} (its context, libraries, other processes)"
    text = "; ".join([*parts, outside] if outside else parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def why(source: Source, question: Question) -> Why:
    """Explain a run. The question says what budget or device a trace is to fit; if not, a plan is looked for."""
    h, c, over = source.history, source.prediction, _over(source, question)
    remedies: list[Remedy] = []
    if c is not None and over is None:
        remedies.append(Remedy(name="ask", words="name --gpu or --budget to be told what makes it fit"))
    elif over is None or over > 0:
        remedies += [] if source.snapshot is None else _by_settings(source, question, over or 0)
        remedies += _by_plan(c, question) if c is not None and not c.plan.changes else []
        remedies += _by_batch(h, over) if over is not None else []
        for line, n in [(k, n) for k, n in h.parts.get("line", {}).items() if k][:1]:
            remedies.append(Remedy(name="line", words=f"{line} alone holds {show_bytes(n)}", saves_bytes=n))
    return Why(history=h, over_bytes=over, remedies=tuple(remedies))


def _over(source: Source, question: Question) -> int | None:
    """By how much the run exceeds its limit; None: none is known."""
    h, c = source.history, source.prediction
    if h.refused is not None:
        return h.refused.asked_bytes - h.refused.free_bytes
    if c is None:
        if h.device_bytes is None or h.most_reserved_bytes is None:
            return None
        return h.most_reserved_bytes + (h.outside_bytes or 0) - h.device_bytes
    limit, of = question.limit(c)
    if limit is None and c.setting.device is not None:
        limit, of = c.setting.device.usable_bytes, RESERVED
    needs = c.planned_fit.needs_bytes if of == RESERVED else h.peak_bytes
    return None if limit is None else needs - limit


def _by_settings(source: Source, question: Question, over: int) -> list[Remedy]:
    """What the same requests come to under the settings that are asked about, or with expandable segments. Ignores:
    what the program would have done otherwise."""
    conf = question.alloc_conf or GROWING
    try:
        recording = recording_of(source.snapshot, source.history.name)
    except TraceError:
        words = f"{conf}, of which nobody knows what it would do here (private pools, or events that "
        return [Remedy(name="settings", words=f"{words}were lost)")]
    # Which of equal blocks is taken goes by the version of torch, not by the text.
    other = replace(parse_alloc_conf(conf), ties=recording.settings.ties)
    if other == recording.settings:
        return []
    now, grown = (peak_reserved(recording, s) for s in (recording.settings, other))
    words = f"PYTORCH_ALLOC_CONF={conf}, which reserves {'about ' * recording.midway}{show_bytes(grown)} for the same "
    words += f"requests in place of {show_bytes(now)}" + ", not enough by itself" * (now - grown < over)
    words = "; ".join([words, *recording.notes])
    return [Remedy(name="settings", words=words, saves_bytes=now - grown)]


def _by_plan(c: Prediction, question: Question) -> list[Remedy]:
    """The plan for the limit; if there is none, one that copies values to host memory too."""
    asked = question if question.budget is not None else replace(question, budget="device")
    copying = replace(asked, levers=replace(question.levers, kinds=("offload",)))
    for how, q in (("", asked), (" with values copied to host memory", copying)):
        answer = ask(c.problem, q, refusals=(LowtideError,))
        if (found := answer.found) is not None:
            added = show_percent(found.overhead_percent, signed=True)
            conf = f" under {found.setting.alloc_conf}" * bool(found.setting.alloc_conf)
            words = f"a plan{how} keeps it within {show_bytes(answer.budget_bytes)}{conf} at {added} time"
            saves = c.planned.timeline.peak_allocated_bytes - found.planned.timeline.peak_allocated_bytes
            return [
                Remedy(name="plan", words=words, saves_bytes=saves, overhead_percent=found.overhead_percent)
            ]
    return [Remedy(name="plan", words="no plan was found that fits")]


def _by_batch(h: History, over: int) -> list[Remedy]:
    """By the straight line. Counts: that all but FIXED is in proportion to the batch. Ignores: fragmentation."""
    grows = sum(n for name, n in h.parts.get("category", {}).items() if name not in FIXED)
    if grows <= over:
        words = "no smaller batch does, since parameters, gradients and optimizer state alone are too large"
        return [Remedy(name="batch", words=words)] if grows else []
    share = 1 - over / grows
    most = "at most " * (h.refused is not None)  # as more would have been asked for later
    words = f"a batch of {most}{show_percent(100 * share, digits=0)} of this one, if memory grows with it"
    return [Remedy(name="batch", words=words, saves_bytes=over, batch_share=share)]
