"""The report of a node: the diagnoses of its devices in one file."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal, Self

from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.diagnoses import DiagnosisFile, LocatedFault, Untested
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.config.diagnosis import DiagnosisMethod

Outcome = Literal["healthy", "fault", "abstain", "error"]
"""The verdict on a device; error if it could not be diagnosed at all."""

EXIT_CODES: dict[Outcome, int] = {"fault": 3, "error": 2, "abstain": 4, "healthy": 0}
"""Exit codes, worst first: a fault of one device is never hidden by what happened to another."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: fault, then error, then abstain; healthy only if every device is healthy."""
    return min(outcomes, key=list(EXIT_CODES).index)


class DeviceReport(Artifact):
    """One device of a node: its identity, the verdict with its reason, and the parts that were not tested."""

    device: str = Field(description="torch's name of the device, as in cuda:0")
    hardware: Hardware | None = Field(description="null if the device could not be used at all")
    verdict: Outcome
    reason: str
    faults: tuple[LocatedFault, ...] = ()
    untested: tuple[Untested, ...] = Field(default=(), description="what was not tested")
    forward_equivalents: float = Field(default=0.0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    temperature_after_celsius: float | None = None
    log: str | None = Field(default=None, description="null if the log was not kept")

    @classmethod
    def of(cls, file: DiagnosisFile, device: str, celsius: float | None = None) -> Self:
        """Return the report of `device`, whose diagnosis is `file`; `celsius` is its temperature afterwards."""
        return cls(
            device=device,
            hardware=file.hardware,
            verdict=file.verdict,
            reason=file.reason,
            faults=file.faults,
            untested=file.untested,
            forward_equivalents=file.forward_equivalents,
            seconds=file.seconds,
            temperature_after_celsius=celsius,
        )


class NodeReport(Artifact):
    """Output of `aqnpipe diagnose` for several devices (--devices) or a history."""

    time: datetime = Field(description="start, UTC")
    host: str
    verdict: Outcome
    exit_code: int
    model: str
    dtype: str
    attention: str
    method: DiagnosisMethod
    seed: int
    versions: dict[str, str]
    seconds: float = Field(ge=0)
    devices: tuple[DeviceReport, ...]
