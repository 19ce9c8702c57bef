"""What a forward does beside computing its outputs: state that it changes, seeds, Python's randomness, hooks.

A captured step runs the graph and nothing else. So what else the Python code did is found while it is captured, and
undone, so that every pass of a capture starts from the same state and leaves nothing in the user's objects:

- a buffer that forward puts another tensor in becomes a write into the buffer, an op of the graph;
- an attribute that forward sets to what does not depend on what it was (a shape, say) is noted in `Effects.writes`, for
  whoever runs the graph to set it again;
- anything else is refused, with the line.

Counts: attributes of the modules and of their classes, containers and configurations that hang on them, what a loss
function that is captured with its model names outside of itself, what the hooks
of modules and tensors hold, the generators of torch, Python and NumPy. Ignores: other globals, files, prints; weights
that torch's own hooks derive from others at every call, which a planned step leaves as they were.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from tracer.step.joined import WithLoss, around
from tracer.step.user_errors import user_line
from tracer.torch_api import pytree, replaced
from traces.errors import CaptureError

SEED: Final = 0x10_71DE  # what torch's generator is seeded with while a model is captured
CONTAINERS: Final = (list, dict, set, deque)
LONGEST: Final = 4_096  # elements of a container that is copied
# What torch's recurrent layers hold of their parameters.
REFERENCES: Final = ("_flat_weights", "_flat_weight_refs")
# A weight that torch's hooks (weight norm, spectral norm, pruning) make of others right before it is used.
DERIVED: Final = "derived"
_UTILITIES: Final = str(Path(nn.utils.__file__).parent)
SLOTS: Final = ("_parameters", "_buffers", "_modules")
HOOKS: Final = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Whose hooks do what they do within one call of the model, as long as they hold nothing afterwards.
FRAMEWORKS: Final = (
    "transformers",
    "diffusers",
    "timm",
    "peft",
    "accelerate",
    "lightning",
    "pytorch_lightning",
)

Write = tuple[str, str, Any]  # (module, attribute, value)


@dataclass(slots=True)
class Effects:
    """What the passes of one capture found."""

    writes: tuple[Write, ...] = ()
    read: set[tuple[int, str]] = field(default_factory=set)  # attributes that were read before they were set
    numbers: dict[tuple[int, str], str] = field(default_factory=dict)  # numbers that changed, and where


@contextlib.contextmanager
def nothing_changed(model: nn.Module) -> Iterator[None]:
    """Around a capture: torch's generator is seeded in it, and the model's own hooks are away; both are as they were at
    its end."""
    generator = torch.default_generator
    state = generator.get_state()
    try:
        with own_hooks_off(model):
            yield
    finally:
        generator.set_state(state)


@contextlib.contextmanager
def own_hooks_off(model: nn.Module) -> Iterator[None]:
    """The model's own hooks run around every planned call, and so must not be captured; those of submodules are."""
    own = {k: v for k, v in vars(model).items() if k.startswith(("_forward_", "_backward_")) and "hooks" in k}
    vars(model).update({k: type(v)() for k, v in own.items()})
    try:
        yield
    finally:
        vars(model).update(own)


def run_watched(model: nn.Module, run: Callable[[], Any], effects: Effects) -> Any:
    """Run a model's forward in a capture, and undo and note what it does to the objects around it. Raises CaptureError
    if it does what a graph cannot hold; names the attribute or the function, and the line.
    """
    before = _Before(model)
    lines: dict[tuple[int, str], str] = {}
    torch.default_generator.manual_seed(SEED)
    drawn = _python_state()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_lines_noted(model, lines))
            stack.enter_context(_hooks_watched(model))
            for key in effects.numbers:
                before.watch(key, effects, stack)
            outputs = run()
        before.write_buffers(lines)
        effects.writes = before.writes(lines, effects)
    finally:
        before.put_back()
    if torch.default_generator.initial_seed() != SEED:
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: its forward seeds torch's generator (torch.manual_seed, "
            f"torch.seed or torch.set_rng_state){_where(run, torch.default_generator.initial_seed)}, and a planned "
            "step does not. Seed outside of forward."
        )
    for name, (ask, before_forward) in drawn.items():
        if ask() != before_forward:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its forward draws from the randomness of {name}"
                f"{_where(run, ask)}, as LayerDrop does, so every step may be another graph. Leave it out "
                "(layerdrop=0), or draw with torch and choose with torch.where."
            )
    return outputs


