"""What a capture depends on beside tensors: read off the model before it, and looked at again at every call.

Python code decides which ops a forward runs. A `State` holds what it may decide by: of every module its class, scalars,
containers, hooks, submodules and the layout of its parameters and buffers; what hangs on a module as a configuration
does; functions, numbers and flags of its classes, and what these functions name: globals, closures, defaults, and of
the user's own files the functions, classes and modules behind the names, to the end; torch's own settings. Two models
in equal states run the same ops on equal arguments.

Reading a state takes milliseconds, so it is read once and then only watched: while every container holds the very same
objects as before, the state is the same.

Counts: the above, and the environment where it is named. Ignores: files, the clock, objects in C, and what functions
of installed libraries name beside numbers and flags.
"""

from __future__ import annotations

import dis
import enum
import operator
import os
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn

from tracer.capture.state import reads_seen
from tracer.torch_api import bindings, cudnn_enabled, replaced
from traces.errors import PlanError
from traces.provenance import PACKAGES

PLAIN: Final = (
    type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size,
)  # fmt: skip
# Objects of these are a model's surroundings, which change at every step and are no part of it.
FOREIGN: Final = (
    "torch", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed", "logging",
)  # fmt: skip
CODE: Final = (type, types.FunctionType, types.MethodType, partial)
DEEPEST: Final = 5  # how far containers and objects are followed from a module's attribute
LONGEST: Final = 4_096  # elements of a container that are looked at
OWN: Final = "_lowtide"  # attributes that Lowtide adds
OWN_CLASS: Final = "_lowtide_class"  # and that of a planned module's class with the model's own
TENSORS: Final = ("_parameters", "_buffers")
# Attributes of torch's own that no forward reads; the root's hooks run around a planned call and are not captured.
UNREAD: Final = ("_state_dict_", "_load_state_dict_", "_non_persistent_buffers_set", OWN)
ROOT_HOOKS: Final = ("_forward_", "_backward_")

Key = Hashable
Path = tuple[str, str]  # (of what, attribute): ("encoder.layer.3.dropout", "p")


class Same:
    """An object that is compared by identity; once it is freed, it equals nothing."""

    __slots__ = ("_hash", "_label", "_of")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._label = label(value)
        try:
            self._of: Callable[[], Any] = weakref.ref(value)
        except TypeError:
            self._of = lambda: value

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and (mine := self._of()) is not None and mine is other._of()

    def __repr__(self) -> str:
        return self._label


class State:
    """The state of a model as a key: what it consists of, by what it is the state of."""

    __slots__ = ("_hash", "parts")

    def __init__(self, parts: Mapping[Path, Key], unread: frozenset[Path]) -> None:
        self.parts = {path: x for path, x in parts.items() if path not in unread}
        self._hash = hash(frozenset(self.parts.items()))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, State) and self._hash == other._hash and self.parts == other.parts
        )

    def changes(self, before: State) -> list[str]:
        """What differs from an earlier state, in words: "dropout.p of encoder changed from 0.1 to 0.5"."""
        return [_words(p, before.parts, self.parts) for p in self.changed(before)]

    def changed(self, before: State) -> list[Path]:
        return [p for p in {**before.parts, **self.parts} if before.parts.get(p) != self.parts.get(p)]


def _words(path: Path, *states: Mapping[Path, Key]) -> str:
    owner, name = path
    where = f"{name} of {owner}" if owner else name
    texts = [_shown(parts[path]) if path in parts else "nothing" for parts in states]
    shown = [text if len(text) < 60 else f"{text[:56]} ..." for text in texts]
    return f"{where} changed" if shown[0] == shown[1] else f"{where} changed from {shown[0]} to {shown[1]}"


def _shown(key: Any) -> str:
    scalar = isinstance(key, tuple) and len(key) == 2 and all(isinstance(x, str) for x in key)
    return str(key[1]) if scalar else repr(key)


def label(value: Any) -> str:
    """A name for people of a function, class or object."""
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else f"a {type(value).__qualname__}"


# Watching


