"""The report of a node: the diagnoses of several devices, or of repeated runs, in one file."""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.diagnoses import LocatedFault, Untested
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.config.diagnosis import DiagnosisMethod

Outcome = Literal["healthy", "fault", "abstain", "error"]
"""The verdict on a device; error if it could not be diagnosed at all."""

EXIT_CODES: dict[Outcome, int] = {"fault": 3, "error": 2, "abstain": 4, "healthy": 0}
"""Exit codes, worst first: a fault of one device is never hidden by what happened to another."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: fault, then error, then abstain; healthy only if every device is healthy."""
    return min(outcomes, key=list(EXIT_CODES).index)


class RunRecord(Artifact):
    """One run of repeated diagnoses: its seed and shapes, and where it found faults as (layer, site)."""

    time: datetime
    seconds: float = Field(ge=0)
    seed: int
    num_prompts: int
    prompt_tokens: int = Field(description="tokens of a prompt; 0 if the prompts are text")
    elements_per_channel: int | None
    forward_equivalents: float = Field(ge=0)
    verdict: Literal["healthy", "fault", "abstain"]
    faults: tuple[tuple[int | None, str], ...]
    temperature_celsius: float | None = None


class Rate(Artifact):
    """A share of the runs, with its exact 95 % interval (Clopper-Pearson); one-sided if it was never seen."""

    seen: int = Field(ge=0)
    runs: int = Field(ge=1)
    rate: float = Field(ge=0, le=1)
    low: float = Field(ge=0, le=1)
    high: float = Field(ge=0, le=1)


class SiteRate(Artifact):
    """How often runs found a fault at one site; layer and scope as in `LocatedFault`."""

    layer: int | None
    scope: Literal["layer", "device", "model"]
    site: str
    type: str
    rate: Rate


class Repetition(Artifact):
    """Result of repeated runs. `any_other_site` bounds the rate of faults at a site at which no run found one."""

    faulty: Rate
    sites: tuple[SiteRate, ...]
    any_other_site: Rate
    interrupted: bool
    runs: tuple[RunRecord, ...]


class DeviceReport(Artifact):
    """One device of a node: its identity, the verdict with its reason, and the parts that were not tested."""

    device: str = Field(description="torch's name of the device, as in cuda:0")
    hardware: Hardware | None = Field(description="null if the device could not be used at all")
    verdict: Outcome
    reason: str
    faults: tuple[LocatedFault, ...] = ()
    untested: tuple[Untested, ...] = Field(default=(), description="what no run tested")
    forward_equivalents: float = Field(default=0.0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    temperature_after_celsius: float | None = None
    repetition: Repetition | None = Field(default=None, description="null unless the runs were repeated")
    log: str | None = Field(default=None, description="null if the log was not kept")


class NodeReport(Artifact):
    """Output of `aqnpipe diagnose` for several devices (--devices), repeated runs (--duration) or a history."""

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
