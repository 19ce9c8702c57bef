"""Answer for the ranks of a distributed job that are not there: the store, exchanges of objects, groups of CPUs.

Runs in the process of the one rank that is rehearsed. Every other rank is taken to do and to hold what this one does
and holds. What only another rank can know is heard from that rank, which is rehearsed for it until it says so.
"""

from __future__ import annotations

import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

from tracer.rehearsal.words import Words
from tracer.torch_api import FakeProcessGroup, new_process_group_helper, process_groups, replaced

# Under these keys NCCL's groups look for the number by which their ranks find each other; the driver looks at none.
_UNIQUE_ID: Final = re.compile(r"(cuda//|UniqueNCCLID:)\d+(:\d+)?$")
UNIQUE_ID_BYTES: Final = 128


@contextmanager
def absent_ranks(rank: int, ranks: int, local_rank: int, words: Words, driver: Any) -> Iterator[None]:
    """In the body, torch.distributed finds `ranks` ranks, of which this process is number `rank`.

    Args:
        words: what other ranks have said where they were rehearsed.
        driver: the null driver, which is told how many ranks a communicator has where NCCL asks the others.
    """
    rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of that name
    kept: dict[str, bytes] = {}
    own = Objects(rank, words)

    class Shared(Answering):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(kept, rank, ranks, words)

    exchanges = {
        name: getattr(own, name)
        for name in (
            "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
            "recv_object_list", "monitored_barrier",
        )
    }  # fmt: skip

    def start(function: Callable[..., Any], args: Sequence[Any] = (), *_: Any, **__: Any) -> None:
        function(local_rank, *args)

    make, split = _telling_sizes(c10d, driver)
    with ExitStack() as around:
        for owner, values in (
            (dist, {"TCPStore": Shared, "FileStore": Shared, "split_group": split, **exchanges}),
            (rendezvous, {"TCPStore": Shared, "FileStore": Shared}),
            (
                c10d,
                {
                    "ProcessGroupGloo": _on_cpus,
                    "split_group": split,
                    "_new_process_group_helper": make,
                    **exchanges,
                },
            ),
            (mp, {"spawn": start, "start_processes": start}),
        ):
            around.enter_context(replaced(owner, **values))
        yield


def finish_pending() -> None:
    """Let the groups' own threads see that all collectives are over, after `torch.cuda.synchronize()`.

    Ten times a second they look, and let go of tensors. An iteration on a GPU takes longer than that.
    """
    gpu = torch.device("cuda")
    for group in list(process_groups.pg_map):
        if "nccl" in dist.get_backend_config(group):
            backend = group._get_backend(gpu)
            try:
                getattr(backend, "_wait_for_pending_works", group._wait_for_pending_works)()
            except RuntimeError:  # before torch 2.14 a group of several backends cannot be waited for
                time.sleep(0.25)


_ALIVE: Final[list[Any]] = []


class Answering(dist.Store):
    """Keys and values of this process, and by rule those of the ranks that are not there."""

    def __init__(self, kept: dict[str, bytes], rank: int, ranks: int, words: Words) -> None:
        super().__init__()
        self._kept, self._rank, self._ranks, self._words = kept, rank, ranks, words
        _ALIVE.append(self)  # C++ holds no reference to the object in Python

    def set(self, key: str, value: Any) -> None:
        self._kept[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._words.say(f"store {key}", self._kept[key])

    def get(self, key: str) -> bytes:
        if key in self._kept:
            return self._kept[key]
        if _UNIQUE_ID.search(key):
            return bytes(UNIQUE_ID_BYTES)
        # Where each rank has a key of its own, the others have put there what this one has.
        for number in re.finditer(r"\d+", key):
            mine = f"{key[: number.start()]}{self._rank}{key[number.end() :]}"
            if int(number[0]) < self._ranks and mine in self._kept:
                return self._kept[mine]
        other = 0 if self._rank else min(1, self._ranks - 1)
        return bytes(
            self._words.hear(other, f"store {key}", f"asks the store for {key!r}, perhaps of rank {other}")
        )

    def add(self, key: str, value: int) -> int:
        """As if every rank had added as much."""
        mine = int(self._kept.get(key, b"0")) + value
        self._kept[key] = str(mine).encode()
        return mine * self._ranks

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        """The others have set them."""

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._kept for key in keys)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        now = self._kept.get(key)
        if (now is None and not expected) or now == expected:
            self.set(key, desired)
        return self._kept.get(key, bytes(expected))

    def append(self, key: str, value: Any) -> None:
        self.set(key, self._kept.get(key, b"") + bytes(value))

    def delete_key(self, key: str) -> bool:
        return self._kept.pop(key, None) is not None

    def clone(self) -> Any:
        return self


