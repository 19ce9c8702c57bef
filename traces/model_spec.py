"""Name a model: by a name that `trace` knows, a function in the user's own file, or the class of one in hand."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Final

DEFAULT_FUNCTION: Final = "build"
IN_HAND: Final = "in hand: "  # begins the name of a model that was given as an object; its class follows
TIMM: Final = "timm:"  # begins a model's own name in timm
HF: Final = "hf:"  # begins the path of a configuration of transformers


def split_reference(model: str) -> tuple[str, str] | None:
    """File and function of "path/to/file.py:function" or "path/to/file.py"; None for anything else.

    "package.module:function" stands for the file of that module, below the working directory or installed.
    """
    if model.endswith(".py"):
        return model, DEFAULT_FUNCTION
    file, _, function = model.rpartition(":")
    if file.endswith(".py"):
        return file, function
    parts = file.split(".")
    if not all(part.isidentifier() for part in (*parts, function)) or model.startswith((TIMM, HF)):
        return None
    try:
        spec = find_spec(parts[0])  # nothing is imported to find out
    except (ImportError, ValueError):  # of finders that refuse it, of modules that have no spec
        spec = None
    installed = (spec.submodule_search_locations or ()) if spec is not None else ()
    bases = [Path(*parts), *(Path(place, *parts[1:]) for place in installed)]
    places = (place for base in bases for place in (base.with_suffix(".py"), base / "__init__.py"))
    return next(((str(place), function) for place in places if place.is_file()), None)


def source_file(model: str) -> Path | None:
    """The user's own file; None for a model that is known by its name."""
    parts = split_reference(model)
    return None if parts is None else Path(parts[0]).expanduser()


def short_name(model: str) -> str:
    """Return what files and labels call a model: its name, the user's file without its folder, or the class."""
    model = model.removeprefix(IN_HAND)
    if model.startswith(HF):
        path = Path(model.removeprefix(HF)).absolute()
        return path.parent.name if path.name == "config.json" else path.stem
    file = source_file(model)
    return model.removeprefix(TIMM) if file is None else file.stem


def source_digest(model: str) -> str:
    """A digest of the user's own file, so that editing it makes another model; empty where there is none."""
    path = source_file(model)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path and path.is_file() else ""
