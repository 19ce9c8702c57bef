"""A training step from the user's own `build()`: what it may return and which parameters it may name is in the manual
(tracer/README.md, "Your own model")."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, Final, cast

import torch
from torch import nn

from tracer.precision.policy import Autocast, parse_amp
from tracer.step.context import (
    NEEDS_VALUES,
    detect_fake_mode,
    fake_conversions,
    initialisers_without_values,
    is_fake,
    make_fake,
)
from tracer.step.loop import TrainingStep
from tracer.step.loop_options import AROUND_OPTIONS
from tracer.step.named.vision import help_torchvision
from tracer.step.user_step import UserStep
from tracer.torch_api import unset_fake_temporarily
from traces.errors import SpecError
from traces.model_spec import DEFAULT_FUNCTION, split_reference
from traces.provenance import PACKAGES

RETURNS: Final = (
    "return (model, batch, loss, optimizer), (model, batch, optimizer) with the loss inside the model, or a "
    "dict with these keys"
)
KEYS: Final = ("model", "batch", "loss", "optimizer", "amp")
TUPLES: Final = {4: KEYS[:4], 3: ("model", "batch", "optimizer")}  # what a tuple of so many values holds
# Modules beside a user's file that an earlier load imported: name -> directory.
_loads = itertools.count()
_siblings: dict[str, str] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildFunction(UserStep):
    """A function in a Python file that builds a training step."""

    path: Path
    function: str
    package: str = ""  # that of its relative imports; "": it has none

    @classmethod
    def parse(cls, reference: str) -> BuildFunction:
        """Split "path/to/file.py:function"; SpecError if the file is missing or is not Python."""
        path_text, function = split_reference(reference) or (reference, DEFAULT_FUNCTION)
        path = Path(path_text).expanduser()
        if not function.isidentifier():
            raise SpecError(f"{reference}: {function!r} is not a function's name; write {path_text}:build.")
        if not path.is_file():
            raise SpecError(f"{path_text}: there is no such file (looked in {path.absolute().parent}).")
        try:
            text = path.read_bytes()
            compile(text, str(path), "exec")
        except (SyntaxError, ValueError) as error:
            line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            reason = error.msg if isinstance(error, SyntaxError) else error
            raise SpecError(f"{path_text}{line}: not valid Python: {reason}.") from None
        return cls(path=path.resolve(), function=function, package=_package(path.resolve(), text))

    @property
    def _root(self) -> Path:
        """The directory from which the file and what stands beside it are imported."""
        return self.path.parents[len(self.package.split(".")) if self.package else 0]

    @property
    def label(self) -> str:
        return f"{self.path.name}:{self.function}"

    def step(self, options: dict[str, Any], device: str) -> TrainingStep:
        """Import the file, call the function, and make a training step of what it returns. Raises SpecError: the file
        or function fails, or returns something else; CaptureError: it needs the values of tensors while nothing may be
        allocated.
        """
        with _importable_from(self._root):
            build = self._function()
            # Fake CUDA tensors cannot be moved like real ones, so they are made in place.
            place = torch.device(device) if is_fake() and device != "cpu" else torch.device("cpu")
            accepted = self._accepted(build, options, device)
            with place:
                made = self._unpack(self._returned(build, accepted))
            model, loss, optimizer = made["model"], made["loss"], made["optimizer"]
            self._check(model, loss)
            if (mode := detect_fake_mode()) is not None:
                for module in (model, loss):
                    if isinstance(module, nn.Module):
                        make_fake(module, mode)
            step = self._assemble(model, made["batch"], loss, optimizer, options, device)
            return replace(step, autocast=Autocast(dtype=made["amp"]))

    def _returned(self, build: Callable[..., Any], accepted: dict[str, Any]) -> Any:
        """Return what the function returns. It is called for real, in memory, where it needs values that fakes lack."""
        with self._explained(f"{self.function}() failed"):
            with initialisers_without_values(), fake_conversions():
                try:
                    return build(**accepted)
                except Exception as error:
                    # It read values, or made modules that learn their sizes.
                    lazy = any(f"Uninitialized{kind}" in str(error) for kind in ("Parameter", "Buffer"))
                    if not is_fake() or not (lazy or isinstance(error, NEEDS_VALUES)):
                        raise
            with unset_fake_temporarily():
                return build(**accepted)

    def _function(self) -> Callable[..., Any]:
        with unset_fake_temporarily(), self._explained("importing the file failed"):
            help_torchvision()  # which the file may import
            module = _import_file(self.path, self.package)
        function = getattr(module, self.function, None)
        if function is None:
            known = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
            listing = f"; it defines {', '.join(known)}" if known else ""
            raise SpecError(
                f"{self.path.name}: there is no function {self.function!r} in this file{listing}."
            )
        if not callable(function):
            raise SpecError(f"{self.label}: this is a {type(function).__name__}, not a function.")
        return cast(Callable[..., Any], function)

    def _accepted(self, build: Callable[..., Any], options: dict[str, Any], device: str) -> dict[str, Any]:
        try:
            parameters = inspect.signature(build).parameters
        except (TypeError, ValueError):  # of some functions that are written in C
            raise SpecError(f"{self.label}: Python does not know its parameters; wrap it in a def.") from None
        anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        named = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        # The policy is applied around the function, which need not know of it.
        options = {k: v for k, v in options.items() if anything or k in named or k not in AROUND_OPTIONS}
        refused = [] if anything else [k for k in options if k not in named]
        if refused:
            flag = "--" + refused[0].replace("_", "-")
            raise SpecError(
                f"{self.label}: {flag} was given, but {self.function}() has no parameter {refused[0]!r}; add "
                f"it to the signature, or leave {flag} out."
            )
        needed = {n for n in named if parameters[n].default is inspect.Parameter.empty}
        if needed := needed.difference(options, ["device"]):
            raise SpecError(
                f"{self.label}: {self.function}() needs a value for {', '.join(sorted(needed))}; give it a default."
            )
        return {**options, **({"device": device} if anything or "device" in named else {})}

    def _unpack(self, returned: Any) -> dict[str, Any]:
        """Return what the function returned, by KEYS; None where it said nothing."""
        if isinstance(returned, (tuple, list)) and len(returned) in TUPLES:
            returned = dict(zip(TUPLES[len(returned)], returned, strict=True))
        if not isinstance(returned, Mapping):
            size = f" of {len(returned)} values" if isinstance(returned, (tuple, list)) else ""
            raise SpecError(f"{self.label}: it returned a {type(returned).__name__}{size}; {RETURNS}.")
        wrong = [f"lacks {k!r}" for k in ("model", "batch") if k not in returned]
        wrong += [f"has the unknown key {k!r}" for k in sorted(str(k) for k in returned if k not in KEYS)]
        if wrong:
            raise SpecError(f"{self.label}: the dict that it returned {wrong[0]}; {RETURNS}.")
        given = {**dict.fromkeys(KEYS), **returned}
        amp = given["amp"]
        try:
            return {**given, "amp": parse_amp(amp) if amp else ""}
        except SpecError:
            raise SpecError(f"{self.label}: amp is {amp!r} and must be bfloat16 or float16.") from None

    def _where(self, error: BaseException) -> str:
        """The last line of the user's own directory on the way to the error."""
        root = self._root
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if _belongs(f.filename, root)]
        own = own or [f for f in frames if f.filename == str(self.path)]
        return f"{Path(own[-1].filename).relative_to(root)} line {own[-1].lineno}" if own else self.label


