"""Cost of jobs, from the benchmark files that Snakemake writes. They are not part of any artifact."""

import csv
import math
from dataclasses import dataclass
from pathlib import Path

from aqnpipe.errors import DataError


@dataclass(frozen=True)
class Cost:
    """Cost of one job: wall seconds; processor seconds and peak resident memory in MB where they were measured."""

    seconds: float
    cpu_seconds: float | None
    peak_mb: float | None


def read_cost(path: Path) -> Cost | None:
    """Read the last line of a benchmark file of Snakemake; None if there is no file. DataError if malformed."""
    if not path.exists():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    try:
        seconds = float(rows[-1]["s"])
        return Cost(seconds, _measured(rows[-1].get("cpu_time")), _measured(rows[-1].get("max_rss")))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: not a benchmark file of Snakemake, expected a column s with seconds") from error


def _measured(text: str | None) -> float | None:
    """Return a number; None for what Snakemake writes if it could not measure (`-`, `NA`, nothing)."""
    if text in (None, "", "-", "NA"):
        return None
    value = float(str(text))
    return value if math.isfinite(value) else None
