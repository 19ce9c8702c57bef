"""The records of a campaign, all in one JSON file, and what tells whether one is of the case that is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final

from executor.campaign.cases import Case, Method, digest
from traces.errors import TraceError
from traces.files.json_records import Form, JsonRecord, to_json
from traces.model_spec import source_digest
from traces.provenance import MEASURED_CPU, PROVENANCES, REHEARSED, own_files
from traces.records.measurement import RunFigures, check_rehearsed

DONE: Final = "measured"
DONE_ABSENT: Final = "rehearsed"  # on a GPU that is not there: memory alone
INFEASIBLE: Final = "infeasible"
OUT_OF_MEMORY: Final = "out of memory"
NOT_EQUAL: Final = "verification failed"
FAILED: Final = "failed"
STATUSES: Final = (DONE, DONE_ABSENT, INFEASIBLE, OUT_OF_MEMORY, NOT_EQUAL, FAILED)
RETRIED: Final = (NOT_EQUAL, FAILED)  # by the same command; the others are answers

# What a prediction is made from, each with what the one before it has.
RULES, CALIBRATED = "rules", "calibrated"
STAGES: Final = (RULES, CALIBRATED)
BOOK: Final = "campaign.json"

Predictions = Mapping[str, RunFigures]  # stage -> figures; a stage that the device does not have is left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What came out of one case. Figures that are not there were not measured or not predicted."""

    case: Case
    key: str
    status: str
    provenance: str
    environment: Mapping[str, str]
    message: str = ""  # why, where the status is not `measured`
    notes: tuple[str, ...] = ()
    fingerprint: str = ""
    keep_all_predicted: Predictions = field(default_factory=dict)
    eager_predicted: Predictions = field(default_factory=dict)  # the untouched loop
    predicted: Predictions = field(default_factory=dict)  # with the plan; of a keep-all case the same again
    # What `simulate` says beside each of the two predictions that it can make: rules (uncalibrated) and calibrated.
    keep_all_warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    warnings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    budget_bytes: int | None = None
    recomputed_ops: int | None = None
    eager: RunFigures = field(default_factory=RunFigures)
    keep_all: RunFigures = field(default_factory=RunFigures)
    measured: RunFigures = field(default_factory=RunFigures)
    verified: bool | None = None
    bit_equal: bool | None = None
    first_difference: str = ""
    steps: int = 0  # that were verified
    seconds: float = 0.0
    finished: str = ""  # UTC

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"the status {self.status!r} is none of {', '.join(STATUSES)}")
        if self.provenance not in PROVENANCES:
            raise ValueError(f"the provenance {self.provenance!r} is none of {', '.join(PROVENANCES)}")
        # A figure of a CPU must never pass for a GPU's.
        if (self.provenance != MEASURED_CPU) != bool(self.environment.get("gpu")):
            raise ValueError(f"the provenance is {self.provenance}, and the environment says otherwise")
        runs = (self.eager, self.keep_all, self.measured)
        check_rehearsed(self.provenance, self.environment, self.verified, *runs)
        if self.status in (DONE, DONE_ABSENT) and (self.status == DONE) != (self.provenance != REHEARSED):
            raise ValueError(f"the status is {self.status}, and the provenance {self.provenance}")
        if self.provenance == MEASURED_CPU and any(
            f.peak_reserved_bytes is not None or f.peak_block_bytes is not None for f in runs
        ):
            raise ValueError("reserved memory was measured on a CPU, which has none")

    @property
    def place(self) -> str:
        """What the measured figures were measured on: `CPU`, or the GPU's name."""
        return self.environment.get("gpu") or "CPU"

    @property
    def peak(self) -> int | None:
        """The measured peak of allocated bytes; None: it was not measured."""
        return self.measured.peak_allocated_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Book(JsonRecord):
    """All records of a campaign, in the order of its cases: `campaign.json`."""

    form: ClassVar = Form(
        name="campaign",
        version_key="record_version",
        version=2,
        advice="`execute campaign CASES -o DIR` writes DIR/campaign.json",
        error=TraceError,
    )
    name: str
    asked: int  # cases in the file; more than `records` while some are outstanding
    method: Method
    records: tuple[Record, ...] = ()

    @classmethod
    def of_directory(cls, root: Path) -> Book | None:
        """The campaign in a directory; None: it is absent or empty. Raises TraceError if it holds something else."""
        if (root / BOOK).is_file():
            return cls.load(root / BOOK)
        if root.exists() and not root.is_dir():
            raise TraceError(f"{root}: a file; give a directory with -o.")
        if root.exists() and any(root.iterdir()):
            raise TraceError(
                f"{root}: holds something else than a campaign; give an empty or new directory with -o."
            )
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Keys:
    """What the names of records are made from, beside the case: method, code, and the device with its versions."""

    method: Method
    code: str
    environment: Mapping[str, str]

    def of_case(self, case: Case) -> str:
        method = {k: v for k, v in to_json(self.method).items() if k not in ("device", "timeout_minutes")}
        told = {"case": to_json(case), "source": source_digest(case.step.model), "method": method}
        return digest({**told, "code": self.code, "environment": dict(self.environment)})


def code_digest() -> str:
    """A digest of Lowtide's own code and tables: what another code measured is another case's record."""
    return digest([(p.name, p.read_text(encoding="utf-8")) for p in own_files(".py", ".toml")])