def _belongs(file: str, directory: Path) -> bool:
    """Return whether a file is the user's own: in that directory, and not installed there."""
    return Path(file).is_relative_to(directory) and "site-packages" not in file


def _package(path: Path, text: bytes) -> str:
    """The package that a file is part of, if it imports from it by dots ("from .nets import Net"); else "".

    It reaches up as far as there are `__init__.py`, and as far as the dots do.
    """
    dots = max((n.level for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ImportFrom)), default=0)
    if not dots:
        return ""
    depth = next(k for k, parent in enumerate(path.parents) if not (parent / "__init__.py").is_file())
    return ".".join(path.parts[-1 - max(depth, dots) : -1])


def _import_file(path: Path, package: str = "") -> ModuleType:
    """Run a Python file as a module of its own, anew each time: as it is, not as bytecode of before, which counts
    as current if size and second of change are the same, and by a name that dynamo's guards know nothing else by."""
    name = f"{package}." * bool(package) + f"_lowtide_build_{path.stem}_{next(_loads)}"
    loader = SourceFileLoader(name, str(path))
    module = importlib.util.module_from_spec(ModuleSpec(name, loader, origin=str(path)))
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        exec(loader.source_to_code(path.read_bytes(), str(path)), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _importable_from(directory: Path) -> Iterator[None]:
    """Put a directory first on sys.path while the body runs, hiding what other directories brought."""
    place = str(directory)
    for name in [n for n, d in _siblings.items() if d != place]:
        sys.modules.pop(name, None)
        del _siblings[name]
    before = set(sys.modules)
    sys.path.insert(0, place)
    try:
        yield
    finally:
        if place in sys.path:
            sys.path.remove(place)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and _belongs(file, directory) and name.partition(".")[0] not in PACKAGES:
                _siblings[name] = place
