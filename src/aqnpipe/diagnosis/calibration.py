"""False-alarm counts of the detection benchmarks (benchmarks/README.md). A test compares them with their results.

EXACT counts the healthy runs of detection.md, all on a CPU: as it is, with other settings, and with emulated arithmetic
of other devices, which differs more from the reference. STATISTICAL counts those of detection_simulated.md.
"""

from dataclasses import dataclass

from scipy import stats


@dataclass(frozen=True)
class FalseAlarms:
    """Number of false alarms among diagnoses of healthy machines, all of one class of device."""

    alarms: int
    machines: int
    device: str = "cpu"

    @property
    def upper_bound(self) -> float:
        """Exact one-sided 95 % upper bound of the false-alarm rate (Clopper-Pearson)."""
        return float(stats.beta.ppf(0.95, self.alarms + 1, self.machines - self.alarms))

    def bound_on(self, device: str) -> float | None:
        """Return the bound for a class of device (`cpu`, `cuda`, `npu`); None where nothing was measured."""
        return self.upper_bound if device == self.device else None


EXACT = FalseAlarms(alarms=0, machines=378)
STATISTICAL = FalseAlarms(alarms=0, machines=360)
