"""Find what a model's name, or a path to the user's own build function, stands for, and build its training step.

`load_spec` only checks what it can check cheaply. The `BuildStep` that it returns makes the model, the batch,
the loss and the optimizer each time it is called: on real memory, or, called under a `FakeTensorMode`, without
allocating anything.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tracer.precision.policy import FLOAT16, Autocast
from tracer.step.loop_options import LOOP_OPTIONS, Loop, parse_around
from traces.errors import SpecError
from traces.model_spec import IN_HAND, split_reference

if TYPE_CHECKING:
    from tracer.step.loop import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStep:
    """Builds the training step that a spec stands for; equal calls build equal steps."""

    model: str
    options: dict[str, Any]
    seed: int
    make: Callable[[str], TrainingStep]  # device -> step
    policy: dict[str, Any] = field(default_factory=dict)  # of `options`, those of `tracer.step.loop_options`

    def __call__(self, device: str = "cpu", *, optimizer_as_on: str = "") -> TrainingStep:
        """Build the step on a device, from the same seed every time. `optimizer_as_on`: "cuda" makes an optimizer that
        leaves the choice to torch take the path that torch would choose on a GPU (foreach), also on CPU tensors.

        Raises SpecError: the spec or what the user's function returned does not make sense; CaptureError: the model
        cannot be built on fake tensors; EnvironmentProblem: torch, torchvision or transformers is missing, or there is
        no such device; OutOfMemoryProblem: its memory does not suffice.
        """
        import torch

        from tracer.step.context import is_fake
        from tracer.step.release import check_release
        from tracer.step.user_errors import built

        check_device(device)
        # Without a number torch refuses it; the current one is meant.
        if device.startswith("cuda:") and not is_fake():
            # What asks for the GPU's name, memory, generator or events then asks this one.
            torch.cuda.set_device(device)
        # torch's own function would seed a GPU that this step does not touch, too.
        seed = torch.manual_seed if device.startswith("cuda") else torch.default_generator.manual_seed
        with built(self.model):
            random.seed(self.seed)
            seed(self.seed)
            step, policy, kind = self.make(device), self.policy, device.partition(":")[0]
            # As the options say, or where they say nothing, as its build function asks.
            dtype = policy.get("amp") or step.autocast.dtype
            scaler = torch.amp.GradScaler(kind) if dtype == FLOAT16 else None
            loop = Loop(**{k: policy[k] for k in LOOP_OPTIONS if k in policy})
            if loop.release_gradients:
                check_release(step.name, step.optimizer, scaler)
            autocast = Autocast(dtype=dtype, kind=kind, cache=torch.is_autocast_cache_enabled())
            options = {**step.options, **policy}
            step = replace(step, autocast=autocast, scaler=scaler, options=options, loop=loop)
        if step.optimizer is not None and optimizer_as_on == "cuda":
            from tracer.step.optimizers import choose_as_on_cuda

            choose_as_on_cuda(step.optimizer)
        return step


def load_spec(model: str, options: dict[str, Any] | None = None, *, seed: int = 0) -> BuildStep:
    """Find out what `model` stands for and check the options.

    Args:
        model: a name that `tracer.step.named.models.list_models` lists, or "path/to/file.py:function"
            (without ":function" the function is `build`).
        options: those of `tracer.api.Options`, optimizer and amp; None as a value means "not given". A user's
            function gets those that its signature names.

    Raises SpecError: unknown name or option, missing file; EnvironmentProblem: torch is not installed.
    """
    from tracer.torch_api import require_torch

    require_torch()
    if model.startswith(IN_HAND):
        raise SpecError(
            f"this is of a model that was in hand when it was traced ({model.removeprefix(IN_HAND)}), and nothing "
            "says how to build it again; apply its plan to the model itself: executor.apply_plan(model, plan)."
        )
    given = {k: v for k, v in (options or {}).items() if v is not None}
    policy = parse_around(given)
    given |= policy
    if split_reference(model):
        from tracer.step.build_function import BuildFunction

        step, own = BuildFunction.parse(model).step, given
    else:
        from tracer.step.named.models import find_model

        known = find_model(model)
        own = known.options({k: v for k, v in given.items() if k not in policy})
        model, step = known.name, known.step
    whole = {**own, **policy}
    return BuildStep(model=model, options=whole, seed=seed, make=partial(step, own), policy=policy)


def check_device(device: str) -> None:
    """Raise EnvironmentProblem if this machine lacks the device, SpecError if there is no such kind.

    A fake CUDA device needs a torch that was built with CUDA, a real one needs a GPU as well.
    """
    from tracer.torch_api import require_torch

    require_torch()
    import torch

    from tracer.step.context import is_fake
    from traces.errors import EnvironmentProblem

    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise SpecError(f"device {device!r} is neither cpu nor cuda (nor, of several GPUs, cuda:1).")
    if device == "cpu":
        return
    if torch.version.cuda is None:
        raise EnvironmentProblem(
            f"--device {device}: this torch ({torch.__version__}) was built without CUDA; install one with "
            "CUDA, or trace with --target for that GPU on fake CPU tensors."
        )
    if is_fake():
        return
    if not torch.cuda.is_available():
        raise EnvironmentProblem(f"--device {device}: no GPU was found; use --device cpu.")
    if (count := torch.cuda.device_count()) <= int(found[1] or 0):
        raise EnvironmentProblem(f"--device {device}: this machine has {count} GPU(s), counted from cuda:0.")
