"""Answer for the ranks of a distributed job that are not there: the store, exchanges of objects, groups of CPUs.

Runs in the process of the one rank that is rehearsed. Every other rank is taken to do and to hold what this one does
and holds. What only another rank can know is heard from that rank, which is rehearsed for it until it says so.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import pickle
import re
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import distributed_c10d as c10d

from tracer.rehearsal.objects import SMALL_BYTES
from tracer.rehearsal.words import Words
from tracer.torch_api import FakeProcessGroup, new_process_group_helper, process_groups, replaced

# Under these keys NCCL's groups look for the number by which their ranks find each other; the driver looks at none.
_UNIQUE_ID: Final = re.compile(r"(cuda//|UniqueNCCLID:)\d+(:\d+)?$")
UNIQUE_ID_BYTES: Final = 128
_STEPS: Final = ("fused_adam", "fused_lion", "cpu_adam", "cpu_adagrad", "cpu_lion")  # DeepSpeed's, in place


@contextmanager
def absent_ranks(rank: int, ranks: int, local_rank: int, words: Words, driver: Any) -> Iterator[None]:
    """In the body, torch.distributed finds `ranks` ranks, of which this process is number `rank`. `words`: what others
    have said where they were rehearsed. The null driver is told how many ranks a communicator has where NCCL asks them.
    """
    rendezvous = import_module("torch.distributed.rendezvous")  # the package has a function of that name
    known = {"_kept": {}, "_rank": rank, "_ranks": ranks, "_words": words}
    stores = dict.fromkeys(("TCPStore", "FileStore"), type("Shared", (Answering,), known))
    own = Exchanges(rank, words, driver)
    exchanges = {name: getattr(own, name) for name in vars(Exchanges) if not name.startswith("_")}
    exchanges |= {name: own._telling(getattr(c10d, name)) for name in ("broadcast", "isend", "irecv")}
    lists = (f"{kind}_object_list" for kind in ("broadcast", "scatter", "send", "recv"))
    exchanges |= {name: own._of_objects(getattr(c10d, name)) for name in lists}

    def start(function: Callable[..., Any], args: Sequence[Any] = (), *_: Any, **__: Any) -> None:
        function(local_rank, *args)

    def destroy(*args: Any, **given: Any) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # torch waits until collectives are over, and time alone ends none
        destroy_process_group(*args, **given)

    destroy_process_group, exchanges["destroy_process_group"] = c10d.destroy_process_group, destroy
    make = _telling_sizes(new_process_group_helper, lambda size, *_: size, driver)
    split = _telling_sizes(dist.ProcessGroup.split_group, lambda _, ranks, *__: len(ranks), driver)
    with ExitStack() as around:
        for owner, values in (
            (dist, {**stores, **exchanges}),
            (dist.ProcessGroup, {"split_group": split}),
            (rendezvous, stores),
            (c10d, {"ProcessGroupGloo": _on_cpus, "_new_process_group_helper": make, **exchanges}),
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

    _kept: dict[str, bytes]
    _rank: int
    _ranks: int
    _words: Words

    def __init__(self, host_name: str = "", port: int = 0, *_: Any, **__: Any) -> None:
        super().__init__()
        self.host, self.port = host_name, port
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
        total = int(self._kept.get(key, b"0")) + value * self._ranks
        self._kept[key] = str(total).encode()
        return total

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

    def num_keys(self) -> int:
        return len(self._kept)

    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815 (so C++ calls them)

    def set_timeout(self, timeout: Any) -> None:
        """Nobody waits."""

    def clone(self) -> Any:
        return self


class Exchanges:
    """Of Python objects every rank gives what this one gives, unless one alone gives, which is asked. Their bytes are
    not on the GPU. Values of small tensors that one rank alone gives it says, and the others hear them where the host
    reads them. Counts: what Python broadcasts, sends and receives. Ignores: what a kernel made, which nobody knows."""

    def __init__(self, rank: int, words: Words, driver: Any) -> None:
        self._rank, self._words, self._driver = rank, words, driver

    def all_gather_object(self, object_list: list[Any], obj: Any, *_: Any, **__: Any) -> None:
        object_list[:] = [_copied(obj) for _ in object_list]

    def gather_object(
        self, obj: Any, object_gather_list: list[Any] | None = None, *_: Any, **__: Any
    ) -> None:
        if object_gather_list is not None:
            self.all_gather_object(object_gather_list, obj)
        from tracer.torch_api import default_planner as planner

        # In a checkpoint of which all ranks save the same, shards of others are missing, which is no fault.
        valid = planner._validate_global_plan([], planner.Metadata({}))
        planner._validate_global_plan = lambda *_: valid

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        """All are there."""

    def _of_objects(self, exchange: Callable[..., Any]) -> Callable[..., int]:
        """Torch's exchange of objects that one rank gives to some: said if it is this one, else heard."""
        signature, kind = inspect.signature(exchange), exchange.__name__.partition("_")[0]
        what = "send" if kind == "recv" else kind  # which are two ends of one

        def told(*args: Any, **kwargs: Any) -> int:
            given = signature.bind(*args, **kwargs).arguments
            (giver, to), objects = self._ends(kind, given), next(iter(given.values()))
            word = self._words.numbered(f"{what} {giver} {to}")
            if giver == self._rank:
                content = given.get("scatter_object_input_list", objects)
                self._words.say(word, content)
            else:
                content = self._words.hear(giver, word, f"takes the objects that rank {giver} {what}s")
            if kind == "scatter":
                objects[0] = _copied(content[dist.get_rank(given.get("group"))])
            elif giver != self._rank:
                objects[:] = content
            return giver

        return told

    def _ends(self, kind: str, given: Mapping[str, Any]) -> tuple[int, list[int]]:
        """Who gives in an exchange, and to whom."""
        among = given.get("group_src", given.get("group_dst"))
        group = given.get("group") or dist.group.WORLD
        peer = given.get("src", given.get("dst"))
        if peer is None:
            peer = dist.get_global_rank(group, among or 0)
        if kind.endswith("send"):
            return self._rank, [peer]
        return peer, [self._rank] if kind.endswith("recv") else dist.get_process_group_ranks(group)

    def _telling(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        """Torch's `broadcast`, `isend` or `irecv`, which tells values."""
        signature = inspect.signature(exchange)

        @functools.wraps(exchange)
        def told(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            tensor, group = given["tensor"], given.get("group")
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous()
            if not plain or not 0 < tensor.nbytes <= SMALL_BYTES or dist.get_rank(group) < 0:
                return exchange(*args, **kwargs)
            giver, to = self._ends(exchange.__name__, given)
            word = self._words.numbered(f"tensor from {giver} to {to}")
            if giver == self._rank:
                self._words.say(word, self._known(tensor))
            done = exchange(*args, **kwargs)
            if giver == self._rank:
                return done
            what, at, size = f"reads a tensor that rank {giver} gives", tensor.data_ptr(), tensor.nbytes
            if tensor.device.type == "cpu":
                ctypes.memmove(at, self._words.hear(giver, word, what), size)
            else:
                number = self._words.later(giver, word, what, at)
                self._driver.null_told(ctypes.c_void_p(at), bytes(size), ctypes.c_size_t(size), number)
            return done

        return told

    def _known(self, tensor: torch.Tensor) -> bytes:
        at, size, read = tensor.data_ptr(), tensor.nbytes, self._driver.null_read
        values = ctypes.create_string_buffer(size)
        if tensor.device.type == "cpu":
            ctypes.memmove(values, at, size)
        else:  # its beginning, as far as somebody wrote that
            size = bisect_left(range(size), True, key=lambda n: read(at, values, n + 1) <= 0)
        return values.raw[:size]


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _on_cpus(store: Any, rank: int, size: int, *_: Any, **__: Any) -> Any:
    """The group of CPUs that gloo would make: torch's own that does nothing, so that a sum is what this rank adds."""
    options = FakeProcessGroup.Options()
    if hasattr(options, "simulate_uniform_ranks"):
        options.simulate_uniform_ranks = True
    return FakeProcessGroup._create_internal(rank, size, options)


def _telling_sizes(make: Callable[..., Any], count: Callable[..., int], driver: Any) -> Callable[..., Any]:
    """What makes a group, which tells the driver how many ranks (by the arguments) the group has while it does."""

    def made(*args: Any, **given: Any) -> Any:
        if builder := sys.modules.get("deepspeed.ops.op_builder.builder"):
            idle = type("Idle", (), {"__getattr__": lambda *_: lambda *_, **__: None})
            builder.OpBuilder._loaded_ops |= dict.fromkeys(_STEPS, idle())
        driver.null_split_ranks(count(*args))
        try:
            return make(*args, **given)
        finally:
            driver.null_split_ranks(0)

    return made
