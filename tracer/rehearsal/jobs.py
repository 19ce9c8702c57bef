"""Read how a distributed job is started, by `torchrun` or `accelerate launch`, without starting anything."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final

from traces.errors import EnvironmentProblem, SpecError
from traces.units import MIB

GPUS: Final = 8  # of a machine, unless told otherwise
# What a communicator takes of the GPU's memory, by its ranks: 544 and 688 MiB on four A100 with NVLink, after an all-
# reduce of 4 MB (NVIDIA/nccl#964). The first message between two ranks connects them: 3.28 GB for seven peers in the
# first all-to-all of eight H100, 32 channels each (NVIDIA/nccl#1685); more channels take more. One talks to nobody.
COMMUNICATOR_BYTES: Final = {"ONE": 0, "TWO": 544 * MIB, "MORE": 688 * MIB, "PEER": 447 * MIB}
_STARTS: Final = re.compile(
    r"(\S*/)?((?P<torch>torchrun|python[\d.]* -m torch\.distributed\.run)|"
    r"accelerate[- ]launch|python[\d.]* -m accelerate\.commands\.launch)( |$)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A distributed program: so many ranks, evenly on so many machines."""

    ranks: int
    nodes: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)  # that the launcher sets beside ranks

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.nodes < 1 or self.ranks % self.nodes:
            raise SpecError(f"{self.ranks} ranks cannot be divided evenly among {self.nodes} machines.")

    @property
    def local_ranks(self) -> int:
        """On one machine."""
        return self.ranks // self.nodes

    def variables(self, rank: int) -> dict[str, str]:
        """The environment of one rank, as torchrun sets it. Raises SpecError: there is no such rank."""
        if not 0 <= rank < self.ranks:
            raise SpecError(f"there is no rank {rank} among {self.ranks}; they count from 0.")
        node, local = divmod(rank, self.local_ranks)
        return {
            **self.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.local_ranks),
            "GROUP_RANK": str(node),
            "GROUP_WORLD_SIZE": str(self.nodes),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            # Nothing fails, and no thread has to look whether it did.
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            **{f"LOWTIDE_NULL_NCCL_{k}": str(v) for k, v in COMMUNICATOR_BYTES.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a launcher would start: a script or a module with its arguments, on so many ranks (0: not said)."""

    program: str
    module: bool
    arguments: tuple[str, ...]
    ranks: int
    nodes: int
    environment: Mapping[str, str] = field(default_factory=dict)


def jobs_of(
    launch: Launch | None, ranks: Sequence[int], rank: Sequence[int], nodes: int | None
) -> Sequence[tuple[Job | None, int]]:
    """Return which rank of which job to rehearse, in turn; (None, 0) where there is no job. Raises SpecError: they
    contradict each other, or nobody says how many ranks there are."""
    sizes = ranks or ((launch.ranks,) if launch else ())
    if not sizes:
        if rank or nodes:
            raise SpecError(
                "--rank and --nodes belong to a distributed job; say with --ranks how many ranks it has."
            )
        return [(None, 0)]
    if 0 in sizes:
        raise SpecError("the line does not say how many ranks it starts; say it with --ranks.")
    given = nodes or (launch.nodes if launch and not ranks else 0)
    made = [
        Job(ranks=n, nodes=given or -(-n // GPUS), environment=launch.environment if launch else {})
        for n in sizes
    ]
    pairs = [(job, number) for job in made for number in rank or (0,)]
    for job, number in pairs:
        job.variables(number)  # refuses what there is not
    return pairs


def launch_of(words: Sequence[str], *, distributed: bool) -> Launch | None:
    """Read a command line that starts a distributed program; None if it is not one.

    `torchrun ...`, `accelerate launch ...` and both as modules of `python` are read by their own parsers.
    `python ...` is one if the job is `distributed`. Raises SpecError: they do not understand it; EnvironmentProblem:
    the launcher is not installed.
    """
    if start := _STARTS.match(" ".join(words)):
        return (_torchrun if start["torch"] else _accelerate)(words[len(start[0].split()) :])
    first, *rest = words
    if first != "python" or not distributed or not rest:
        return None
    module = rest[0] == "-m"
    program, *arguments = rest[module:]
    return Launch(program=program, module=module, arguments=tuple(arguments), ranks=0, nodes=1)


def _launch(found: Any, ranks: int, nodes: int, **more: Any) -> Launch:
    """What a launcher's parser found."""
    program, given = found.training_script, tuple(found.training_script_args)
    return Launch(program=program, module=found.module, arguments=given, ranks=ranks, nodes=nodes, **more)


def _torchrun(words: Sequence[str]) -> Launch:
    from torch.distributed.run import get_args_parser

    found = _parsed(get_args_parser().parse_args, words, "torchrun")
    if found.no_python:
        raise SpecError(
            "torchrun --no-python starts a program that is not Python; rehearse the script that it runs."
        )
    each, nodes = str(found.nproc_per_node), int(str(found.nnodes).rpartition(":")[2])
    return _launch(found, int(each) * nodes if each.isdecimal() else 0, nodes)


def _accelerate(words: Sequence[str]) -> Launch:
    try:
        launch = import_module("accelerate.commands.launch")
    except ImportError:
        raise EnvironmentProblem(
            "the line starts with `accelerate launch`, and accelerate is not installed here; pip install accelerate."
        ) from None
    found = _parsed(launch.launch_command_parser().parse_args, words, "accelerate launch")
    found, file, of_file = launch._validate_launch_command(found)
    fields = [*(file.deepspeed_config if file else ()), *["mixed_precision"] * of_file]
    found.deepspeed_fields_from_accelerate_config = ",".join(fields)
    deep = found.use_deepspeed
    given = launch.prepare_deepspeed_cmd_env(found)[1] if deep else launch.prepare_multi_gpu_env(found)
    environment = {k: v for k, v in given.items() if os.environ.get(k) != v}
    return _launch(found, found.num_processes or 0, found.num_machines or 1, environment=environment)


def _parsed(parse: Callable[[Sequence[str]], Any], words: Sequence[str], launcher: str) -> Any:
    try:
        return parse(list(words))
    except SystemExit:  # it has told why
        raise SpecError(f"{launcher} does not understand its arguments {' '.join(words)}.") from None
