"""Files of a diagnosis: the table of layers, the verdict, and the AQN sigmas derived from it.

Also the report of a node, with the diagnoses of several devices or of repeated runs, and the sensitivity of layers.
"""

from collections.abc import Iterable
from datetime import datetime
from typing import Literal

import pandera.polars as pa
from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.artifacts.files import Table
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.config.diagnosis import DiagnosisMethod
from aqnpipe.config.noise import LayerSigmas

FaultKind = Literal["dead_zone", "saturation", "noise", "bias", "spike", "gain", "stuck", "other"]
"""Type of a detected fault: the simulated types, and gain, stuck and other, which only occur on real devices."""

SENSITIVITY_SCALE = 0.1
"""Relative scale of the noise that `sensitivity` in a LayerTable is of; the estimate is proportional to its square."""

_SHOWN = 8
"""Columns of a kernel that are listed in words."""

Outcome = Literal["healthy", "fault", "abstain", "error"]
"""The verdict on a device; error if it could not be diagnosed at all."""


class LayerTable(Table, unique=("layer",)):
    """results/srdd/<model>/<machine>/layers.parquet: one decoder layer per row, each layer run by itself.

    - instability: mean over prompts of std(out_i - out_0), absolute.
    - gain: std(output change) / std(input noise).
    - kurtosis: Fisher kurtosis of the flattened output.
    - *_z: robust z-scores (null where undefined).
    - sensitivity: first-order estimate of what noise of 10 % on the matrix products of the layer adds to the loss, in
      nats per token of gold solutions; null without questions to measure it on.
    - role: `source` is a layer that is shown to clamp, `sat_prop` a layer downstream of it with reduced kurtosis.
    """

    layer: int = pa.Field(ge=0)
    instability: float = pa.Field(ge=0)
    instability_jump_z: float = pa.Field(nullable=True)
    gain: float = pa.Field(ge=0)
    gain_z: float
    kurtosis: float
    log_kurtosis_drop_z: float = pa.Field(nullable=True)
    sensitivity: float = pa.Field(ge=0, nullable=True)
    role: str = pa.Field(isin=["healthy", "source", "sat_prop"])


class Finding(Artifact):
    """A layer flagged by one statistical scan, and its z-score.

    ambient, gain and kurtosis are the published scans; kurtosis_rise is the opposite direction of kurtosis.
    """

    scan: Literal["ambient", "gain", "kurtosis", "kurtosis_rise"]
    layer: int
    type: Literal["noise_or_spike", "dead_zone", "saturation", "bias_or_spike"]
    z: float


class FaultBits(Artifact):
    """A fault in bits: one wrong value and the right one, and how often each bit is flipped in all wrong values."""

    expected: str  # hexadecimal, in the dtype of the model
    observed: str
    xor_mask: str  # hexadecimal; 1 where the two differ
    flipped: dict[int, int]  # number of wrong values by flipped bit, 0 being the least significant
    values: int  # number of wrong values in the histogram


class TilePlace(Artifact):
    """A period of the faulty channels: channel modulo `width` is one of `offsets`, and all of those are faulty."""

    width: int
    offsets: tuple[int, ...]


