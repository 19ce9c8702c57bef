"""`simulate replay`: a GPU's recorded allocations through the simulated allocator."""

from __future__ import annotations

from dataclasses import asdict, replace
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import click

from simulator.cli.options import answer_options
from traces.commands import Output, Refused

if TYPE_CHECKING:
    from simulator.allocator.replay import Recording, Replay


@click.command("replay")
@click.argument("recording")
@click.option("--alloc-conf", help="Replay under this PYTORCH_ALLOC_CONF, such as expandable_segments:True.")
@click.option("--device-memory", help="Replay on a device of this size, such as 16GiB.")
@answer_options
def replay_command(recording: str, alloc_conf: str | None, device_memory: str | None, out: Output) -> None:
    """Replay a GPU's recorded allocations through the simulated caching allocator.

    RECORDING is a file of torch.cuda.memory._dump_snapshot(), with a history that begins before the first allocation.
    Nothing in it is executed.

    \b
    simulate replay snapshot.pickle
    simulate replay snapshot.pickle --alloc-conf expandable_segments:True     would that help?
    simulate replay snapshot.pickle --device-memory 16GiB                     would it fit?

    Exit code: 0 done, 1 the replay runs out of memory, 2 the input is wrong.
    """
    from simulator.allocator.device import size_of
    from simulator.allocator.replay import read_recording, replay
    from simulator.allocator.settings import parse_alloc_conf

    # Before any work, so that a bad one is known. They stand for all that was recorded, not on top of it.
    memory_bytes = None if device_memory is None else size_of("--device-memory", device_memory)
    settings = None if alloc_conf is None else parse_alloc_conf(alloc_conf)
    out.say(f"reading {recording}")
    source = read_recording(recording)
    for note in source.notes:
        out.say(f"note: {note}")
    out.say(f"replaying {len(source.events)} events")
    runs = {"replayed": replay(source)}
    if alloc_conf is not None or memory_bytes is not None:
        # Which of equal blocks is taken goes by the version of torch, not by the text.
        other = replace(settings or source.settings, ties=source.settings.ties)
        runs["as_recorded_from_scratch"] = replay(source, source.settings)
        runs["what_if"] = replay(source, other, memory_bytes)
    asked = {"alloc_conf": alloc_conf, "device_memory_bytes": memory_bytes}
    out.show(lambda: {**_answer(source, runs), **asked}, lambda: _text(source, runs))
    if "what_if" in runs and (reason := runs["what_if"].out_of_memory) is not None:
        raise Refused(reason, 1)


def _answer(source: Recording, runs: dict[str, Replay]) -> dict[str, Any]:
    recorded, same = source.peak_reserved_bytes, runs["replayed"]
    error = same.figures.peak_reserved_bytes - recorded
    return {
        "recording": source.source,
        "device": source.device,
        "events": len(source.events),
        "notes": list(source.notes),
        "recorded": {
            "peak_reserved_bytes": recorded,
            "final_reserved_bytes": source.final_reserved_bytes,
            "final_allocated_bytes": source.final_allocated_bytes,
            "segment_requests": len(source.segment_requests),
        },
        "reserved_error_bytes": error,
        "reserved_error_percent": 100 * error / recorded if recorded else None,
        "same_segment_requests": same.segment_requests == source.segment_requests,
        "same_address_percent": 100 * same.same_addresses / max(1, same.allocations),
        "unknown_frees": 0,  # a recording with any is refused
        "microseconds_per_pair": 1e6 * same.seconds / max(1, same.allocations),
    } | {
        name: {
            **{key.replace("block", "allocated"): n for key, n in asdict(run.figures).items()},
            "fragmentation_percent": run.fragmentation_percent,
            "segment_requests": len(run.segment_requests),
            "out_of_memory": run.out_of_memory,
        }
        for name, run in runs.items()
    }


def _text(source: Recording, runs: dict[str, Replay]) -> str:
    from simulator.show.tables import table

    recorded, same = source.peak_reserved_bytes, runs["replayed"]
    rows: list[tuple[Any, ...]] = [("recorded", recorded, None, None, len(source.segment_requests))]
    for name, run in zip(("replayed", "replayed by its own rules", "what if"), runs.values(), strict=False):
        f, asked = run.figures, len(run.segment_requests)
        rows.append((name, f.peak_reserved_bytes, f.peak_block_bytes, run.fragmentation_percent, asked))
    titles = ("", "peak reserved", "peak in blocks", "fragmentation", "new segments")
    kinds = ("", "bytes", "bytes", "share", "count")
    lines = table(rows, [(*c, itemgetter(k)) for k, c in enumerate(zip(titles, kinds, strict=True))]).lines()
    agree = "the same" if same.segment_requests == source.segment_requests else "other"
    lines.append(
        f"Replayed − recorded: {same.figures.peak_reserved_bytes - recorded:+,} bytes reserved; {agree} segment "
        f"requests; {same.same_addresses} of {same.allocations} blocks at the recorded address."
    )
    if len(rows) > 2:
        lines.append(f"What if: {rows[3][1] - rows[2][1]:+,} bytes reserved.")
    return "\n".join(lines)
