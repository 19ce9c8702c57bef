"""Rehearse a training loop: run it in a fresh process on the null driver, and return what torch's allocator did."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tracer.rehearsal.driver import driver_environment, find_cuda_torch
from tracer.rehearsal.jobs import Job
from tracer.rehearsal.record import Rehearsal
from tracer.rehearsal.words import spoken
from traces.devices import CONTEXT_BYTES, Device, device
from traces.errors import LowtideError, SpecError
from traces.files import from_json
from traces.isolated import run_fresh
from traces.model_spec import DEFAULT_FUNCTION, source_file
from traces.processes import ending_with_this
from traces.provenance import ALLOC_CONF
from traces.records import store
from traces.records.measurement import ITERATIONS
from traces.records.trace import Trace

COMMANDS: Final = {"trace": ("-m", "tracer"), "execute": ("-m", "executor"), "python": ()}
OBJECTS: Final = "objects"
TRACE: Final = "trace"
LARGE_BYTES: Final = 1 << 42  # a GPU in which everything fits, to say how much that is


def rehearse(
    model: str,
    gpu: str | Device,
    *,
    options: Mapping[str, Any] | None = None,
    arguments: tuple[str, ...] = (),
    script: bool | None = None,
    apply: tuple[str, ...] = (),
    around: tuple[str, ...] = (),
    shard: tuple[str, ...] = (),
    seed: int = 0,
    iterations: int = ITERATIONS,
    alloc_conf: str = "",
    snapshot: Path | None = None,
    job: Job | None = None,
    rank: int = 0,
    module: bool = False,
    said: str = "",
) -> Rehearsal:
    """Run a training loop on a GPU that is not there, with torch's own CUDA code, and return what memory it took.

    Everything that decides memory is host code and runs for real: autograd, the optimizer, the choice of kernels, the
    caching allocator; cuDNN plans for the GPU that is described to it. Counts: what torch's allocator hands out,
    temporaries inside ops included. Ignores: values (all zeros), times and what is chosen by them (autotuning), the
    buffers that cuFFT, cuSOLVER, cuSPARSE and a batch norm of cuDNN's ask for (counted as empty, with a warning).

    Args:
        model: a name that `trace` knows, "file.py:function", or a script with a training loop of its own.
        gpu: of the device table, as "h100".
        options: of the step (batch_size, optimizer ...), as `tracer.step.step.load_spec` takes them.
        script: whether to run `model` as a script; None: if it is a .py file without a function `build`.
        apply: the "module:function" that applies a plan, which takes the model and returns the one to call, and what
            else it takes: the plan's file.
        around: the "module:function" of a context in which the loop or the script runs; what it takes after the Watch.
        shard: the "module:function" that makes the step of one of several ranks of the step that was built, its model
            on the CPU, and its arguments.
        iterations: how many are run, by default as many as a prediction plays; a script's are optimizer steps.
        alloc_conf: PYTORCH_ALLOC_CONF, unless the environment sets it.
        snapshot: write torch's own memory snapshot here (`simulate replay`, pytorch.org/memory_viz).
        job: of which distributed job the process is rank number `rank`; None: it is started alone. The other ranks are
            not there, and are taken to hold what this one holds (`tracer.rehearsal.absent`).
        module: `model` is a module that is run as a script, as by `python -m`.
        said: a folder for what ranks tell each other, kept for further ranks of the same program.

    If the GPU's memory does not suffice, `out_of_memory` says so, and the figures are those of a GPU with enough.

    Raises:
        EnvironmentProblem: no CUDA build of torch, no C compiler; or the step asks for what the null driver has not,
            which it names.
        SpecError: the model, its options or the GPU mean nothing; a script in which no optimizer steps.
    """
    board = device(gpu) if isinstance(gpu, str) else gpu
    runs_script = module or (is_script(model) if script is None else script)
    itself = shard or module or source_file(model)
    for wrong, why in (
        (runs_script and options, f"it is run as a script, which takes no {', '.join(options or ())}"),
        (runs_script and apply, "a script applies a plan itself (executor.apply_plan); leave --plan out"),
        (not runs_script and arguments, f"it is no script, so nothing takes the arguments {' '.join(arguments)}; "
         "give options, or the script that it starts, with --ranks"),
        (runs_script and shard, "leave --shard out; a script shards its model itself"),
        (shard and not job, "leave --shard out; it belongs to a job of several --ranks"),
        (job and not itself, "it does not shard itself among several ranks; say with --shard how to, or name a .py "
         "file that does"),
    ):  # fmt: skip
        if wrong:
            raise SpecError(f"{model}: {why}.")
    given: dict[str, Any] = {
        "model": model,
        "script": runs_script,
        "arguments": arguments,
        "options": dict(options or {}),
        "seed": seed,
        "apply": apply,
        "around": around,
        "shard": shard,
        "iterations": iterations,
        "snapshot": str(snapshot.absolute()) if snapshot else "",
        "context_bytes": CONTEXT_BYTES,
        "module": module,
        "ranks": job.ranks if job else 0,
    }
    begun: set[int] = set()
    asked: dict[str, str] = {}  # why the rank did not say it

    def perform(there: Device, number: int, word: str = "") -> dict[str, Any]:
        """What one rank answers, for which others are run first, until each has said what this one waits for. A rank
        runs for a word as far as that, and when it is asked again, as far as it gets."""
        until = "" if number in begun else word
        begun.add(number)
        while True:
            answer = run_on_null_driver(
                "tracer.rehearsal.perform:do",
                given
                | {"gpu": there.name, "memory_bytes": there.memory_bytes, "rank": number, "until": until},
                there,
                what=f"rehearsed {model}",
                environment=dict.fromkeys(ALLOC_CONF, alloc_conf) if alloc_conf else None,
                overriding=job.variables(number) if job else None,
                devices=job.local_ranks if job else 1,
                shown=runs_script and number == rank,
            )
            if "unheard" not in answer or word in dict(spoken(Path(given["said"]), number)):
                return answer
            wanted, other = answer["word"], answer["unheard"]
            if wanted in asked:
                raise SpecError(answer["why"] + asked[wanted])
            asked[wanted] = ""
            try:
                perform(there, other, wanted)
            except LowtideError as error:
                asked[wanted] = f" It ended with: {error}"

    def run(there: Device) -> Rehearsal:
        begun.clear()
        asked.clear()
        return from_json(Rehearsal, perform(there, rank))

    with TemporaryDirectory() as own:
        given["said"] = f"{said or own}/{given['ranks']}"
        Path(given["said"]).mkdir(exist_ok=True)
        found = run(board)
        if found.fits:
            return found
        wanted = run(replace(board, memory_bytes=LARGE_BYTES))
    why = found.out_of_memory or "nothing; NCCL found no room when torch had reserved its own"
    return replace(wanted, memory_bytes=board.memory_bytes, out_of_memory=why)


def is_script(model: str) -> bool:
    """Return whether a model is a .py file that is named without a function and defines no `build`."""
    path = source_file(model)
    if path is None or not model.endswith(".py"):
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False  # which building it explains
    return not any(isinstance(n, ast.FunctionDef) and n.name == DEFAULT_FUNCTION for n in tree.body)


def run_on_null_driver(
    function: str,
    arguments: Mapping[str, Any],
    gpu: Device,
    *,
    devices: int = 1,
    overriding: Mapping[str, str] | None = None,
    **how: Any,
) -> dict[str, Any]:
    """Call "module:function" in a fresh process that finds so many of that GPU, as `traces.isolated.run_fresh` does,
    which says what else there is. Raises as that, and EnvironmentProblem: no CUDA build of torch, no C compiler.
    """
    driver = driver_environment(find_cuda_torch(), gpu, devices=devices)
    return run_fresh(function, arguments, overriding={**driver, **(overriding or {})}, **how)


def traced_on_null_driver(
    request: Mapping[str, Any], objects: Any, gpu: Device, say: Callable[[str], None]
) -> Trace:
    """Return what `tracer.trace` records with these arguments, all of them JSON, and objects in hand by name, with
    `device="cuda"` in a fresh process that finds that GPU, with as much memory as it takes. Raises as `trace` does, and
    SpecError: the objects cannot be carried there.
    """
    find_cuda_torch()  # or nothing need be carried
    with TemporaryDirectory() as name:
        folder = Path(name)
        if objects:
            from tracer.rehearsal.objects import save

            save(objects, folder / OBJECTS)
        answer = run_on_null_driver(
            "tracer.api:trace_there",
            {"folder": name, "request": dict(request)},
            replace(gpu, memory_bytes=LARGE_BYTES),
            what=f"rehearsed the step on {gpu.name}",
            overriding={"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        for line in answer["said"]:
            say(line)
        return store.load(folder / TRACE)


def command_on_null_driver(words: Sequence[str], gpu: str, alloc_conf: str = "") -> int:
    """Run a command (one of COMMANDS and its arguments) where that GPU is found, its output not caught; returns its
    exit code. What it says was measured there is told by the GPU's name, which ends in `traces.provenance.ABSENT`.
    `alloc_conf`: PYTORCH_ALLOC_CONF, unless the environment sets it. Raises EnvironmentProblem: no CUDA build of torch,
    no C compiler; SpecError: there is no such GPU.
    """
    driver = driver_environment(find_cuda_torch(), device(gpu))
    settings = dict.fromkeys(ALLOC_CONF, alloc_conf) if alloc_conf else {}
    # It finds the packages where this process found them.
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    command = [sys.executable, *COMMANDS[words[0]], *words[1:]]
    env = {**settings, **os.environ, **driver, "PYTHONPATH": path}
    return subprocess.run(command, env=env, check=False, **ending_with_this()).returncode