class KernelFault(Artifact):
    """An operator of the device with wrong results: which output columns and rows, in how many of its calls.

    `shapes`: rows x columns x terms of products, else the shape of the result; `columns` are of the widest result.
    """

    operator: str  # name of torch's operator, such as addmm
    shapes: tuple[str, ...]
    dtype: str
    columns: tuple[int, ...]  # wrong output columns
    num_columns: int
    column_tile: TilePlace | None  # null if the wrong columns have no period
    row_tile: TilePlace | None  # null if the wrong rows have no period
    wrong_calls: int
    calls: int  # calls that were computed again on the host, of all shapes with these columns

    def wrong_columns(self, width: int) -> tuple[int, ...]:
        """Return the columns that are wrong in a result with `width` columns."""
        tile = self.column_tile
        return tuple(c for c in range(width) if (c in self.columns if tile is None else c % tile.width in tile.offsets))

    def explains(self, other: "KernelFault") -> bool:
        """Return whether both are the same lanes of one operator, in results of any width up to this one's."""
        same = (self.operator, self.dtype) == (other.operator, other.dtype)
        return same and set(other.columns) <= set(self.wrong_columns(other.num_columns))

    def with_calls_of(self, other: "KernelFault") -> "KernelFault":
        """Return this fault with the shapes and calls of another that is the same."""
        calls = {"wrong_calls": self.wrong_calls + other.wrong_calls, "calls": self.calls + other.calls}
        return self.model_copy(update={"shapes": self.shapes + other.shapes, **calls})

    @property
    def in_words(self) -> str:
        """As in: addmm 256x128x512 bfloat16, output columns 13, 45 of every 64, in 112 of 112 calls."""
        offsets, width = self.columns, f"{self.num_columns}"
        if self.column_tile:
            offsets, width = self.column_tile.offsets, f"every {self.column_tile.width}"
        shown = ", ".join(map(str, offsets[:_SHOWN])) + (", ..." if len(offsets) > _SHOWN else "")
        columns = "all" if len(self.columns) == self.num_columns else f"{shown} of {width}"
        rows, more = "", len(self.shapes) - 1
        if self.row_tile:
            rows = f", rows {', '.join(map(str, self.row_tile.offsets))} of every {self.row_tile.width}"
        shapes = self.shapes[0] + (f" (and {more} other shape{'s' if more > 1 else ''})" if more else "")
        lanes = f"output columns {columns}{rows}, in {self.wrong_calls} of {self.calls} calls"
        return f"{self.operator} {shapes} {self.dtype}, {lanes}"


class LocatedFault(Artifact):
    """One detected fault: its place, type, channels and magnitude, and the probes that detected it."""

    layer: int | None = Field(ge=0)  # null if most layers share the fault, or if it is outside the layers
    site: str  # FaultSite, attention_core or mlp_core; layer if only the layer is known
    scope: Literal["layer", "device", "model"] = "layer"
    """device: the same channels are wrong in most layers; model: a module before or after the layers"""
    layers: tuple[int, ...] = ()  # layers in which the fault was seen
    type: FaultKind
    num_faulty_channels: int | None = Field(ge=1)
    """number of faulty output channels; null where the method cannot count them"""
    faulty_channel_indices: tuple[int, ...]
    num_channels: int | None
    magnitude: float | None  # m as in noise/injection/faults.py
    magnitude_low: float | None  # lower end of the interval of the magnitude
    magnitude_high: float | None  # upper end of the interval of the magnitude
    threshold: Literal["dynamic", "cached"] | None  # dynamic: relative to each call; cached: relative to the first call
    probes: tuple[str, ...]
    evidence: str
    bits: FaultBits | None = None  # null if the values are not known
    rate_per_call: float | None = None  # share of `calls` with a wrong value; not every probe shows every fault
    calls: int | None = None
    """compared calls: with a known answer, and repeats if they differ; null for weights in memory"""
    tile: TilePlace | None = None  # null if the faulty channels have no period

    @property
    def channels(self) -> tuple[int, ...]:
        """Indices of the faulty output channels."""
        return self.faulty_channel_indices


class Untested(Artifact):
    """A part of the model or the device that a diagnosis did not test, and why."""

    part: str
    layers: tuple[int, ...] = ()  # empty if it is not a matter of layers
    reason: str


class DiagnosisOrigin(Artifact):
    """Model and machine of a verdict in the study, digests of the weights and of the layers.parquet beside it.

    `imported_from`: folder, model and machine of a diagnosis made elsewhere; null for one made here. `device`: what it
    ran on, as in run.json; absent if it was the device of the whole study.
    """

    model: str
    machine: str
    weights_sha256: str
    layers_sha256: str
    imported_from: str | None = None
    device: str | None = Field(default=None, exclude_if=lambda device: device is None)