def plain_tensors(model: nn.Module) -> list[str]:
    """The names of tensors that hang on a model's modules and are neither parameters nor buffers."""

    def holds(value: Any) -> bool:
        values = value.values() if isinstance(value, dict) else value
        return isinstance(value, torch.Tensor) or (
            isinstance(value, (*CONTAINERS, tuple)) and any(map(holds, values))
        )

    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in (*SLOTS, *REFERENCES) and holds(value)
    ]


def check_constants(model: nn.Module, graph_module: torch.fx.GraphModule) -> None:
    """Raise CaptureError for a tensor that should be trained and is a constant to the graph."""
    for n in graph_module.graph.find_nodes(op="get_attr"):
        x = getattr(graph_module, str(n.target), None)
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its forward uses a tensor of the shape {tuple(x.shape)} "
                "that requires a gradient and is no parameter of the model (a parameter or module in a list, say), so "
                "it would get none. Register it (nn.Parameter, nn.ModuleList), or give it requires_grad_(False)."
            )


def check_effects(model: nn.Module, effects: Effects) -> None:
    """Raise CaptureError, at the end of a capture, for numbers that forward counts in its attributes."""
    for key, where in effects.numbers.items():
        if key in effects.read:
            raise CaptureError(
                f"{type(model).__name__} cannot be captured: its forward counts in {where}, and a planned step does "
                "not run that code again. Count outside of forward, or in a buffer of torch (register_buffer)."
            )


# Attributes


