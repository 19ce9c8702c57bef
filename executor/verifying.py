"""Train the untouched model and the planned one side by side from the same seed, and compare everything.

After every step: the loss, every gradient, every parameter, the optimizer's state, every buffer, the state of the
random generators, and the scale of a gradient scaler. Each side keeps its own generator state, so dropout draws the
same numbers on both. Of a loop that frees gradients in backward the untouched side is the ordinary loop, in which one
step of the optimizer is of all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from executor.fitting.gradient_errors import Random, deterministic, relative_error
from executor.training.module import apply_plan
from tracer.precision.policy import scaler_tensors
from tracer.step.loop import run_step
from tracer.step.step import BuildStep
from tracer.torch_api import pytree
from traces.progress import counted
from traces.records.measurement import Verification
from traces.records.plan import APPROXIMATE, EXACT, Plan

NOISE_FACTOR = 10.0
LARGEST_ERROR = 0.2  # of the gradient of an approximate plan that states none, relative L2
ROUNDING = 1e-5  # relative; float32 carries 6e-8, and a gradient sums many rounded terms
LOW_PRECISION = {"bfloat16": 3e-2, "float16": 4e-3}  # four roundings
VARYING = (
    "cuBLAS may vary: set CUBLAS_WORKSPACE_CONFIG=:4096:8 before CUDA begins, or run `execute`, which does"
)
KINDS = ("loss", "gradients", "parameters", "optimizer_state", "buffers", "rng_state")
SCALER = "scaler_state"  # one more kind, where the step has a gradient scaler


class _Side:
    """One of the two training runs, with a random stream of its own."""

    def __init__(self, build: BuildStep, plan: Plan | None, device: str) -> None:
        """By its plan, or (None) untouched."""
        step = self.step = build(device)
        if plan is None:
            self.step = replace(step, loop=replace(step.loop, release_gradients=False))
        self.model = step.model if plan is None else apply_plan(step.model, plan)
        self.device, self.rng = device, Random.now(device)
        self.taken: dict[str, torch.Tensor] = {}  # gradients of a loop that frees them
        for name, p in step.model.named_parameters() if step.loop.release_gradients else ():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(partial(self._take, name))

    def _take(self, name: str, p: torch.Tensor) -> None:
        assert p.grad is not None
        self.taken[name] = p.grad.clone()

    def run(self) -> torch.Tensor:
        self.rng.set()
        loss = run_step(self.step, self.model, self.step.optimizer)
        self.rng = Random.now(self.device)
        return loss

    def tensors(self) -> Iterator[tuple[tuple[str, str], torch.Tensor | None]]:
        """All that training changes, by kind and name."""
        model = self.step.model
        for name, p in model.named_parameters():
            yield ("gradients", name), self.taken.pop(name, p.grad)
            yield ("parameters", name), p.detach()
        for name, b in model.named_buffers():
            yield ("buffers", name), b
        if self.step.optimizer is not None:
            state = self.step.optimizer.state_dict()["state"]
            for path, x in pytree.tree_flatten_with_path(state)[0]:
                if isinstance(x, torch.Tensor):
                    yield ("optimizer_state", pytree.keystr(path)), x
        for name, x in zip(("scale", "growth tracker"), scaler_tensors(self.step.scaler), strict=False):
            yield (SCALER, name), x
        for name, x in self.rng.items():
            yield ("rng_state", name), x


def verify(build: BuildStep, plan: Plan, device: str = "cpu", steps: int = 10) -> Verification:
    """Train both sides, built from one seed, for `steps` steps with deterministic algorithms, and compare.

    Should a bit differ, the question is whether the plan or the machine did it: kernels that share work among threads
    were seen to differ from themselves in the last bit on a busy machine. On the CPU the comparison is then made again
    with one thread, which decides. On CUDA a second untouched model runs as a control, and the plan must stay within
    `NOISE_FACTOR` times its difference (the loss at least to `ROUNDING`).
    """
    outcome = _compare(build, None, plan, device, steps)
    if outcome.bit_equal:
        return outcome
    if plan.exactness != EXACT:
        return _rounded(outcome, plan)
    if not device.startswith("cuda"):
        return _alone(build, plan, device, steps)
    noise = _compare(build, None, None, device, steps)
    if noise.bit_equal:
        return outcome
    of = noise.max_abs_difference
    allowed = {k: NOISE_FACTOR * gap for k, gap in of.items()}
    # One number may agree by chance where all others vary.
    allowed["loss"] = max(allowed["loss"], ROUNDING * max(map(abs, noise.losses)))
    within = all(gap <= allowed[k] for k, gap in outcome.max_abs_difference.items())
    note = f"an untouched model differs from itself by {max(of.values()):.2g}, whose kernels vary"
    return _noted(replace(outcome, equal=within), note)


def _rounded(outcome: Verification, plan: Plan) -> Verification:
    """The verdict on a plan that rounds otherwise: the first step's loss, gradients and buffers agree to rounding, and
    counters and random states in every bit. Later steps carry the difference on."""
    if plan.exactness == APPROXIMATE:
        stated = plan.stated_error
        most = LARGEST_ERROR if stated is None else 2 * stated  # another draw of roundings
        off = outcome.gradient_error
        told = f"the first step's gradient has a relative error of {off:.1e}, of {most:.1e} allowed"
    else:
        low = {plan.meta.dtype, plan.meta.amp} & LOW_PRECISION.keys()
        most, off = max((LOW_PRECISION[t] for t in low), default=ROUNDING), outcome.first_step_relative
        told = (
            f"the first step agrees with the untouched model's to {off:.1e} of the largest gradient, of {most:.0e} "
            "allowed"
        )
    return _noted(replace(outcome, equal=off <= most), f"a plan of the class {plan.exactness}: {told}")


def _noted(outcome: Verification, note: str) -> Verification:
    return replace(outcome, note="; ".join(filter(None, (outcome.note, note))))


def _alone(build: BuildStep, plan: Plan, device: str, steps: int) -> Verification:
    """Compare again on one CPU thread, and tell a wrong plan from a graph that runs other kernels than eager. If
    the plan is bit-equal to the same graph without a plan, the plan is exact, and the graph must agree with eager to
    `ROUNDING` in the first step's loss, gradients and buffers, and in every bit of counters and random states.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        outcome = replace(_compare(build, None, plan, device, steps), note="compared on one CPU thread")
        if outcome.bit_equal or outcome.first_step_relative > ROUNDING:
            return outcome
        if not _compare(build, replace(plan, actions=(), rewrites=()), plan, device, steps).bit_equal:
            return outcome
        return replace(
            outcome,
            equal=True,
            note="bit-equal to the captured graph without a plan, which runs other kernels than eager and agrees with "
            f"it to {outcome.first_step_relative:.1e} in the first step",
        )
    finally:
        torch.set_num_threads(threads)


