"""What names a model: a name that `trace` knows, a function in the user's own file, or the class of one in hand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

DEFAULT_FUNCTION: Final = "build"
IN_HAND: Final = "in hand: "  # begins the name of a model that was given as an object; its class follows


def split_reference(model: str) -> tuple[str, str] | None:
    """File and function of "path/to/file.py:function" or "path/to/file.py"; None for anything else."""
    if model.endswith(".py"):
        return model, DEFAULT_FUNCTION
    file, _, function = model.rpartition(":")
    return (file, function) if file.endswith(".py") else None


def is_build_function(model: str) -> bool:
    """Whether a model is a function in the user's own file, and not known by its name."""
    return split_reference(model) is not None


def source_file(model: str) -> Path | None:
    """The user's own file; None for a model that is known by its name."""
    parts = split_reference(model)
    return None if parts is None else Path(parts[0]).expanduser()


def short_name(model: str) -> str:
    """What files and labels call a model: a known one's name, that of the user's file without its folder, a class's."""
    file = source_file(model.removeprefix(IN_HAND))
    return model.removeprefix(IN_HAND) if file is None else file.stem