class Watch:
    """The state of one model, which is read again only when something that it was read from has changed."""

    def __init__(self, model: nn.Module, unread: frozenset[Path] = frozenset()) -> None:
        self.model, self.unread = model, unread
        self._read: _Reading | None = None
        self._state: State | None = None

    def state(self) -> State:
        """The state of the model at this moment."""
        if self._state is None or self._read is None or not self._read.unchanged():
            self._read = _Reading(self.model)
            state = State(self._read.parts, self.unread)
            if state != self._state:  # an equal one stays, whose hash and identity are known
                self._state = state
        assert self._state is not None
        return self._state

    def leave_out(self, unread: frozenset[Path]) -> None:
        """From now on these, which forward does not read, are no part of the state."""
        self.unread, self._state = unread, None

    def owner(self, name: str) -> Any:
        """The object of that name; None of what is no object with attributes."""
        assert self._read is not None
        return self._read.owners.get(name)

    def tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Parameters and buffers by name, as `named_parameters` and `named_buffers` give them, without a walk."""
        assert self._read is not None
        return self._read.tensors("_parameters"), self._read.tensors("_buffers")


class _Reading:
    """One walk over a model: the parts of its state, and the containers that they were read from."""

    def __init__(self, model: nn.Module) -> None:
        self._start()
        self._modules |= {id(m): path for path, m in model.named_modules()}
        self._homes = {
            id(x): (slots, n, f"{path}.{n}")
            for path, m in model.named_modules()
            for slots in (m._parameters, m._buffers)
            for n, x in slots.items()
        }
        for path, module in model.named_modules():
            self._module(path, module)
        for kind in dict.fromkeys(c for m in model.modules() for c in type(m).__mro__ if c is not object):
            self._class(kind)
        hooks = vars(nn.modules.module)
        for name in sorted(k for k in hooks if k.startswith("_global_") and isinstance(hooks[k], dict)):
            self._attribute("torch", name, hooks[name], 0)
        sizes, *objects = self._now()
        self._before: list[list[Any]] = [sizes, *map(list, objects)]
        self._layout = self._tensor_layout()
        self._settings = settings()
        self.parts["", "the layout of its parameters and buffers"] = self._layout
        self.parts.update((("torch", name), x) for name, x in zip(SETTINGS, self._settings, strict=True))

    def _start(self) -> None:
        self.parts: dict[Path, Key] = {}
        self._modules: dict[int, str] = {}
        self._classes: dict[str, list[type]] = {}
        self.owners: dict[str, Any] = {}
        # What is watched: dicts by keys and values, of parameters and buffers by keys alone, lists, what is asked for
        # anew each time, the length of other containers, and what a function says of an object.
        self._dicts: list[Mapping[Any, Any]] = []
        self._named: list[dict[str, Any]] = []
        self._lists: list[Any] = []
        self._asked: list[Callable[[], Sequence[Any]]] = []
        self._counted: list[Any] = []
        self._told: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self._slots: dict[str, list[tuple[str, dict[str, Any], str]]] = {k: [] for k in TENSORS}
        self._seen: set[int] = set()
        self._functions: set[types.FunctionType] = set()
        self._spaces: list[types.ModuleType] = []
        self._kinds: set[type] = set()

    def unchanged(self) -> bool:
        """Whether all that was read still holds the very same objects."""
        sizes, *objects = self._now()
        return (
            sizes == self._before[0]
            and all(all(map(operator.is_, *both)) for both in zip(objects, self._before[1:], strict=True))
            and self._tensor_layout() == self._layout
            and settings() == self._settings
            and all(ask(x) == told for ask, x, told in self._told)
        )

    def _now(self) -> tuple[list[int], Iterator[Any], Iterator[Any]]:
        """The sizes of what is watched, the values and the keys."""
        values = chain.from_iterable(map(operator.methodcaller("values"), self._dicts))
        others = chain.from_iterable(chain(self._lists, (ask() for ask in self._asked)))
        keys = chain.from_iterable(chain(self._dicts, self._named))
        sized = chain(self._dicts, self._named, self._lists, self._counted)
        return list(map(len, sized)), chain(values, others), keys

    def tensors(self, kind: str) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for path, slots, name in self._slots[kind]:
            x = slots.get(name)
            if x is not None and id(x) not in seen:
                seen.add(id(x))
                named[path] = x
        return named

    def _tensor_layout(self) -> Key:
        """What a graph depends on of parameters and buffers: layouts, and which are one tensor."""
        first: dict[int, int] = {}
        out: list[Any] = []
        for slots in self._slots.values():
            for k, (_, owner, name) in enumerate(slots):
                x = owner.get(name)
                if x is None:
                    out.append(None)
                else:
                    out.append(
                        (first.setdefault(id(x), k), x.dtype, x.requires_grad, x.shape, x.stride(), x.device)
                    )
        return tuple(out)

    def _module(self, path: str, module: nn.Module) -> None:
        self.owners[path] = module
        self.parts[path, "class"] = self._class_name(own_class(type(module)))
        self._dicts.append(vars(module))
        self._seen.add(id(vars(module)))
        for name, value in vars(module).items():
            if name in TENSORS:
                self._slots[name] += [(f"{path}.{n}" if path else n, value, n) for n in value]
                (self._named if value else self._counted).append(value)
                self.parts[path, name] = tuple((n, x is None) for n, x in value.items())
            elif name == "_modules" or name.startswith(UNREAD) or (not path and name.startswith(ROOT_HOOKS)):
                pass
            elif isinstance(value, dict | list) and not value:
                self._counted.append(value)
            else:
                self._attribute(path, name, value, 0)
        self._dicts.append(module._modules)
        self.parts[path, "its modules"] = tuple(
            (n, None if m is None else self._modules[id(m)]) for n, m in module._modules.items()
        )

    def _class(self, kind: type) -> None:
        if own_class(kind) is not kind or kind.__name__ == "PlannedModule" or kind in self._kinds:
            return
        self._kinds.add(kind)
        owner = self._class_name(kind)
        self._dicts.append(vars(kind))
        for name, value in vars(kind).items():
            if name.startswith("__") and not isinstance(value, types.FunctionType):
                continue
            function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(function, types.FunctionType):
                self.parts[owner, name] = _code(function)
                if not kind.__module__.startswith("torch."):
                    self._function(f"{owner}.{name}", function)
            elif isinstance(value, PLAIN):
                self.parts[owner, name] = plain(value)

    def _class_name(self, kind: type) -> str:
        """A class by its name, and by its number if the model has several of that name."""
        of_name = self._classes.setdefault(kind.__qualname__, [])
        if kind not in of_name:
            of_name.append(kind)
        number = of_name.index(kind)
        return f"class {kind.__qualname__}" + (f" ({number + 1})" if number else "")

    def _function(self, owner: str, function: types.FunctionType) -> None:
        """What a function names: its defaults, what its closure holds, and globals.

        Of libraries' functions the numbers and flags among the globals; of the user's own whatever there is.
        """
        if function in self._functions:
            return
        self._functions.add(function)
        own, space, closure = is_own(function.__module__), function.__globals__, function.__closure__ or ()
        if own:
            self.parts[owner, "its code"] = _code(function)
        if own or closure:
            self._asked.append(lambda: (function.__code__, function.__defaults__, *map(_held, closure)))
        for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
            if name != "__class__":
                self._attribute(owner, name, _held(cell), DEEPEST - 2)
        if own:
            names, attributes = _names(function.__code__)
        else:
            names, attributes = function.__code__.co_names, frozenset[str]()
        there = [n for n in names if n in space and (own or isinstance(space[n], PLAIN))]
        self._space(f"{owner}, global", space, there, attributes)
        if own and not attributes.isdisjoint(("environ", "getenv")):
            self._attribute(owner, "the environment", vars(os.environ)["_data"], DEEPEST - 1)

    def _space(self, owner: str, space: dict[str, Any], names: list[str], attributes: frozenset[str]) -> None:
        """What stands under these names in a module, and under the attributes in the user's own modules there."""
        if names:
            self._asked.append(lambda: [space.get(n) for n in names])
        for n in names:
            value = space[n]
            if isinstance(value, types.ModuleType):
                self.parts[owner, n] = Same(value)
                if is_own(value.__name__) and value not in self._spaces:
                    self._spaces.append(value)
                    inner = [a for a in attributes if a in vars(value)]
                    self._space(f"module {value.__name__}", vars(value), inner, attributes)
            else:
                self._attribute(owner, n, value, DEEPEST - 2)

    def _attribute(self, owner: str, name: str, value: Any, depth: int) -> None:
        self.parts[owner, name] = self._key(f"{owner}.{name}" if owner else name, value, depth)

    def _key(self, path: str, value: Any, depth: int) -> Key:
        """A value as a key; containers and configurations are read to their ends, and watched."""
        if isinstance(value, PLAIN):
            return plain(value)
        if isinstance(value, nn.Module) and id(value) in self._modules:
            return ("module", self._modules[id(value)])
        if isinstance(value, torch.Tensor):
            return self._tensor(path, value)
        if isinstance(value, enum.Enum):
            return Same(value)
        if isinstance(value, CODE):
            return self._callable(path, value, depth)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):  # an array
            self._told.append((_bytes, value, _bytes(value)))
            return "array", value.shape, str(value.dtype), _bytes(value)
        if isinstance(value, tuple | list | deque | dict | set | frozenset):
            return self._container(path, value, depth)
        if depth < DEEPEST and isinstance(value, nn.Module):
            return self._loose(path, value)
        if depth < DEEPEST and followed(value):
            return self._object(path, value, depth)
        if depth < DEEPEST and is_own(type(value).__module__):
            slots = [n for c in type(value).__mro__ for n in getattr(c, "__slots__", ())]
            self._asked.append(lambda: [getattr(value, n, None) for n in slots])
            for n in slots:
                self._attribute(path, n, getattr(value, n, None), depth + 1)
            return self._key(path, type(value), depth)
        return Same(value)

    def _callable(self, path: str, value: Any, depth: int) -> Key:
        if isinstance(value, types.MethodType):
            return "method", self._key(path, value.__func__, depth), self._key(path, value.__self__, DEEPEST)
        if isinstance(value, partial):
            parts = (value.func, value.args, value.keywords)
            return "partial", *(self._key(path, x, depth + 1) for x in parts)
        if is_own(value.__module__):
            if isinstance(value, type):
                self._class(value)
            else:
                self._function(path, value)
        return Same(value)

    def _tensor(self, path: str, value: torch.Tensor) -> Key:
        if id(value) in self._homes:  # such as the weights that torch's recurrent layers have in a list
            slots, name, home = self._homes[id(value)]
            self._told.append((lambda x: slots.get(name) is x, value, True))
            return "tensor", home
        self._told.append((_version, value, value._version))
        return Same(value), value._version, value.requires_grad

    def _container(self, path: str, value: Any, depth: int) -> Key:
        kind = type(value).__name__
        if not value or depth >= DEEPEST or len(value) > LONGEST or id(value) in self._seen:
            self._counted.append(value)
            return kind, len(value)
        if isinstance(value, set | frozenset):
            self._told.append((frozenset, value, frozenset(value)))
            return kind, frozenset(self._key(path, x, DEEPEST) for x in value)
        self._seen.add(id(value))
        try:
            if isinstance(value, dict):
                self._dicts.append(value)
                items = tuple(
                    (self._key(path, k, DEEPEST), self._key(f"{path}[{k!r}]", x, depth + 1))
                    for k, x in value.items()
                )
                return kind, items
            self._lists.append(value)
            return kind, tuple(self._key(f"{path}[{k}]", x, depth + 1) for k, x in enumerate(value))
        finally:
            self._seen.discard(id(value))

    def _object(self, path: str, value: Any, depth: int) -> Key:
        if id(vars(value)) in self._seen:
            return Same(type(value))
        self._seen.add(id(vars(value)))
        self._dicts.append(vars(value))
        self.owners[path] = value
        for name, x in vars(value).items():
            self._attribute(path, name, x, depth + 1)
        return self._key(path, type(value), depth)

    def _loose(self, path: str, module: nn.Module) -> Key:
        """A module that is reached through a list or another object, whose tensors are constants to the graph."""
        new = [
            (f"{path}.{name}" if name else path, m)
            for name, m in module.named_modules()
            if id(m) not in self._modules
        ]
        self._modules |= {id(m): where for where, m in new}  # all of them first: each names its children
        for where, m in new:
            self._module(where, m)
        for x in (*module.parameters(), *module.buffers()):
            self._told.append((_version, x, x._version))
        return "module", path