def _compare(
    build: BuildStep,
    first: Plan | None,
    second: Plan | None,
    device: str,
    steps: int,
    warn_only: bool = False,
) -> Verification:
    """Train two models side by side, each by its plan or (None) untouched, and compare. Kernels without a deterministic
    form are allowed only where the step needs one: where they are, torch's attention on a GPU does not choose its own.
    """
    a, b = _Side(build, first, device), _Side(build, second, device)
    b.rng = a.rng
    try:
        with deterministic(warn_only):
            return _train(a, b, steps)
    except RuntimeError as error:
        if warn_only or "deterministic" not in str(error):
            raise
        note = VARYING if "CUBLAS_WORKSPACE_CONFIG" in str(error) else ""
    del a, b
    return _noted(_compare(build, first, second, device, steps, warn_only=True), note)


def _train(a: _Side, b: _Side, steps: int) -> Verification:
    worst = dict.fromkeys((*KINDS, *((SCALER,) if a.step.scaler is not None else ())), 0.0)
    first, bits = "", True
    largest = dict.fromkeys(("loss", "gradients", "buffers"), 0.0)
    relative = error = 0.0
    losses = []
    for k in counted(range(steps), str):
        left, right = a.run(), b.run()
        losses.append(float(left.detach()))
        pairs = [("loss", "", left.detach(), right.detach())]
        mine, theirs = dict(a.tensors()), dict(b.tensors())
        # What only one side has, such as the optimizer's state of a parameter, is a difference too.
        pairs += [(*key, mine.get(key), theirs.get(key)) for key in {**mine, **theirs}]
        for kind, name, x, y in pairs:
            difference = _difference(x, y)
            bits = bits and not difference and _same_bits(x, y)
            worst[kind] = max(worst[kind], difference)
            if k == 0 and kind in largest and x is not None and x.is_floating_point():
                largest[kind] = max(largest[kind], float(x.abs().max()) if x.numel() else 0.0)
            elif difference > 0 and (kind == "rng_state" or x is None or not x.is_floating_point()):
                relative = float("inf")  # counters and random states are never rounded
            if difference > 0 and not first:
                first = f"step {k + 1}: {kind} {name} differs by {difference:.3g}"
        if k == 0:
            error = relative_error([(x, y) for kind, _, x, y in pairs if kind == "gradients"])
            for kind, size in largest.items():
                if worst[kind] > 0:
                    relative = max(relative, worst[kind] / size if size else float("inf"))
    return Verification(
        equal=not first,
        bit_equal=bits,
        steps=steps,
        max_abs_difference=worst,
        first_difference=first,
        losses=tuple(losses),
        first_step_relative=relative,
        gradient_error=error,
    )


def _same_bits(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
    """Return whether two tensors of one layout hold the same bits: 0 and -0, which are equal, do not."""
    if x is None or y is None:
        return x is y
    return torch.equal(*(v.detach().resolve_conj().reshape(-1).view(torch.uint8) for v in (x, y)))


def _difference(x: torch.Tensor | None, y: torch.Tensor | None) -> float:
    """The largest absolute difference; 0 only if all values are equal or both are NaN; infinite for another layout."""
    if x is None or y is None:
        return 0.0 if x is y else float("inf")
    if x.shape != y.shape or x.dtype != y.dtype:
        return float("inf")
    if torch.equal(x, y):
        return 0.0
    a, b = x.double(), y.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(equal, torch.zeros_like(a), (a - b).abs())
    return float("inf") if bool(gap.isnan().any()) else float(gap.max())
