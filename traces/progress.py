"""How far long work is: counted where it is done, shown by whoever can, and otherwise said in lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
Say = Callable[[str], None]  # is told one line about each thing that is done
# Shows the share that is done (None: it no longer shows any), and what is being done; whether somebody sees it.
Draw = Callable[[float | None, str], bool]


def silent(line: str) -> None:
    """Tell nobody."""


# Of the work that is being done, the outermost first: steps, those done, a text.
_levels: list[list[Any]] = []
_draw: Draw | None = None


def shown_by(draw: Draw | None) -> None:
    """From now on this shows how far the work of the main thread is; None: nobody does."""
    global _draw
    clear()
    _draw = draw


def clear() -> None:
    """Show nothing until it is shown again."""
    if _draw is not None:
        _draw(None, "")


def show() -> bool:
    """Show how far the work is, if there is any; returns whether somebody sees it."""
    share = 0.0
    for steps, done, _ in reversed(_levels):
        share = min(1.0, (done + share) / steps)
    if _draw is None or not _levels:
        return False
    return _draw(share, ": ".join(text for *_, text in _levels if text))


@contextmanager
def counting(steps: int) -> Iterator[Callable[..., bool]]:
    """The body is so many steps, and tells how many more are done, and what is being done. Work that is counted inside
    a step is a part of it."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda *told: False
        return
    level: list[Any] = [max(1, steps), 0.0, ""]
    depth = len(_levels)

    def done(more: float = 1, text: str = "") -> bool:
        level[1:] = level[1] + more, text
        return show()

    _levels.append(level)
    show()
    try:
        yield done
    finally:
        del _levels[depth:]
        if not _levels:
            clear()


def counted(items: Iterable[T], named: Callable[[T], str], say: Say = silent, of: int = 0) -> Iterator[T]:
    """Each of the items (`of`: so many, if they do not know), which is done when the next one is asked for. What is
    being done is said where nobody sees it shown."""
    whole: Any = items
    of = of or len(whole)
    with counting(of) as done:
        for k, item in enumerate(items, 1):
            text = named(item)
            if not done(0, text):
                say(f"{k} of {of}: {text}" if of > 1 else text)
            yield item
            done()
