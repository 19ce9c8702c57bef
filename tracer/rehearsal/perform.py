"""The process that runs on the null driver: build the step or run the script, watch it, and answer what it took."""

from __future__ import annotations

import atexit
import os
import pickle
import pkgutil
import runpy
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from tracer.environment import environment
from tracer.rehearsal.peak import innermost
from tracer.rehearsal.record import HOST_READ, Rehearsal, describe
from tracer.rehearsal.watch import Enough, Watch, names, null_driver
from tracer.rehearsal.words import Words
from tracer.step import context
from tracer.step.context import initialisers_without_values
from tracer.step.loop import run_step
from tracer.step.step import load_spec
from tracer.torch_api import FakeTensorMode, replaced
from traces.errors import EnvironmentProblem, LowtideError, SpecError
from traces.files import replacing, to_json
from traces.progress import counted


def do(
    *,
    model: str,
    script: bool,
    arguments: Sequence[str],
    options: Mapping[str, Any],
    seed: int,
    apply: Sequence[str],
    around: Sequence[str],
    shard: Sequence[str],
    iterations: int,
    snapshot: str,
    module: bool = False,
    said: str = "",
    until: str = "",
    **fields: Any,
) -> dict[str, Any]:
    """Rehearse, for a fresh process (`traces.isolated`): see `tracer.rehearsal.run.rehearse` for what is asked; the
    fields are those of the Rehearsal to fill.

    Of a distributed job's rank, `said` is the folder of the ranks' words; in place of figures it answers whose word is
    lacking ("unheard"), or that the one is said for which it ran (`until`).
    """
    most = iterations if script else 0
    out_of_memory = ""
    others: Any = nullcontext()
    local_rank = 0
    far = counted(range(iterations), str)
    next(far)
    if not (ranks := fields.get("ranks", 0)):
        watch = Watch(most_iterations=most, settle=lambda: next(far, None))
    else:
        local_rank = int(os.environ["LOCAL_RANK"])
        from tracer.rehearsal.absent import absent_ranks, finish_pending

        # The threads of NCCL's groups would ask the store while the interpreter ends.
        atexit.register(os._exit, 1)
        words = Words(Path(said), fields["rank"], until)

        def settle() -> None:
            finish_pending()
            next(far, None)

        watch = Watch(most_iterations=most, device=local_rank, settle=settle, words=words)
        others = absent_ranks(fields["rank"], ranks, local_rank, words, null_driver())
    try:
        beside = pkgutil.resolve_name(around[0])(watch, *around[1:]) if around else nullcontext()
        with watch.watching(), initialisers_without_values(), others, beside:
            if script:
                _script(model, arguments, watch, module=module)
            else:
                torch.cuda.set_device(local_rank)
                # To be sharded, it is built with the model on the CPU.
                with replaced(context, placed=lambda *_: None) if shard else nullcontext():
                    step = load_spec(model, dict(options), seed=seed)("cuda")
                if shard:
                    step = pkgutil.resolve_name(shard[0])(step, *shard[1:])
                model_called = pkgutil.resolve_name(apply[0])(step.model, *apply[1:]) if apply else step.model
                # Torch asks for an element when it first makes a fake tensor of a device; not within an iteration.
                with FakeTensorMode():
                    torch.empty(1, device="cuda")
                watch.begin()
                for _ in range(iterations):
                    run_step(step, model_called, step.optimizer)
                    watch.end()
    except torch.cuda.OutOfMemoryError as error:
        out_of_memory = " ".join(str(error).split())
    except LowtideError:
        raise
    except BaseException as error:  # of which torch's own of checkpoints is one
        reads = [describe(w) for w in watch.warnings() if w.code == HOST_READ]
        raise explained(error, model if script else "", reads, ranks, len(watch.iterations)) from error
    if not watch.iterations and not out_of_memory:
        raise SpecError(
            f"{model}: no optimizer of torch.optim made a step, so there is no iteration to look at; name a build "
            "function as FILE.py:build."
        )
    if watch.iterations and not any(i.peaks.allocated_bytes for i in watch.iterations):
        raise SpecError(
            f"{model}: nothing was allocated on GPU {local_rank}; as one of several ranks, call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) first."
        )
    if snapshot:
        with replacing(snapshot) as path:
            path.write_bytes(pickle.dumps(watch.snapshot))
    communicators, taken = watch.communicators()
    alive, at_the_peak = watch.at_the_peak()
    done = Rehearsal(
        **fields,
        model=model,
        environment={k: v for k, v in environment("cuda").items() if k not in ("machine", "threads")},
        iterations=tuple(watch.iterations),
        alive=alive,
        at_the_peak=at_the_peak,
        warnings=watch.warnings(),
        out_of_memory=out_of_memory,
        communicators=communicators,
        communicators_bytes=taken,
        shard=shard[-1] if shard else "",
    )
    return to_json(done)


def _script(model: str, arguments: Sequence[str], watch: Watch, *, module: bool = False) -> None:
    """The user's own script, as `python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS` runs it, for its iterations."""
    path = Path(model).resolve()
    sys.argv = [model, *arguments]
    sys.path.insert(0, os.getcwd() if module else str(path.parent))
    try:
        with redirect_stdout(sys.stderr):
            if module:
                runpy.run_module(model, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(path), run_name="__main__")
    except Enough:
        pass
    except SystemExit as stop:
        if stop.code not in (None, 0) and not watch.iterations:
            raise SpecError(f"{model} ended with {stop.code!r} before an optimizer made a step.") from None


def explained(
    error: BaseException, script: str = "", reads: Sequence[str] = (), ranks: int = 1, steps: int = 0
) -> BaseException:
    """An error with what the null driver lacks or reads were told, which may be the cause; a script's by its line."""
    lacking = names(null_driver().null_missing_names())
    text = " ".join(str(error).split())[:1200]
    if lacking:
        return EnvironmentProblem(
            f"the step asks CUDA for what the null driver has not ({', '.join(lacking)}), and ended with: {text}. "
            "Rehearse a step without it, or measure on a GPU."
        )
    told = f" The rehearsal had answered reads of the GPU's values: {' '.join(reads)}" if reads else ""
    told += " The ranks that are not there were taken to hold what this one holds." if ranks > 1 else ""
    told += f" With --iterations {steps} it ends before that." if steps else ""
    if not script:
        error.add_note(told.strip())
        return error
    traceback.print_exception(error)
    stack = reversed(traceback.extract_tb(error.__traceback__))
    where, _ = innermost((f.filename, f.lineno, f.name) for f in stack)
    return SpecError(f"{script} ended with {type(error).__name__}{where and f' at {where}'}: {text}.{told}")
