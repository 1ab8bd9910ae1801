"""Repeated runs of a diagnosis: new seeds and shapes for every run, and the rates at which faults were seen."""

from scipy import stats

from aqnpipe.artifacts.diagnoses import (
    DeviceReport,
    DiagnosisFile,
    KernelFault,
    LocatedFault,
    Outcome,
    Rate,
    Repetition,
    RunRecord,
    SiteRate,
    Untested,
    worst,
)
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.seeding import derive_seed

MISS_PROBABILITIES = (1e-3, 1e-2, 1e-5, 1e-8)
"""Allowed probabilities of a miss, one run after the other: they set the number of rows of a probe."""

EXACT_REPEATS = (5, 3, 8)
NUM_PROMPTS = (5, 1, 8)
PROMPT_TOKENS = (64, 7, 200, 33, 128)
"""4, 3 and 5 entries: runs meet every combination of rows, repeats and lengths, because no two share a divisor."""

INTERRUPTED = "interrupted before a run was complete"
"""Reason for no verdict on a device that ran nothing to its end."""

_CONFIDENCE = 0.95


def config_of_run(config: DiagnosisConfig, run: int) -> DiagnosisConfig:
    """Return the settings of run number `run`: the first is as configured, later ones have new seeds and shapes."""
    if run == 0:
        return config
    return config.model_copy(
        update={
            # A derived seed has 63 bits, settings allow 62.
            "seed": derive_seed(config.seed, "diagnosis.run", run) >> 1,
            "miss_probability": MISS_PROBABILITIES[run % len(MISS_PROBABILITIES)],
            "exact_repeats": EXACT_REPEATS[run % len(EXACT_REPEATS)],
            "num_prompts": NUM_PROMPTS[run % len(NUM_PROMPTS)],
        }
    )


def prompt_tokens_of_run(run: int) -> int:
    """Return the number of tokens of the random prompts of run number `run`."""
    return PROMPT_TOKENS[run % len(PROMPT_TOKENS)]


def record_of(
    file: DiagnosisFile, config: DiagnosisConfig, prompt_tokens: int, temperature: float | None = None
) -> RunRecord:
    """Return what is kept of one run."""
    return RunRecord(
        time=file.time,
        seconds=file.seconds,
        seed=config.seed,
        num_prompts=config.num_prompts,
        prompt_tokens=prompt_tokens,
        elements_per_channel=file.elements_per_channel,
        forward_equivalents=file.forward_equivalents,
        verdict=file.verdict,
        faults=tuple((fault.layer, fault.site) for fault in file.faults),
        temperature_celsius=temperature,
    )


class RunsOfDevice:
    """The runs on one device so far, and their report. Of every faulty site the first fault is kept."""

    def __init__(self, device: str, hardware: Hardware, *, repeated: bool) -> None:
        self.hardware = hardware
        self._device = device
        self._repeated = repeated
        self._records: list[RunRecord] = []
        self._files: list[DiagnosisFile] = []
        self._faults: dict[tuple[int | None, str], LocatedFault] = {}
        self._kernels: tuple[KernelFault, ...] = ()
        self._untested: tuple[Untested, ...] = ()

    @property
    def count(self) -> int:
        """Number of runs so far."""
        return len(self._records)

    def add(self, file: DiagnosisFile, record: RunRecord) -> None:
        """Add a run."""
        self._files = [*self._files, file][:1]
        others = file.untested if not self._records else self._untested
        self._untested = tuple(part for part in file.untested if part in others)
        self._records.append(record)
        self._kernels = self._kernels or file.kernels
        for fault in file.faults:
            self._faults.setdefault((fault.layer, fault.site), fault)

    def report(self, *, interrupted: bool = False) -> DeviceReport:
        """Return the report of the runs so far."""
        verdict, reason = self._verdict()
        last = self._records[-1] if self._records else None
        return DeviceReport(
            device=self._device,
            hardware=self.hardware,
            verdict=verdict,
            reason=reason,
            faults=tuple(self._faults.values()),
            kernels=self._kernels,
            untested=self._untested,
            forward_equivalents=sum(record.forward_equivalents for record in self._records),
            seconds=sum(record.seconds for record in self._records),
            temperature_after_celsius=last.temperature_celsius if last else None,
            repetition=self._repetition(interrupted) if self._repeated and self._records else None,
        )

    def _verdict(self) -> tuple[Outcome, str]:
        verdicts = [record.verdict for record in self._records]
        if not verdicts:
            return "abstain", INTERRUPTED
        found = worst(verdicts)
        if not self._repeated:
            return found, self._files[0].reason
        counts = ", ".join(f"{verdicts.count(name)} {name}" for name in dict.fromkeys(verdicts))
        return found, f"{len(verdicts)} runs: {counts}"

    def _repetition(self, interrupted: bool) -> Repetition:
        runs = self.count
        sites = [
            SiteRate(
                layer=layer,
                scope=fault.scope,
                site=site,
                type=fault.type,
                rate=rate_of(sum((layer, site) in record.faults for record in self._records), runs),
            )
            for (layer, site), fault in self._faults.items()
        ]
        return Repetition(
            faulty=rate_of(sum(record.verdict == "fault" for record in self._records), runs),
            sites=tuple(sorted(sites, key=lambda site: -site.rate.seen)),
            any_other_site=rate_of(0, runs),
            interrupted=interrupted,
            runs=tuple(self._records),
        )


def rate_of(seen: int, runs: int) -> Rate:
    """Return a rate with its exact 95 % interval (Clopper-Pearson).

    If nothing or everything was seen, the interval has one open end and its other end is the exact one-sided bound.
    The bounds hold if runs are independent, which a fault that depends on the time or on heat is not.
    """
    tail = (1 - _CONFIDENCE) / (1 if seen in (0, runs) else 2)
    low = float(stats.beta.ppf(tail, seen, runs - seen + 1)) if seen else 0.0
    high = float(stats.beta.ppf(1 - tail, seen + 1, runs - seen)) if seen < runs else 1.0
    return Rate(seen=seen, runs=runs, rate=seen / runs, low=low, high=high)