def _held(cell: types.CellType) -> Any:
    """What a closure's variable holds; None before it is set."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


@cache
def _names(code: types.CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that a function names, with those of the functions inside of it, and all names, attributes too."""
    steps, all_names = dis.get_instructions(code), set(code.co_names)
    globals_ = [x.argval for x in steps if x.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more, names = _names(inner)
            globals_ += more
            all_names |= names
    return tuple(dict.fromkeys(globals_)), frozenset(all_names)


@cache
def is_own(module: str | None) -> bool:
    """Whether a module is the user's own: of no installed package, nor Python's, nor Lowtide's."""
    if module is None or module.partition(".")[0] in PACKAGES:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # a notebook's or a script's, or one of C
        return module == "__main__"
    return not file.startswith(_INSTALLED) and "site-packages" not in file and "dist-packages" not in file


_INSTALLED: Final = tuple(sysconfig.get_path(k) for k in ("stdlib", "platstdlib", "purelib", "platlib"))


@contextmanager
def unread_of(watch: Watch, paths: frozenset[Path]) -> Iterator[set[Path]]:
    """Which of these attributes the body (a capture) does not read, or whether torch is to be deterministic.

    A descriptor on the owner's class sees every read, of any instance; an attribute that the class has too, or whose
    owner is no object of Python's, counts as read. What is yielded is complete when the body has ended.
    """
    unread: set[Path] = set(DETERMINISTIC)
    named: dict[tuple[type, str], list[Path]] = {}
    for path in paths:
        if (owner := watch.owner(path[0])) is not None:
            named.setdefault((type(owner), path[1]), []).append(path)
    asked = bindings._get_deterministic_algorithms

    def noted() -> bool:
        asking = sys._getframe(2).f_globals.get("__name__", "")
        # The export only makes a note of it, and a trace of whose measurements would do.
        if not asking.startswith(("torch._functorch.", "tracer.")):
            unread.difference_update(DETERMINISTIC)
        return asked()

    with replaced(bindings, _get_deterministic_algorithms=noted), ExitStack() as stack:
        for (kind, name), those in named.items():

            def read(_: object, those: list[Path] = those) -> None:
                unread.difference_update(those)

            if reads_seen(kind, name, stack, read):
                unread.update(those)
        yield unread


def _code(function: types.FunctionType) -> Key:
    """A function by what it does: the same file, loaded twice, has equal ones."""
    code = function.__code__
    return _Code((code.co_filename, code, repr(function.__defaults__)))


class _Code(tuple[Any, ...]):
    __slots__ = ()

    def __repr__(self) -> str:
        return f"{self[1].co_name} at line {self[1].co_firstlineno}"


def own_class(kind: type) -> type:
    """The model's own class behind the one that a planned module has; any other class as it is."""
    found: type = vars(kind).get(OWN_CLASS, kind)
    return found


def followed(value: Any) -> bool:
    """Whether an object is read as a configuration is: by its attributes."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | types.ModuleType | types.BuiltinFunctionType | torch.optim.Optimizer)
        and kind.__module__.partition(".")[0] not in FOREIGN
    )


def plain(value: Any) -> Key:
    """A scalar as a key that tells 1, 1.0 and True apart, and 0.0 from -0.0, and knows NaN again."""
    return value if isinstance(value, str) or value is None else (type(value).__name__, repr(value))


_bytes: Final = operator.methodcaller("tobytes")
_version: Final = operator.attrgetter("_version")


def argument(value: Any, what: str) -> Key:
    """An argument that is no tensor as a key: by its value, through all that it contains. Raises PlanError if it is an
    object that holds a tensor, which a graph would take for a constant.
    """
    if isinstance(value, PLAIN):
        return plain(value)
    parts = _Contents(what, value).parts
    return tuple(parts.items())


class _Contents(_Reading):
    """One walk over an object that is not watched, nor its code: an argument, which every call brings anew."""

    def __init__(self, what: str, value: Any) -> None:
        self._start()
        self._attribute("", what, value, 0)

    def _function(self, owner: str, function: types.FunctionType) -> None:
        pass

    def _class(self, kind: type) -> None:
        pass

    def _tensor(self, path: str, value: torch.Tensor) -> Key:
        raise PlanError(
            f"{path} is a tensor inside of an object that is passed to the model, and would become a constant of the "
            "step; pass it as an argument of its own, or in a list or dict."
        )


# Settings of torch that a capture reads

SETTINGS: Final[dict[str, Callable[[], Any]]] = {
    "the default dtype": torch.get_default_dtype,
    "the default device": torch.get_default_device,
    "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "its warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
    "flash attention": torch.backends.cuda.flash_sdp_enabled,
    "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
    "plain attention": torch.backends.cuda.math_sdp_enabled,
    "cuDNN's attention": torch.backends.cuda.cudnn_sdp_enabled,
    "cuDNN": cudnn_enabled,
}
DETERMINISTIC: Final = frozenset(("torch", name) for name in SETTINGS if "determin" in name or "warn" in name)


def settings() -> tuple[Any, ...]:
    return tuple([ask() for ask in SETTINGS.values()])
