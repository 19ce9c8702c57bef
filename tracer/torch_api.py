"""Every private name of torch that Lowtide uses, and the releases of torch in which all of them have been found.

`from tracer.torch_api import FakeTensor` imports the name from where torch has it. Private names move; one that the
installed torch lacks is said by name. `tests/torch/test_torch_api.py` looks for them all.
"""

from __future__ import annotations

import functools
import gc
import pkgutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from traces.errors import EnvironmentProblem

OLDEST: Final = (2, 11)
NEWEST: Final = (2, 15)

P = ParamSpec("P")
R = TypeVar("R")
# Held while torch's functions are replaced and fake tensors stand in a model.
CAPTURING: Final = threading.RLock()


def one_at_a_time(function: Callable[P, R]) -> Callable[P, R]:
    """Let threads take turns in all functions that carry this: a capture changes what torch does in all of them."""

    @functools.wraps(function)
    def taking_turns(*args: P.args, **kwargs: P.kwargs) -> R:
        with CAPTURING:
            return function(*args, **kwargs)

    return taking_turns


@contextmanager
def no_garbage() -> Iterator[None]:
    """No search for garbage while the body imports torch or makes graphs: a million objects, of which none goes."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


# Name here -> where torch has it.
USED: Final = {
    # capture
    "BoxedCodeGen": "torch.fx.graph:_BoxedCodeGen",
    "DispatchKey": "torch._C:DispatchKey",
    "OpOverload": "torch._ops:OpOverload",
    "pytree": "torch.utils._pytree",
    "is_batched": "torch._C:_functorch.is_legacy_batchedtensor",
    "inside_torch_func": "torch._C:_functorch.peek_interpreter_stack",
    # fake tensors
    "DataDependentOutputException": "torch._subclasses.fake_tensor:DataDependentOutputException",
    "DynamicOutputShapeException": "torch._subclasses.fake_tensor:DynamicOutputShapeException",
    "FakeTensor": "torch._subclasses.fake_tensor:FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "detect_fake_mode": "torch._guards:detect_fake_mode",
    "unset_fake_temporarily": "torch._subclasses.fake_tensor:unset_fake_temporarily",
    # autocast
    "DisableAutocast": "torch._C:_DisableAutocast",
    # running and measuring
    "RecordFunctionFast": "torch._C:_profiler._RecordFunctionFast",
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "cuda_memory_snapshot": "torch.cuda.memory:_snapshot",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "when_cuda_begins": "torch.cuda:_lazy_call",
    "is_traceable_wrapper_subclass": "torch.utils._python_dispatch:is_traceable_wrapper_subclass",
    "storage_expired": "torch._C:StorageBase._expired",
    "make_wrapper_subclass": "torch:Tensor._make_wrapper_subclass",
    "execution_engine": "torch.autograd:Variable._execution_engine",
    "preserved_versions": "torch.autograd:_unsafe_preserve_version_counter",
    "current_autograd_node": "torch._C:_current_autograd_node",
    "current_graph_task": "torch._C:_current_graph_task_id",
    "will_execute": "torch._C:_will_engine_execute_node",
    "saved_tensors_hooks": "torch._C:_autograd._top_saved_tensors_default_hooks",
    "disable_current_modes": "torch.utils._python_dispatch:_disable_current_modes",
    # torch's own activation memory budget
    "functorch_config": "torch._functorch.config",
    # torch.compile
    "enter_autocast": "torch.amp.autocast_mode:_enter_autocast",
    "TracingContext": "torch._guards:TracingContext",
    "tracing": "torch._guards:tracing",
    "dynamo_config": "torch._dynamo.config",
    "backend_aot_autograd": "torch._dynamo.backends.common:aot_autograd",
    "choosing_among": "torch._inductor.select_algorithm:add_preprocessing_fn",
    "pad_mm": "torch._inductor.fx_passes.pad_mm",
    # ranks that are not there
    "FakeProcessGroup": "torch._C:_distributed_c10d.FakeProcessGroup",
    "new_process_group_helper": "torch.distributed.distributed_c10d:_new_process_group_helper",
    "default_planner": "torch.distributed.checkpoint.default_planner",
    "process_groups": "torch.distributed.distributed_c10d:_world",
    # modules in which `replaced` puts something else
    "bindings": "torch._C",
    "RandomVariable": "torch._dynamo.variables:RandomVariable",
    "decomposition_table": "torch._decomp:decomposition_table",
    "meta_registrations": "torch._meta_registrations",
}
# Only builds with CUDA have these.
USED_WITH_CUDA: Final = {
    "clear_cublas_workspaces": "torch._C:_cuda_clearCublasWorkspaces",
    "cudnn_batch_norm_reserve_bytes": "torch._C:_get_cudnn_batch_norm_reserve_space_size",
}


def __getattr__(name: str) -> Any:
    where = USED.get(name) or USED_WITH_CUDA.get(name)
    if where is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return pkgutil.resolve_name(where)
    except (ImportError, AttributeError) as error:
        raise _lacks(where) from error


def require_torch() -> None:
    """Raise EnvironmentProblem if torch cannot be imported, or is of a release that Lowtide does not know."""
    try:
        import numpy  # noqa: F401  # before torch, which would swallow a Ctrl-C meanwhile, and go on without it
        import torch  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(
            f"torch cannot be imported ({error}); install it with: pip install 'lowtide[torch]'"
        ) from None
    if not OLDEST <= release() <= NEWEST:
        raise EnvironmentProblem(_unsupported("Lowtide does not know it"))


def release() -> tuple[int, int]:
    """The installed torch's release, as (2, 13)."""
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """In the body, these attributes of a module, class or object have other values. Raises EnvironmentProblem if it has
    no such attribute in the installed torch.
    """
    if (lacks := next((name for name in values if not hasattr(owner, name)), None)) is not None:
        raise _lacks(f"{owner.__name__}:{lacks}")
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:  # a class inherits it
                delattr(owner, name)


def _lacks(where: str) -> EnvironmentProblem:
    return EnvironmentProblem(_unsupported(f"it has no {where.replace(':', '.')}, which Lowtide needs"))


def _unsupported(reason: str) -> str:
    import torch

    oldest, newest = (".".join(map(str, r)) for r in (OLDEST, NEWEST))
    return (
        f"torch {torch.__version__} cannot be used: {reason}. Install one of {oldest} to {newest}, with the "
        "torchvision that belongs to it: pip install 'lowtide[torch]'"
    )
