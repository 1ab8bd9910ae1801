"""The file of a job's costs, which every job writes and the report and the declared memory of rules read."""

import csv
from dataclasses import dataclass
from pathlib import Path

from aqnpipe.errors import DataError


@dataclass(frozen=True)
class Cost:
    """Cost of one job: wall seconds, processor seconds and peak resident memory in MB."""

    seconds: float
    cpu_seconds: float
    peak_mb: float


def read_cost(path: Path) -> Cost | None:
    """Read the file of `runtime.jobs.measured_costs`; None if there is no file. DataError if malformed."""
    if not path.exists():
        return None
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t"))
        return Cost(*(float(rows[-1][column]) for column in ("s", "cpu_time", "max_rss")))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path}: expected columns s, cpu_time and max_rss with numbers") from error