class _Before:
    """The state of a model's objects before its forward ran: what to compare with, and to put back."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {id(m): path for path, m in model.named_modules()}
        self.modules = dict(model.named_modules())
        self.own = {path: dict(vars(m)) for path, m in self.modules.items()}
        self.slots = {path: {k: dict(vars(m)[k]) for k in SLOTS} for path, m in self.modules.items()}
        self.containers: dict[int, tuple[str, Any, Any]] = {}
        for path, attributes in self.own.items():
            for name, value in attributes.items():
                if name not in (*SLOTS, *REFERENCES) and not name.endswith("_hooks"):
                    self._copy(_named(name, path), value, 0)
        self.around: dict[str, Any] = model.around() if isinstance(model, WithLoss) else {}
        for name, value in self.around.items():
            self._copy(name, value, 0)
        named = around(*(type(m).forward for m in self.modules.values()))
        self.shared = [
            (name, value, _shallow(value))
            for name, value in named.items()
            if isinstance(value, CONTAINERS) and len(value) <= LONGEST and id(value) not in self.containers
        ]
        self.classes = {
            c: dict(vars(c))
            for m in self.modules.values()
            for c in type(m).__mro__
            if not c.__module__.startswith(("torch.", "builtins"))
        }

    def _copy(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module | torch.Tensor | type) or id(value) in self.containers or depth > 2:
            return
        if isinstance(value, CONTAINERS) and len(value) <= LONGEST:
            self.containers[id(value)] = name, value, _shallow(value)
            for x in list(value.values()) if isinstance(value, dict) else list(value):
                self._copy(name, x, depth + 1)
        elif _configuration(value):
            self.containers[id(vars(value))] = name, vars(value), dict(vars(value))
            for k, x in list(vars(value).items()):
                self._copy(f"{name}.{k}", x, depth + 1)

    def write_buffers(self, lines: dict[tuple[int, str], str]) -> None:
        """Make writes into buffers of what forward put in their places."""
        for path, module in self.modules.items():
            for kind, before in self.slots[path].items():
                for name, now in vars(module)[kind].items():
                    if now is before.get(name):
                        continue
                    what = _named(name, path) + lines.get((id(module), name), "")
                    old = before.get(name)
                    if kind != "_buffers" or old is None:
                        noun = kind[1:-1]
                        raise self._refused(
                            f"makes or replaces the {noun} {what} (by self.register_{noun} or by setting it), "
                            "which a graph cannot. Call the model once before it is traced, or make it in __init__"
                        )
                    if not isinstance(now, torch.Tensor) or now.shape != old.shape or now.dtype != old.dtype:
                        raise self._refused(f"puts something of another shape or type in the buffer {what}")
                    if now.requires_grad:
                        raise self._refused(
                            f"puts a tensor with its gradient's graph in the buffer {what}, which would grow "
                            "from step to step; detach it"
                        )
                    with torch.no_grad():
                        old.copy_(now)

    def writes(self, lines: dict[tuple[int, str], str], effects: Effects) -> tuple[Write, ...]:
        """The attributes that forward set and that can be set again without it."""
        found: list[Write] = []
        for path, module in self.modules.items():
            before, now = self.own[path], vars(module)
            for name in {**before, **now}:
                old, new = before.get(name, _NONE), now.get(name, _NONE)
                if new is old or name in REFERENCES or _equal(old, new):
                    continue
                if lines.get((id(module), name)) is DERIVED:
                    continue
                what = _named(name, path) + lines.get((id(module), name), "")
                if not _settable(new):
                    raise self._refused(
                        f"leaves what it computed, or another object of its own, in {what}. A planned step does not "
                        "set it; return it from forward, or keep it in a local variable"
                    )
                if _number(old) and _number(new):
                    effects.numbers.setdefault((id(module), name), what)
                found.append((path, name, new))
        for name, container, copy in self.containers.values():
            if not _same_items(container, copy) and not _filled_in(container, copy):
                raise self._refused(
                    f"changes what {name} holds. A planned step does not run that code again; return it from forward"
                )
        self._check_left()
        for name, value in self.model.around().items() if isinstance(self.model, WithLoss) else ():
            if self.around.get(name) is not value and not _equal(self.around.get(name), value):
                raise self._refused(f"changes {name}, and a planned step does not run that code again")
        for kind, attributes in self.classes.items():
            for name, value in vars(kind).items():
                if name in attributes and value is not attributes[name] and _settable(value):
                    raise self._refused(
                        f"changes the attribute {name} of the class {kind.__name__}; keep it out of forward"
                    )
        return tuple(found)

    def _check_left(self) -> None:
        """Refuse tensors that forward left in containers of nobody in the model."""
        for name, container, copy in self.shared:
            if _tensors_of(container) - _tensors_of(copy):
                raise self._refused(
                    f"leaves what it computed in {name}. A planned step does not run that code again; return it from "
                    "forward"
                )

    def watch(self, key: tuple[int, str], effects: Effects, stack: contextlib.ExitStack) -> None:
        """Note whether forward reads an attribute before it sets it."""
        module = next(m for m in self.modules.values() if id(m) == key[0])
        was_set: list[Any] = []

        def read(owner: Any) -> None:
            if owner is module and module not in was_set:
                effects.read.add(key)

        if not reads_seen(type(module), key[1], stack, read, was_set.append):
            effects.read.add(key)  # or so it must be taken

    def put_back(self) -> None:
        for path, module in self.modules.items():
            own = self.own[path]
            for now, then in (*((own[k], x) for k, x in self.slots[path].items()), (vars(module), own)):
                if len(now) != len(then) or any(now.get(k, _NONE) is not x for k, x in then.items()):
                    _refill(now, then)
        for _, container, copy in self.containers.values():
            if not _same_items(container, copy):
                _refill(container, copy)
        for _, container, copy in self.shared:
            if _tensors_of(container) - _tensors_of(copy):
                _refill(container, copy)
        for owner, attributes in self.classes.items():
            for name, value in vars(owner).copy().items():
                if _settable(value) and attributes.get(name, value) is not value:
                    setattr(owner, name, attributes[name])

    def _refused(self, what: str) -> CaptureError:
        return CaptureError(f"{type(self.model).__name__} cannot be captured: its forward {what}.")


_NONE: Final = object()


def _named(attribute: str, path: str) -> str:
    return f"self.{attribute} of {path}" if path else f"self.{attribute}"


def reads_seen(
    kind: type,
    name: str,
    stack: contextlib.ExitStack,
    read: Callable[[Any], object],
    put: Callable[[Any], object] = lambda owner: None,
) -> bool:
    """See every read of an attribute, of any object of a class, until the stack is closed.

    Args:
        read, put: told whose attribute is about to be read, and whose was set.

    Returns:
        Whether that can be: the class has no such attribute of its own, and takes one.
    """
    if any(name in vars(c) for c in kind.__mro__):
        return False
    try:
        setattr(kind, name, _Seen(name, read, put))
    except TypeError:  # a class whose attributes cannot be set
        return False
    stack.callback(delattr, kind, name)
    return True


class _Seen:
    """Stands for an attribute in its class, and says when it is read or set."""

    def __init__(self, name: str, read: Callable[[Any], object], put: Callable[[Any], object]) -> None:
        self.name, self.read, self.put = name, read, put

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        self.read(owner)
        try:
            return vars(owner)[self.name]
        except (KeyError, TypeError):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}") from None

    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)[self.name] = value
        self.put(owner)

    def __delete__(self, owner: Any) -> None:
        del vars(owner)[self.name]


def _configuration(value: Any) -> bool:
    """Whether an object is read by its attributes, as a configuration is."""
    return hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in (
        "torch", "builtins", "functools", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate",
    )  # fmt: skip


def _shallow(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else set(value) if isinstance(value, set) else list(value)


def _tensors_of(container: Any) -> set[int]:
    """The ids of the tensors that a container holds."""
    items = list(container.values()) if isinstance(container, dict) else list(container)
    return {id(x) for x in pytree.tree_leaves(items) if isinstance(x, torch.Tensor)}


def _same_items(container: Any, copy: Any) -> bool:
    if len(container) != len(copy):
        return False
    if isinstance(container, set):
        return bool(container == copy)
    if isinstance(container, dict):
        return all(k in container and (container[k] is x or _equal(container[k], x)) for k, x in copy.items())
    return all(a is b or _equal(a, b) for a, b in zip(container, copy, strict=True))


def _filled_in(container: Any, copy: Any) -> bool:
    """Whether words stand now where nothing stood, and all else is as it was: transformers' losses note in the model's
    configuration, once, which kind of problem it is (`problem_type` in loss/loss_utils.py)."""
    if not isinstance(container, dict) or container.keys() != copy.keys():
        return False
    return all(
        container[k] is x or _equal(container[k], x) or (x is None and isinstance(container[k], str))
        for k, x in copy.items()
    )


def _refill(container: Any, copy: Any) -> None:
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(copy)


def _settable(value: Any) -> bool:
    """Whether a value is data that says all of itself: a scalar, or a tuple, list or dict of such."""
    if isinstance(value, tuple | list | dict):
        return all(map(_settable, value.values() if isinstance(value, dict) else value))
    return value is None or isinstance(
        value, int | float | complex | str | bytes | torch.dtype | torch.device
    )


def _equal(a: Any, b: Any) -> bool:
    return type(a) is type(b) and _settable(a) and _settable(b) and bool(a == b)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@contextlib.contextmanager
def _lines_noted(model: nn.Module, lines: dict[tuple[int, str], str]) -> Iterator[None]:
    """Note the line at which an attribute of one of the model's modules is set last."""
    put = nn.Module.__setattr__

    def noted(self: nn.Module, name: str, value: Any) -> None:
        derived = sys._getframe(1).f_code.co_filename.startswith(_UTILITIES)
        lines[id(self), name] = DERIVED if derived else user_line(traceback.extract_stack())
        put(self, name, value)

    kinds = {type(m) for m in model.modules()}
    # Python tells all subclasses of a class that changes, and nn.Module has thousands where libraries are imported.
    if nn.Module in kinds or any(kind.__setattr__ is not put for kind in kinds):
        with replaced(nn.Module, __setattr__=noted):
            yield
        return
    try:
        for kind in kinds:
            kind.__setattr__ = noted  # type: ignore[assignment]
        yield
    finally:
        for kind in kinds:
            if "__setattr__" in vars(kind):
                del kind.__setattr__