class Verdict(Artifact):
    """results/srdd/<model>/<machine>/verdict.json: the result of a diagnosis.

    `layer`, `type`, `site` and `num_faulty_channels` are those of the first of `faults`; `layer` is null if most
    layers share the fault. An intermittent fault of a probed site that occurs
    with `intermittent_rate` per element is missed with `miss_probability`, one that strikes a share
    `detected_call_rate` of the calls with 5 %. `untested` lists what no known answer covers. `false_alarm_bound` is the
    95 % upper bound of the share of healthy machines called faulty, null for classes of device on which it was not
    measured.
    """

    verdict: Literal["healthy", "fault", "abstain"]
    reason: str
    layer: int | None
    type: str | None
    site: str | None = None
    num_faulty_channels: int | None = None
    faults: tuple[LocatedFault, ...] = ()
    kernels: tuple[KernelFault, ...] = ()
    """operators of the device that err, most wrong calls first; `faults` are the evidence"""
    findings: tuple[Finding, ...]
    method: DiagnosisMethod = "all"
    untested: tuple[Untested, ...] = ()  # what the exact probes did not test
    reordered_sites: tuple[str, ...] = ()
    """sites that add in another order in every call, within the error bound of their sum"""
    elements_per_channel: int | None = None  # values probed on every channel of every probed site, at least
    intermittent_rate: float | None = None
    miss_probability: float | None = None
    calls_per_site: int | None = None  # calls of every probed site, at least
    detected_call_rate: float | None = None  # share of calls that a fault must strike to be missed with 5 % at most
    false_alarm_bound: float | None = None
    forward_equivalents: float = Field(ge=0)  # cost in forwards of the whole model
    exact_forward_equivalents: float = 0.0
    statistical_forward_equivalents: float = 0.0
    num_layers: int
    simulated_faults: tuple[dict[str, object], ...] = ()
    """simulated faults of the machine and the elements they changed, for judging the verdict"""
    origin: DiagnosisOrigin | None = None  # null outside a study


class LayerMetrics(Artifact):
    """Measurements of one layer: counts of the exact probes, and a row of LayerTable if the scans ran."""

    layer: int = Field(ge=0)
    sites_probed: int = Field(default=0, ge=0)
    elements_probed: int = Field(default=0, ge=0)
    elements_per_channel: int = Field(default=0, ge=0)
    faulty_sites: tuple[str, ...] = ()
    largest_deviation: float | None = None
    """relative; null if exact probes did not run or a wrong value is NaN or infinite"""
    scans: dict[str, float | str | None] | None = None


class DiagnosisFile(Verdict):
    """Output of `aqnpipe diagnose --json`: the verdict, what was tested where and when, the metrics of every layer."""

    model: str
    weights_sha256: str | None = None  # of the files that the model was loaded from; null without files
    device: str
    dtype: str
    attention: str
    seed: int
    time: datetime  # start, UTC
    host: str
    hardware: Hardware
    versions: dict[str, str]
    seconds: float = Field(ge=0)
    layers: tuple[LayerMetrics, ...]

    @property
    def cost(self) -> float:
        """Cost in forwards of the whole model."""
        return self.forward_equivalents


class SigmaFile(Artifact):
    """results/srdd/<model>/<machine>/sigmas.yaml: the sigma of each layer, the reason for it, and its diagnosis."""

    aqn: LayerSigmas
    reasons: dict[int, str]
    srdd_metadata: dict[str, int | float | str]


class LayerSensitivity(Artifact):
    """Cost of noise in one layer alone. Standard errors are over texts, each averaged over the noise seeds.

    A standard error is null with a single text; the accuracy is null without gold answers.
    """

    layer: int | None = Field(ge=0)  # decoder layer; null for the output projection
    estimate: float = Field(ge=0)  # first-order estimate of loss_increase, from one backward pass
    loss_increase: float  # measured increase of the loss, in nats per scored token
    loss_standard_error: float | None = Field(ge=0)
    accuracy_change: float | None  # measured change of the accuracy, as a fraction
    accuracy_standard_error: float | None = Field(ge=0)


