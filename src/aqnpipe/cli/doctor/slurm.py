"""The partitions of Slurm, read from `sinfo`."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass

_TIMEOUT_SECONDS = 20


@dataclass(frozen=True)
class SlurmPartition:
    """Identical nodes of a partition: gres, CPUs, memory per node, and time limit in minutes (None: no limit)."""

    name: str
    gres: str
    minutes: int | None
    cpus: int
    memory_mb: int
    nodes: int

    def num_devices(self, gres: str) -> int:
        """Return the number of devices `gres` (name or name:type) per node: 8 for `gpu:a100` in `gpu:a100:8(S:0-1)`."""
        counts = re.findall(r"([A-Za-z_][\w.:-]*?):(\d+)(?=[,(]|$)", self.gres)
        return sum(int(count) for name, count in counts if gres in (name, name.partition(":")[0]))


def read_partitions() -> tuple[SlurmPartition, ...] | None:
    """Return the partitions; None if Slurm is not installed, an empty tuple if it does not answer."""
    if shutil.which("sinfo") is None or shutil.which("sbatch") is None:
        return None
    try:
        command = ["sinfo", "--noheader", "--format=%P|%G|%l|%c|%m|%D"]
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)  # noqa: S603
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return ()
    return parse_partitions(completed.stdout)


def slurm_answers() -> bool:
    """Return whether jobs can be submitted to Slurm from here; if not, say where they will run.

    The cluster profiles call this: the same command uses a cluster, or the devices of a machine without a scheduler.
    """
    partitions = read_partitions()
    if not partitions:
        why = "no Slurm here" if partitions is None else "Slurm does not answer (`sinfo` shows why)"
        sys.stderr.write(f"{why}: jobs run on this machine and reserve its devices, train_devices in all\n")
    return bool(partitions)


def parse_partitions(text: str) -> tuple[SlurmPartition, ...]:
    """Return the partitions in lines such as `gpu*|gpu:a100:8|1-00:00:00|128|1000000|4`."""
    # Other lines are a greeting of the site, or blank.
    rows = [line.split("|") for line in text.splitlines() if line.count("|") == 5]
    return tuple(
        SlurmPartition(
            name=name.rstrip("*"),
            gres="" if gres == "(null)" else gres,
            minutes=_minutes(limit),
            cpus=int(cpus.rstrip("+")),
            memory_mb=int(memory.rstrip("+")),
            nodes=int(nodes),
        )
        for name, gres, limit, cpus, memory, nodes in rows
    )


def _minutes(limit: str) -> int | None:
    """Return a Slurm time limit, days-hours:minutes:seconds, in minutes; None for infinite."""
    if limit.lower() in ("infinite", "unlimited", "n/a"):
        return None
    days, _, clock = limit.rpartition("-")
    parts = clock.split(":")
    hours, minutes, _ = ["0", *parts, "0"] if len(parts) == 1 else ["0", "0", *parts][-3:]
    return int(days or 0) * 1440 + int(hours) * 60 + int(minutes)