class Objects:
    """Exchanges of Python objects: every rank gives what this one gives, unless one alone gives. Their bytes are not on
    the GPU."""

    def __init__(self, rank: int, words: Words) -> None:
        self._rank, self._words = rank, words

    def all_gather_object(self, object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [_copied(obj) for _ in object_list]

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        if object_gather_list is not None:
            self.all_gather_object(object_gather_list, obj)

    def broadcast_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, *_: Any, **given: Any
    ) -> None:
        source, word = _global_rank(src, given.get("group_src"), group), self._named("broadcast", group)
        if source == self._rank:
            self._words.say(word, object_list)
        elif found := self._words.heard(source, word):
            object_list[:] = found[0]
        elif all(x is None for x in object_list):  # else it has the same
            object_list[:] = self._words.hear(
                source, word, f"takes the objects that rank {source} broadcasts"
            )

    def scatter_object_list(
        self,
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        **given: Any,
    ) -> None:
        source, word = _global_rank(src, given.get("group_src"), group), self._named("scatter", group)
        if source == self._rank:
            self._words.say(word, scatter_object_input_list)
        elif not scatter_object_input_list:
            scatter_object_input_list = self._words.hear(source, word, f"takes what rank {source} scatters")
        scatter_object_output_list[0] = _copied((scatter_object_input_list or [])[dist.get_rank(group)])

    def send_object_list(
        self, object_list: list[Any], dst: int | None = None, group: Any = None, *_: Any, **given: Any
    ) -> None:
        to = _global_rank(dst, given.get("group_dst"), group)
        self._words.say(self._words.numbered(f"send {self._rank} {to}"), object_list)

    def recv_object_list(
        self, object_list: list[Any], src: int | None = None, group: Any = None, *_: Any, **given: Any
    ) -> int:
        source = _global_rank(src, given.get("group_src"), group)
        word = self._words.numbered(f"send {source} {self._rank}")
        object_list[:] = self._words.hear(source, word, f"takes the objects that rank {source} sends")
        return source

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """All are there."""

    def _named(self, what: str, group: Any) -> str:
        return self._words.numbered(f"{what} {dist.get_process_group_ranks(group or dist.group.WORLD)}")


def _global_rank(src: int | None, group_src: int | None, group: Any) -> int:
    if src is None:
        return dist.get_global_rank(group or dist.group.WORLD, group_src or 0)
    return src


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _on_cpus(store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
    """The group of CPUs that gloo would make: torch's own that does nothing."""
    options = FakeProcessGroup.Options()
    if hasattr(options, "simulate_uniform_ranks"):
        options.simulate_uniform_ranks = True
    return FakeProcessGroup._create_internal(rank, size, options)


def _telling_sizes(c10d: Any, driver: Any) -> tuple[Any, Any]:
    """Torch's two functions that make groups, which tell the driver how many ranks the group has while they do."""
    make, split = new_process_group_helper, c10d.split_group

    def made(group_size: int, *args: Any, **given: Any) -> Any:
        driver.null_split_ranks(group_size)
        try:
            return make(group_size, *args, **given)
        finally:
            driver.null_split_ranks(0)

    def divided(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **given: Any) -> Any:
        here = (parent_pg or dist.group.WORLD).rank()
        driver.null_split_ranks(next((len(r) for r in split_ranks or () if here in r), 0))
        try:
            return split(parent_pg, split_ranks, *args, **given)
        finally:
            driver.null_split_ranks(0)

    return made, divided