class Sensitivity(Artifact):
    """Result of a sensitivity measurement: loss and accuracy without noise, and every layer with noise in it alone.

    `fragile_layers` are the decoder layer with the largest measured increase of the loss and those that cannot be told
    from it (paired t-tests over texts, 5 % in all, Bonferroni); empty if no increase is significant.
    """

    scale: float = Field(gt=0, lt=1)  # relative scale of the noise on the outputs of matrix products
    noise_seeds: tuple[int, ...]
    num_texts: int
    num_scored_tokens: int
    num_questions: int  # number of texts with a gold answer, on which accuracy was measured
    loss: float  # loss without noise, in nats per scored token
    accuracy: float | None  # accuracy without noise, as a fraction; greedy decoding, strict scorer
    fragile_layers: tuple[int, ...]
    rank_correlation: float | None  # Spearman's, of estimate and loss_increase over decoder layers; null below 3 layers
    layers: tuple[LayerSensitivity, ...]
    untested: tuple[str, ...]  # matrices outside the layers and output projection, never noised


class SensitivityFile(Sensitivity):
    """Output of `aqnpipe sensitivity --json`: the result, and the model, data and device that it is of."""

    model: str
    data: str
    simulated_faults: tuple[str, ...] = ()
    device: str
    dtype: str
    seconds: float = Field(ge=0)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the worst outcome: fault, then error, then abstain; healthy only if every device is healthy."""
    return min(outcomes, key=list(EXIT_CODES).index)


class RunRecord(Artifact):
    """One run of repeated diagnoses: its seed and shapes, and where it found faults as (layer, site)."""

    time: datetime
    seconds: float = Field(ge=0)
    seed: int
    num_prompts: int
    prompt_tokens: int  # tokens of a prompt; 0 if the prompts are text
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

    device: str  # torch's name of the device, as in cuda:0
    hardware: Hardware | None  # null if the device could not be used at all
    verdict: Outcome
    reason: str
    faults: tuple[LocatedFault, ...] = ()
    kernels: tuple[KernelFault, ...] = ()
    untested: tuple[Untested, ...] = ()  # what no run tested
    forward_equivalents: float = Field(default=0.0, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    temperature_after_celsius: float | None = None
    repetition: Repetition | None = None  # null unless the runs were repeated
    log: str | None = None  # null if the log was not kept


class WrongCollective(Artifact):
    """Wrong elements of the results of one collective on one rank."""

    collective: str
    rank: int  # place in `devices` of the node
    device: str
    dtype: str
    sizes: tuple[int, ...]  # elements of the results of which some are wrong
    wrong_elements: int
    first_index: int  # first wrong element of the first wrong result, which has sizes[0] elements
    expected: str  # value of this element, with all digits
    observed: str
    wrong_calls: int
    calls: int

    @property
    def in_words(self) -> str:
        """As in: all_reduce in bfloat16, result of rank 1 (cuda:1): 8 elements wrong in 4 of 41 calls, first ..."""
        place = f"first at index {self.first_index:,} of {self.sizes[0]:,}"
        values = f"expected {self.expected}, observed {self.observed}"
        wrong = f"{self.wrong_elements:,} elements wrong in {self.wrong_calls} of {self.calls} calls"
        return (
            f"{self.collective} in {self.dtype}, result of rank {self.rank} ({self.device}): {wrong}, {place}: {values}"
        )


class Collectives(Artifact):
    """Collectives between the devices of a node, a process each, compared with results of the host in every element."""

    verdict: Outcome | None  # null if they were not tested; `reason` says why
    reason: str
    calls: int = 0  # compared calls of every rank
    faults: tuple[WrongCollective, ...] = ()
    simulated_faults: tuple[dict[str, object], ...] = ()


class NodeReport(Artifact):
    """Output of `aqnpipe diagnose` for several devices (--devices), repeated runs (--duration) or a history."""

    time: datetime  # start, UTC
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
    collectives: Collectives | None = None  # null in files of earlier versions


EXIT_CODES: dict[Outcome, int] = {"fault": 3, "error": 2, "abstain": 4, "healthy": 0}
"""Exit codes, worst first: a fault of one device is never hidden by what happened to another."""
