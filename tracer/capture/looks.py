"""Looks that a model takes at the data of its tensors, where they decide nothing but whether to go on.

Checks (`if not torch.isfinite(x).all(): raise`, `assert labels.max() < n`) and prints of values are no branches: a step
that goes on runs the same ops. `settle` finds out which way each line goes on, by running forward on fake tensors both
ways; a line whose two ways run different ops is a branch, which no capture can hold. In the captured graph the op
`lowtide::look` stands where the model looked: it looks again in every step, and raises where the answer is another.
Counts: answers that are True or False, one for a line. Ignores: what a print would have printed in later steps.

What torch's distributions and one of its losses ask of their arguments is known to be such a check, in the model as in
the loss.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
from torch import distributions, nn
from torch.overrides import TorchFunctionMode

from tracer.step.user_errors import is_data_dependent, is_foreign
from tracer.torch_api import EffectType, TorchDispatchMode, pytree, register_effectful_op
from traces.errors import CaptureError, PlanError

MOST: Final = 64  # lines that look; more are no checks
Line = tuple[str, int]  # file and line
Answers = Mapping[Line, bool | None]  # None: the ops are the same either way, and no step needs to look again
_SETTLED: Final[WeakKeyDictionary[nn.Module, Answers]] = WeakKeyDictionary()

CHECKING: Final = (inspect.getfile(distributions.distribution), inspect.getfile(distributions.constraints))
CHECKED: Final = (nn.functional.gaussian_nll_loss,)
ASKING: Final = (torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.is_nonzero, torch.is_nonzero)


@torch.library.custom_op("lowtide::look", mutates_args=())
def look(x: torch.Tensor, expected: bool, where: str) -> None:
    """Raise if the data is not what it was taken for when the step was captured."""
    if bool(x) != expected:
        raise PlanError(
            f"the model looks at the data of a tensor ({where}), and goes another way than when it was captured: there "
            f"the answer was {expected}. The untouched model raises here; run this batch without the plan to see."
        )


look.register_fake(lambda x, expected, where: None)
register_effectful_op(torch.ops.lowtide.look.default, EffectType.ORDERED)


class _Value:
    """A number that is not known yet: it can be compared, computed with and printed."""

    def __init__(self, x: torch.Tensor, error: Exception, looks: Looks) -> None:
        self.x, self.error, self.looks, self.line = x, error, looks, _line()

    def __bool__(self) -> bool:
        return self.looks.answer(self.x, self.error)

    def __float__(self) -> Any:
        raise self.error

    __int__ = __index__ = __hash__ = __float__

    def __repr__(self, _spec: str = "") -> str:
        return "?"

    __format__ = __repr__

    def __round__(self, digits: int | None = None) -> _Value:
        return self


def _passing_on(name: str) -> Callable[..., _Value]:
    def compute(value: _Value, *others: Any) -> _Value:
        if any(isinstance(o, torch.Tensor) for o in others):
            raise value.error  # it would go into the graph
        plain = [o.x if isinstance(o, _Value) else o for o in others]
        return _Value(getattr(value.x, name)(*plain), value.error, value.looks)

    return compute


for _name in (
    *("lt", "le", "gt", "ge", "eq", "ne", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv"),
    *("neg", "abs", "pow"),
):
    setattr(_Value, f"__{_name}__", _passing_on(f"__{_name}__"))


class Looks(TorchFunctionMode):
    """Answers the model's looks while it is on, and puts a `look` in the graph for each.

    Args:
        answers: by line; a line that is not in it goes on with True.
        refused: a line whose look raises, as it does without this mode.
    """

    def __init__(self, answers: Answers, refused: Line | None = None) -> None:
        super().__init__()
        self.answers, self.refused = answers, refused
        self.asked: list[Line] = []  # in order, each once

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            if func not in ASKING or not is_data_dependent(error):
                raise
            value = _Value(args[0].detach(), error, self)
            return value if func is torch.Tensor.item else bool(value)

    def answer(self, x: torch.Tensor, error: Exception) -> bool:
        """Whether `x` is true on the way that the capture takes; `error` is what asking it raised."""
        line = _line()
        if line == self.refused:
            raise error
        if line not in self.asked:
            self.asked.append(line)
        expected = self.answers.get(line, True)
        if expected is None:
            return False
        torch.ops.lowtide.look(x, expected, f"{line[0]}:{line[1]}")
        return expected


class Checks(TorchFunctionMode):
    """While it is on, what of torch checks its arguments goes on with them. `again`: put a `look` in the graph for each
    check; the loss code, which is not captured, checks again by itself.
    """

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again = again

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__ and sys._getframe(1).f_code.co_filename in CHECKING:
            return self.goes_on(args[0], True)
        with _InOne(self) if func in CHECKED else nullcontext():
            return func(*args, **(kwargs or {}))

    def goes_on(self, x: torch.Tensor, expected: bool) -> bool:
        """The answer to a check with which it goes on."""
        if self.again:
            torch.ops.lowtide.look(x.detach(), expected, "{}:{}".format(*_line()))
        return expected


class _InOne(TorchDispatchMode):
    """While it is on, a function of torch runs that checks whether something is wrong, where no other mode sees it."""

    def __init__(self, checks: Checks) -> None:
        super().__init__()
        self.checks = checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self.checks.goes_on(args[0], False)
        return func(*args, **(kwargs or {}))


def refuse_values(outputs: Iterable[Any]) -> None:
    """Raise CaptureError if a number that is not known yet is among a model's outputs."""
    for x in outputs:
        if isinstance(x, _Value):
            raise CaptureError(
                f"the model cannot be captured: it returns a number that it reads from the data of a tensor (at "
                f"{x.line[0]}:{x.line[1]}); return the tensor, without .item()."
            )


