"""Detection benchmark: faults of real machines and healthy arithmetic of other devices, put in from outside.

`OMP_NUM_THREADS=1 python benchmarks/detection.py` runs every case and writes detection_effects.csv,
detection_faults.csv, detection_healthy.csv and detection.md to the folder of this file. An interrupted run resumes;
`--fresh` diagnoses again, `--only GROUP` runs one group, `--summarise` only rewrites the page.

The faults are data in machine_faults/. They act through a function mode of torch and module hooks, never through the
project's own fault simulation, and the effect of each is measured independently of any probe
(machine_faults/observe.py).
"""

import argparse
import csv
import random
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import polars as pl
import transformers
from machine_faults.cases import HEALTHY, Case, fault_cases, healthy_cases, run_case, run_effect
from machine_faults.page import page
from smallest import parse

FOLDER = Path(__file__).parent
IDENTITY = "group,name,architecture,dtype,seed,layer"
FIELDS = {
    "effects": f"{IDENTITY},permanent,effect,observable",
    "faults": f"{IDENTITY},attention,verdict,layer_right,operation_right,device_wide,elsewhere,forwards,seconds,"
    "restored,reported,reason,commit",
    "healthy": f"{IDENTITY},attention,emulated,verdict,exact_faults,forwards,seconds,restored,reported,reason,commit",
}


def commit() -> str:
    """Return the commit of the code that is measured, with a + if it has changes."""
    ask = ["git", "describe", "--always", "--dirty=+", "--match=", "--abbrev=7"]
    return subprocess.run(ask, cwd=FOLDER, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def done_cases(path: Path) -> set[tuple[str, ...]]:
    """Return the identities of the rows in `path`."""
    if not path.exists():
        return set()
    with path.open(newline="") as file:
        return {tuple(row[key] for key in IDENTITY.split(",")) for row in csv.DictReader(file)}


def run_missing(
    path: Path, fields: str, cases: Sequence[Case], jobs: int, run: Callable[[Case], dict[str, Any]] = run_case
) -> None:
    """Run the cases without a row in `path` and append their rows as they end."""
    done, code = done_cases(path), commit()
    missing = [case for case in cases if tuple(map(str, case.identity.values())) not in done]
    # In random order, so that an interrupted run is a sample of all groups.
    random.Random(0).shuffle(missing)  # noqa: S311
    header = not path.exists()
    with path.open("a", newline="") as file, executor(jobs) as pool:
        writer = csv.DictWriter(file, fieldnames=fields.split(","), extrasaction="ignore", lineterminator="\n")
        if header:
            writer.writeheader()
        futures = {pool.submit(run, case): case for case in missing}
        for future in as_completed(futures):
            writer.writerow(_shortened(_row_of(futures[future], future) | {"commit": code}))
            file.flush()


def executor(jobs: int) -> Executor:
    """Return processes for the cases; one job needs no process of its own."""
    if jobs == 1:
        return ThreadPoolExecutor(1, initializer=silence)
    return ProcessPoolExecutor(jobs, get_context("spawn"), silence)


def silence() -> None:
    """Show no progress bars of models that are saved and loaded."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def _row_of(case: Case, future: Any) -> dict[str, Any]:
    """Return the row of a case; a crash of the diagnosis is a result too."""
    error = future.exception()
    if error is None:
        return dict(future.result())
    crash = f"{type(error).__name__}: {error}".splitlines()[0]
    return case.identity | {"verdict": "crash", "reported": crash[:200], "reason": crash[:400]}


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    return {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}


def main() -> None:
    """Run the missing cases and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the four files")
    parser.add_argument("--only", metavar="GROUP", help=f"run one group of faults, or {HEALTHY}")
    parser.add_argument("--models", type=int, default=1, help="models per fault")
    parser.add_argument("--healthy", type=int, default=9, help="models per emulated healthy device")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, each with one thread")
    parser.add_argument(
        "--fresh", action="store_true", help="diagnose again; effects, which need no diagnosis, are kept"
    )
    parser.add_argument("--summarise", action="store_true", help="only rewrite detection.md")
    parser.add_argument("--cases", type=int, help="only so many cases of each file, at random (default: all)")
    arguments = parse(parser, cases=2, models=1, healthy=1)
    if arguments.smallest:
        with tempfile.TemporaryDirectory() as folder:
            arguments.output = Path(folder)
            measure(arguments)
            print((Path(folder) / "detection.md").read_text())  # noqa: T201
    else:
        measure(arguments)


def measure(arguments: argparse.Namespace) -> None:
    """Run the missing cases and write the page into the folder `arguments.output`."""
    paths = {kind: arguments.output / f"detection_{kind}.csv" for kind in FIELDS}
    faults = list(fault_cases(arguments.models))
    for kind, cases in {"effects": faults, "faults": faults, "healthy": list(healthy_cases(arguments.healthy))}.items():
        chosen = [case for case in cases if arguments.only in (None, case.group)]
        if arguments.cases:
            chosen = random.Random(0).sample(chosen, arguments.cases)  # noqa: S311
        if arguments.summarise or not chosen:
            continue
        if arguments.fresh and kind != "effects":
            paths[kind].unlink(missing_ok=True)
        run_missing(paths[kind], FIELDS[kind], chosen, arguments.jobs, run_effect if kind == "effects" else run_case)
    (arguments.output / "detection.md").write_text(page(*(read(paths[kind]) for kind in FIELDS)))


def read(path: Path) -> pl.DataFrame:
    """Return a table of the benchmark."""
    return pl.read_csv(path, infer_schema_length=None)


if __name__ == "__main__":
    main()