# Randomness


def _python_state() -> dict[str, tuple[Callable[[], Any], Any]]:
    """The generators of Python and NumPy: how to ask for their states, and these now."""
    asked: dict[str, Callable[[], Any]] = {"Python (the module random)": random.getstate}
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state
        asked["NumPy (numpy.random)"] = lambda: (state()[2], state()[1].tobytes())
    return {name: (ask, ask()) for name, ask in asked.items()}


def _where(run: Callable[[], Any], asked: Callable[[], Any]) -> str:
    """The line of a forward that changes what `asked` tells, by running it again; "" where none is found."""
    torch.default_generator.manual_seed(SEED)
    before = asked()
    lines: list[str] = []

    def look(frame: Any, _event: str, _arg: Any) -> None:
        if not lines and asked() != before:
            sys.setprofile(None)
            lines.append(
                user_line(traceback.StackSummary.extract(reversed(list(traceback.walk_stack(frame)))))
            )

    profile = sys.getprofile()
    sys.setprofile(look)
    try:
        with contextlib.suppress(Exception):
            run()
    finally:
        sys.setprofile(profile)
    return lines[0] if lines else ""


# Hooks


@contextlib.contextmanager
def _hooks_watched(model: nn.Module) -> Iterator[None]:
    """Hooks run in the body, and those that do something beside changing what passes through are refused."""
    owners = [(f"the module {path}" if path else "the model", vars(m)) for path, m in model.named_modules()]
    registry = vars(nn.modules.module)
    owners.append(("every module", {k: registry[f"_global{k}"] for k in HOOKS if f"_global{k}" in registry}))
    put: list[tuple[dict[Any, Any], Any, Any]] = []
    register = torch.Tensor.register_hook

    def registered(x: torch.Tensor, hook: Any) -> Any:
        return register(x, hook if _package(hook) == "torch" else _watched(hook, "a tensor in forward"))

    try:
        for owner, attributes in owners:
            for hooks in (attributes[k] for k in HOOKS if k in attributes):
                for number, hook in list(hooks.items()):
                    if _package(hook) != "torch" and not getattr(hook, "_lowtide_scope", False):
                        put.append((hooks, number, hook))
                        hooks[number] = _watched(hook, owner)
        with replaced(torch.Tensor, register_hook=registered):
            yield
    finally:
        for hooks, number, hook in put:
            if number in hooks:
                hooks[number] = hook


