"""What a diagnosis hands on: its layers, its verdict, and the sigmas that are made of it."""

from typing import Literal

import pandera.polars as pa
from pydantic import Field

from aqnpipe.artifacts.base import Artifact
from aqnpipe.config.diagnosis import DiagnosisMethod


class LayerTable(pa.DataFrameModel):
    """results/srdd/<model>/<machine>/layers.parquet: one decoder layer per row, each layer run alone.

    instability: mean over prompts of std(out_i - out_0), absolute. gain: std(output change)/std(input noise).
    kurtosis: Fisher kurtosis of the flattened output. z columns are robust z-scores (null where undefined).
    changed_share: share of values that differ between repeats, among channels where any does (0 if none).
    zero_share: share of values that are exactly 0. values_at_maximum: values per call that are exactly as large as the
    largest (1 is healthy). pile_up: -log10 of the chance that so many values inside the range are exactly equal, after
    correction for looking everywhere. role: source is a layer proven to clamp, sat_prop a layer downstream with lowered
    kurtosis.
    """

    layer: int = pa.Field(ge=0, unique=True)
    instability: float = pa.Field(ge=0)
    instability_jump_z: float = pa.Field(nullable=True)
    gain: float = pa.Field(ge=0)
    gain_z: float
    kurtosis: float
    log_kurtosis_drop_z: float = pa.Field(nullable=True)
    changed_share: float = pa.Field(ge=0, le=1)
    zero_share: float = pa.Field(ge=0, le=1)
    values_at_maximum: float = pa.Field(ge=1)
    pile_up: float = pa.Field(ge=0)
    role: str = pa.Field(isin=["healthy", "source", "sat_prop"])

    class Config:
        """Columns as declared, nothing else."""

        strict = True


class Finding(Artifact):
    """One statistical scan's opinion: which layer, and how far beyond its threshold.

    ambient, gain and kurtosis are the published scans, kurtosis_rise the other direction of the last; repeat, zeros,
    clamp and pile_up count traces that healthy layers next to never leave.
    """

    scan: Literal["ambient", "gain", "kurtosis", "kurtosis_rise", "repeat", "zeros", "clamp", "pile_up"]
    layer: int
    type: Literal["noise_or_spike", "noise", "spike", "dead_zone", "saturation", "bias_or_spike"]
    z: float


class LocatedFault(Artifact):
    """One fault that was found: where, what, on which channels, how strong, and which probes saw it."""

    layer: int = Field(ge=0)
    site: str = Field(description="site of config.noise.FaultSite, attention_core or mlp_core; layer if not resolved")
    type: Literal["dead_zone", "saturation", "noise", "bias", "spike", "gain", "stuck", "other"]
    num_faulty_channels: int | None = Field(
        ge=1, description="number of faulty output channels; null where the method cannot tell"
    )
    faulty_channel_indices: tuple[int, ...]
    num_channels: int | None
    magnitude: float | None = Field(description="m as in noise/faults.py, relative to the reference of its type")
    magnitude_low: float | None = Field(description="the magnitude lies between low and high")
    magnitude_high: float | None
    threshold: Literal["dynamic", "cached"] | None = Field(description="whether the reference follows each call")
    probes: tuple[str, ...]
    evidence: str


class DiagnosisOrigin(Artifact):
    """What a verdict is of: names in the study, digests of the model's weights and of the layers.parquet beside it."""

    model: str
    machine: str
    weights_sha256: str
    layers_sha256: str


class Verdict(Artifact):
    """results/srdd/<model>/<machine>/verdict.json: what the diagnosis found.

    `layer`, `type`, `site` and `channels` are those of the first of `faults`. Exact probes decide where they ran. A fault
    that strikes by chance with `intermittent_rate` per element escapes with `miss_probability`; permanent ones do not.
    `false_alarm_bound` is the upper 95 % bound of the share of healthy machines called faulty, from the benchmark.
    """

    verdict: Literal["healthy", "fault", "abstain"]
    reason: str
    layer: int | None
    type: str | None
    site: str | None = None
    num_faulty_channels: int | None = None
    faults: tuple[LocatedFault, ...] = ()
    findings: tuple[Finding, ...]
    method: DiagnosisMethod = "statistical"
    tolerance: dict[str, float] = Field(
        default={}, description="bound on relative deviation per probe and site; those not named are held to bits"
    )
    uncovered_sites: tuple[str, ...] = Field(default=(), description="places that no exact probe could be built for")
    elements_per_channel: int | None = Field(
        default=None, description="values seen on every channel of every probed site"
    )
    intermittent_rate: float | None = None
    miss_probability: float | None = None
    false_alarm_bound: float | None = None
    forward_equivalents: float = Field(ge=0, description="cost in whole-model forwards")
    exact_forward_equivalents: float = 0.0
    statistical_forward_equivalents: float = 0.0
    num_layers: int
    simulated_faults: tuple[dict[str, object], ...] = Field(
        default=(), description="the faults of the machine with their measured reach, for judging the verdict"
    )
    origin: DiagnosisOrigin | None = Field(default=None, description="null outside a study")


class LayerMetrics(Artifact):
    """What was measured on one layer: counts of the exact probes, and a row of LayerTable where the scans ran."""

    layer: int = Field(ge=0)
    sites_probed: int = Field(default=0, ge=0)
    values_probed: int = Field(default=0, ge=0)
    values_per_lane: int = Field(default=0, ge=0)
    faulty_sites: tuple[str, ...] = ()
    largest_deviation: float | None = None
    scans: dict[str, float | str | None] | None = None


class DiagnosisFile(Verdict):
    """What `aqnpipe diagnose --json` writes: a verdict, what it is of, and the metrics of every layer."""

    model: str
    device: str
    dtype: str
    seconds: float = Field(ge=0)
    layers: tuple[LayerMetrics, ...]


class AqnSection(Artifact):
    """The `aqn` part of sigmas.yaml (keys as published)."""

    enabled: bool
    layer_specific: bool
    base_sigma: float = Field(gt=0)
    layer_sigmas: dict[int, float]
    schedule: str
    high_priority_layers: list[int]


class SigmaFile(Artifact):
    """results/srdd/<model>/<machine>/sigmas.yaml: per-layer sigma, why, and from which diagnosis."""

    aqn: AqnSection
    reasons: dict[int, str]
    srdd_metadata: dict[str, int | float | str]
