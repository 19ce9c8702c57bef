"""Refuse, in words, what no capture of a training step can hold, before torch fails on it in words of its own."""

from __future__ import annotations

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Final

import torch
from torch import fx, nn

from tracer.step.loop import TrainingStep
from tracer.step.release import needs_closure
from tracer.step.user_errors import explain, first_line, is_data_dependent, is_library, on_data, user_line
from tracer.torch_api import TracingContext
from traces.errors import CaptureError, LowtideError, OptimizerError

BATCH_NORM: Final = nn.functional.batch_norm
DYNAMO: Final = "torch._dynamo"  # whose own errors are no causes
# How torch.compile says in other errors that it failed: what a weak proxy of the model leads to; a TorchDispatchMode
# around the call.
FAILED: Final = (
    "Guard failed on the same frame",
    "torch.compile with fullgraph=True found no compiled frames",
)
ASKS: Final = {"is_compiling", "is_dynamo_compiling"}  # of torch.compiler


def check_capturable(model: nn.Module) -> None:
    """Raise CaptureError for a model that is compiled or scripted, wholly or in part, has blocks of FSDP2, or holds
    what is not dense."""
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        if x.layout != torch.strided:
            kind = "parameter" if isinstance(x, nn.Parameter) else "buffer"
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its {kind} {name} has the layout {x.layout}, whose size "
                "depends on data. Only dense tensors can be planned; keep indices and values as two dense tensors "
                "(torch.Tensor.index_add adds up rows by index), or take .to_dense()."
            )
    if [n for n, _ in nn.Module.named_parameters(model)] != [n for n, _ in model.named_parameters()]:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its named_parameters is its own and leaves some out, so that "
            "nobody knows what there is to plan for; give the optimizer the parameters that it is to see instead."
        )
    check_sharded(model)
    for path, module in model.named_modules():
        where = f"its module {path}" if path else "it"
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {where} was compiled by torch.compile, or has a plan "
                "already, and no plan reaches into that. Leave torch.compile out (it compiled model._orig_mod), or "
                "remove_plan(model) first."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: {where} is a TorchScript module, whose code is not "
                "Python's. Use the module that was scripted."
            )


def check_sharded(model: nn.Module) -> None:
    """Raise CaptureError for a model with blocks of FSDP2."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without which nothing is sharded
    for path, module in model.named_modules():
        if path and fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise CaptureError(
                f"a plan of a model cannot hold blocks that fully_shard shards by themselves ({path}): parameters of "
                "theirs come and go while forward runs. Give each block a plan of its own, "
                "fully_shard(apply_plan(block, plan)), or shard the planned model as one."
            )


def check_step(step: TrainingStep) -> None:
    """Raise CaptureError for a step that the ordinary loop cannot run."""
    check_capturable(step.model)
    for x in step.tensors():
        if x.layout != torch.strided:
            raise CaptureError(
                f"{step.name}: the batch holds a tensor of the layout {x.layout}, whose size depends on data. Only "
                "dense tensors can be planned; give its indices and values as two dense tensors."
            )
    if step.optimizer is not None and needs_closure(step.optimizer):
        raise OptimizerError(
            f"{step.name}: {type(step.optimizer).__name__} runs forward and backward itself, as often as it likes, "
            "through a closure; a trace is of one forward, one backward and one step. Use another optimizer, or plan "
            "without it (optimizer=None) and leave room for its state."
        )


@contextlib.contextmanager
def in_words(model: nn.Module, hint: str = ".", *, runs: bool = False) -> Iterator[None]:
    """Errors of a capture in the body name the user's line. `hint`: as `refusal` has it; `runs`: what was captured runs
    there, too, and what that raises stays as it is.
    """
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith(DYNAMO) or str(error).startswith(FAILED):
            raise refusal(model, error, hint) from error
        if runs or isinstance(error, LowtideError):
            raise
        raise explain(error, type(model).__name__) from error


def refusal(model: nn.Module, error: Exception, hint: str = ".") -> LowtideError:
    """Why torch.compile captured no graph of a call of the model, in our own words; `hint`: what else helps, as the
    sentence ends. Raises CaptureError: FSDP2 shards blocks of the model.
    """
    check_sharded(model)
    name = type(model).__name__
    inner = getattr(error, "inner_exception", error)  # of a backend, which torch.compile wraps
    if isinstance(inner, LowtideError):
        return inner
    where = user_line(getattr(inner, "real_stack", None) or traceback.StackSummary())
    if is_data_dependent(inner):
        return on_data(name, "Python looks at the data of a tensor", where, hint)
    cause = inner.__cause__
    if isinstance(cause, Exception) and not type(cause).__module__.startswith(DYNAMO):
        told = f"{type(cause).__name__}: {first_line(cause)}"
    else:
        explained = re.search(r"(?:Explanation|Skipped frames:\s+- .*\)): (.+)", str(inner))
        told = explained[1].rstrip(".") if explained else first_line(inner)
    return CaptureError(
        f"{name} cannot be captured by torch.compile: {told}{where}. Mend that line, or leave what it is in out of the "
        f"planned module{hint}"
    )


def raised_by_user(error: LowtideError) -> bool:
    """Return whether the user's own code raised while it was captured, and will do so if it is run."""
    return any(told in str(error) for told in ("found no exception handler", "run FX node with fake tensors"))


def check_graph(module: fx.GraphModule) -> None:
    """Raise CaptureError for what dynamo captures and no plan can hold: an op whose result has a shape, or is a number,
    that is data; a batch norm that `torch.utils.checkpoint` runs twice, and so updates its statistics twice; a question
    of the user's own whether the code is compiled."""
    for code in TracingContext.get_traced_code() or ():
        if not ASKS.isdisjoint(code.co_names) and not is_library(code.co_filename):  # which answers for both
            raise CaptureError(
                f"the model asks torch whether it is compiled ({code.co_filename}:{code.co_firstlineno}, in "
                f"{code.co_name}), and may be another model then than the one that trains in eager. Leave the question "
                "out."
            )
    for n in module.graph.nodes:
        frames = re.findall(r'File "(.*)", line (\d+), in (.*)\n +(.*)', n.meta.get("stack_trace") or "")
        stack = [traceback.FrameSummary(f, int(k), name, line=line) for f, k, name, line in frames]
        where = user_line(traceback.StackSummary.from_list(stack))
        if n.meta.get("unbacked_bindings"):
            op = getattr(n.target, "__name__", n.target)
            what = f"what {op} gives has a shape that depends on data, or is a number of them"
            raise on_data("the model", what, where)
        if getattr(n.target, "__name__", "") == "tag_activation_checkpoint":
            body = getattr(module, n.args[0].target).graph.find_nodes(op="call_function", target=BATCH_NORM)
            if any(
                norm.kwargs.get("training", norm.args[5] if len(norm.args) > 5 else False) for norm in body
            ):
                raise CaptureError(
                    f"the model cannot be captured: a batch norm runs inside torch.utils.checkpoint{where}, which runs "
                    "it twice a step and so updates its running statistics twice; a plan's recomputation updates them "
                    "once. Leave the model's own checkpointing out (in torchvision: memory_efficient=False); a plan "
                    "takes its place."
                )
