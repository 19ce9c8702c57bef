"""A reader of pickles from anywhere that makes plain containers, numbers and text, and nothing else.

A pickle is a program, and its one way to do harm is to name something to import and call. Here no name is resolved, so
nothing is called; what remains is the size of what it builds, which is bounded while it loads.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from traces.errors import TraceError

MAX_FILE_BYTES: Final = 4 << 30
# What a pickle may take while it loads. The stacks of a snapshot are shared objects and expand about tenfold.
SPARE_BYTES: Final = 2 << 30
BYTES_PER_FILE_BYTE: Final = 24
SNAPSHOT: Final = "torch.cuda.memory._dump_snapshot(path), in torch 2.1 or newer"


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to an object outside the file")


def load_plain(path: Path) -> Any:
    """Return what the file holds, in plain containers. Raises TraceError: no pickle, cut off, too large, or hostile."""
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise MemoryError
        with path.open("rb") as file, _bounded_memory(SPARE_BYTES + BYTES_PER_FILE_BYTE * size):
            return _PlainUnpickler(file).load()
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); name another file."
    except MemoryError:
        why = "damaged, or too large to be read; record with _record_memory_history(context=None)."
    # A damaged pickle can make the unpickler raise almost anything; no code of the file's own can have run.
    except Exception as error:
        why = f"not a memory snapshot ({str(error) or type(error).__name__}); make one with {SNAPSHOT}."
    raise TraceError(f"{path}: {why}")


@contextlib.contextmanager
def _bounded_memory(more_bytes: int) -> Iterator[None]:
    """Let the process grow by so much and no more, where the system can do that (Linux)."""
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        yield
        return
    bound = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (bound if soft < 0 else min(bound, soft), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