def _line() -> Line:
    """The innermost line outside torch and Lowtide."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


class _Ops(TorchDispatchMode):
    """What ran: each op with its arguments, tensors by the op that made them, and what came out in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []
        # By address: which op, and the tensor to hold it there.
        self._made: dict[int, tuple[int, torch.Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace not in ("lowtide", "prim"):  # prim: fake tensors ask for their own device
            self.ran.append(f"{func} {torch.is_grad_enabled()} {self.named((args, kwargs))}")
            for x in pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor):
                    self._made[id(x)] = len(self.ran), x
        return out

    def named(self, values: Any) -> str:
        """The values in words that are the same in every run on the same tensors."""
        return repr([
            (self._made[id(x)][0] if id(x) in self._made else id(x), x.requires_grad)
            if isinstance(x, torch.Tensor)
            else x
            for x in pytree.tree_leaves(values)
        ])  # fmt: skip


def settle(model: nn.Module, run: Callable[[], object]) -> None:
    """Find out which way each line goes on that looks at data; `looking` answers so from then on.

    Raises:
        Exception: a line is a branch: its two ways run different ops, or one of them needs data that is not there; the
            error is that of its look. Or what forward raises whichever way it goes.
    """
    answers: dict[Line, bool | None] = {}
    while True:
        looks, ops, error = _tried(run, answers)
        if error is None:
            break
        line = looks.asked[-1] if looks.asked else None
        if is_data_dependent(error) or line is None or line in answers or len(looks.asked) > MOST:
            raise error
        answers[line] = False
    forced = set(answers)
    for line in looks.asked:
        answers.setdefault(line, True)
        if line in forced:
            continue
        _, others, error = _tried(run, {**answers, line: False})
        if (error is None and others != ops) or (error is not None and is_data_dependent(error)):
            _, _, asking = _tried(run, answers, refused=line)
            assert asking is not None
            raise asking
        if error is None:
            answers[line] = None
    _SETTLED[model] = answers


def _tried(
    run: Callable[[], object], answers: Answers, refused: Line | None = None
) -> tuple[Looks, list[str], Exception | None]:
    looks, ops = Looks(answers, refused), _Ops()
    try:
        with looks, ops:
            out = run()
        ops.ran.append(ops.named(out))
    except Exception as error:
        return looks, ops.ran, error
    return looks, ops.ran, None


@contextmanager
def looking(model: nn.Module) -> Iterator[None]:
    """The model's looks are answered in the body, once they are settled; before that they raise, as ever, but for those
    of distributions."""
    answers = _SETTLED.get(model)
    with nullcontext() if answers is None else Looks(answers), Checks(again=True):
        yield
