"""Time and memory of a job, which it measures itself.

Not by Snakemake's `benchmark:`, which follows the process that Snakemake starts: a job that starts warm is another one.
"""

import os
import resource
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_SECONDS_BETWEEN_SAMPLES = 5.0
_BYTES_PER_UNIT = 1 if sys.platform == "darwin" else 1024
"""Of `ru_maxrss`."""


def costs_file(log: Path) -> Path:
    """Return the file of a job's costs, `benchmarks/RULE/NAME.tsv`, given its log `logs/RULE/NAME.log`."""
    results, _, name = str(log).rpartition("logs/")
    return Path(results, "benchmarks", name).with_suffix(".tsv")


@contextmanager
def measured_costs(path: Path) -> Iterator[None]:
    """Write seconds, peak memory in MB and processor seconds of the body to `path`, unless it raises.

    Memory is the largest sum over this process and its descendants, of samples, and at least this process's own peak.
    """
    start, stop, samples = time.monotonic(), threading.Event(), _Samples()
    sampler = threading.Thread(target=samples.take_until, args=(stop,), daemon=True)
    sampler.start()
    try:
        yield
    finally:
        stop.set()
        sampler.join()
    own, waited = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    peak = max(own.ru_maxrss * _BYTES_PER_UNIT, samples.peak)
    # Descendants that others wait for, such as Ray's workers, are in no `rusage` of this process.
    descendants = max(waited.ru_utime + waited.ru_stime, sum(samples.seconds.values()))
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = f"{time.monotonic() - start:.2f}\t{peak / 1e6:.1f}\t{own.ru_utime + own.ru_stime + descendants:.2f}"
    path.write_text(f"s\tmax_rss\tcpu_time\n{rows}\n", encoding="utf-8")


class _Samples:
    """Samples of the memory of this process's tree in bytes, and of the processor seconds of its descendants by pid."""

    def __init__(self) -> None:
        self.peak = 0
        self.seconds: dict[int, float] = {}

    def take_until(self, stop: threading.Event) -> None:
        """Take samples until `stop` is set."""
        this = psutil.Process(os.getpid())
        while not stop.wait(_SECONDS_BETWEEN_SAMPLES):
            total = this.memory_info().rss
            for process in this.children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_info().rss
                    self.seconds[process.pid] = sum(process.cpu_times()[:2])
            self.peak = max(self.peak, total)
