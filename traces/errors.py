"""Every way in which Lowtide says no: what is wrong, where, and what to do next.

Exit codes: 1 means that the question was understood and the answer is no (the budget cannot be met, a
verification failed); 2 means that the input or the environment is wrong.
"""

from __future__ import annotations

from typing import Final

# How torch, the CUDA libraries and Python say that memory ran out.
SIGNS: Final = (
    "out of memory",
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "cudaErrorMemoryAllocation",
    "std::bad_alloc",
)


class LowtideError(Exception):
    """Base of all errors that a user can cause; the message is complete and needs no traceback."""

    exit_code = 2


class TraceError(LowtideError):
    """A trace file is missing, truncated, foreign, or contradicts itself."""


class PlanError(LowtideError):
    """A plan is malformed, belongs to another trace, or asks for something that cannot be recomputed."""


class SpecError(LowtideError):
    """A model name, a build function, an option or a budget does not mean anything."""


class CaptureError(LowtideError):
    """A model's training step could not be captured as a graph."""


class OptimizerError(CaptureError):
    """A model's optimizer could not be captured; the step without it may be."""


class EnvironmentProblem(LowtideError):
    """Something that this machine lacks: torch, a GPU, an optional package."""


class OutOfMemoryProblem(EnvironmentProblem):
    """A process needed more memory than the device has."""


class BudgetError(LowtideError):
    """No plan keeps the peak within the budget."""

    exit_code = 1


class VerificationError(LowtideError):
    """A rewritten model did not compute what the original computes."""

    exit_code = 1


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error, or one behind it, says that memory ran out."""
    seen: set[int] = set()
    here: BaseException | None = error
    while here is not None and id(here) not in seen:
        said = isinstance(here, RuntimeError) and any(sign in str(here) for sign in SIGNS)
        if said or isinstance(here, MemoryError) or type(here).__name__ == "OutOfMemoryError":
            return True
        seen.add(id(here))
        here = here.__cause__ or here.__context__
    return False