def _watched(hook: Any, owner: str) -> Callable[..., Any]:
    @functools.wraps(hook, assigned=(), updated=())
    def run(*args: Any, **kwargs: Any) -> Any:
        held = [(x, _shallow(x)) for x in _held(hook)]
        out = hook(*args, **kwargs)
        changed = [(x, copy) for x, copy in held if not _same_items(x, copy)]
        for x, copy in changed:
            _refill(x, copy)
        if changed or (out is None and _package(hook) not in FRAMEWORKS):
            code = getattr(hook, "__code__", None)
            line = f" (at {code.co_filename}:{code.co_firstlineno})" if code else ""
            does = (
                "changes what it holds" if changed else "returns nothing, so it is there for something else"
            )
            raise CaptureError(
                f"the hook {getattr(hook, '__qualname__', hook)} of {owner}{line} {does}, and in a planned step no "
                "hook of a part of the model runs. Remove it while the plan trains, return from forward what it "
                "stores, or register it on the whole model, where it runs at every call."
            )
        return out

    return run


def _held(hook: Any) -> Iterator[Any]:
    """The containers that a hook has in its hands: what its closure, its object or its arguments hold."""
    if isinstance(hook, functools.partial):
        yield from _held(hook.func)
        values: Iterable[Any] = (*hook.args, *hook.keywords.values())
    else:
        cells = getattr(hook, "__closure__", None) or ()
        values = [c.cell_contents for c in cells if c != type(c)()]
        values += [getattr(hook, "__self__", None), *(getattr(hook, "__defaults__", None) or ())]
    for value in values:
        if isinstance(value, CONTAINERS):
            yield value
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | torch.Tensor | type):
            yield vars(value)
            yield from (x for x in vars(value).values() if isinstance(x, CONTAINERS))


def _package(hook: Any) -> str:
    """The package that a hook is of."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = getattr(hook, "__func__", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]
