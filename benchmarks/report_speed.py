"""Time comparison and report of a large study: 50 arms, 5 seeds, 3 noise levels, 1,319 questions, 116 steps.

    OMP_NUM_THREADS=2 python benchmarks/report_speed.py
    OMP_NUM_THREADS=1 python benchmarks/report_speed.py --arms 1000 --seeds 10 --questions 20 --folder DIR

The second is 10,000 runs. The study is generated with the generator of the tests. Artifacts, `compare` and
`build_report` get a process each, which prints seconds by the clock, processor time and its peak memory; then the
size of the page, and how long Chromium takes to open it: until it is parsed, its script has run and the first screen
is painted. With `--folder` the files stay, and artifacts and tables that are there are not made again.
"""

import argparse
import os
import pickle
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from smallest import parse

from aqnpipe.comparison.stage import compare
from aqnpipe.config.study import Study
from aqnpipe.report.stage import build_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import synthetic_study as synthetic


def large_study(num_arms: int, num_seeds: int) -> Study:
    """Return a study of the made-up arms, repeated under new names; every arm is compared with the first."""
    kinds = list(synthetic.ARMS)
    names = [f"{kinds[number % len(kinds)]}-{number:02}" for number in range(num_arms)]
    for number, name in enumerate(names):
        synthetic.ARMS[name] = synthetic.ARMS[kinds[number % len(kinds)]]
    comparisons = [
        {
            "kind": "arms",
            "treatment": name,
            "control": names[0],
            "expected": "higher",
            "claim": f"{name} beats {names[0]}",
        }
        for name in names[1:]
    ]
    study: Study = synthetic.study(
        arms=names,
        seeds=list(range(num_seeds)),
        comparisons=comparisons,
        dataset={"source": "generated", "num_train": 928, "num_test": 1319},
        evaluation={"noise_seeds": [0], "max_response_tokens": 40, "batch_size": 250},
    )
    return study


def opening_seconds(page: Path, times: int = 5) -> float | None:
    """Return the median seconds from the request for the page to its first frame; None without a browser."""
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        return None
    from playwright.sync_api import sync_playwright

    found = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        for _ in range(times):
            tab = browser.new_page(viewport={"width": 1280, "height": 800})
            start = time.perf_counter()
            tab.goto(page.as_uri(), wait_until="load")
            tab.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found.append(time.perf_counter() - start)
            tab.close()
        browser.close()
    return statistics.median(found)


def artifacts_in(folder: Path, arguments: argparse.Namespace) -> Path:
    """Return where the list of artifacts of a study of this size is."""
    return folder / f"artifacts-{arguments.arms}-{arguments.seeds}-{arguments.questions}.pickle"


def make(part: str, folder: Path, arguments: argparse.Namespace) -> None:
    """Make one part in this process, and print what it used without imports; artifacts and tables only once."""
    known = artifacts_in(folder, arguments)
    if (part == "artifacts" and known.exists()) or (part == "compare" and (folder / "claims.json").exists()):
        return
    made = None if part == "artifacts" else pickle.loads(known.read_bytes())  # noqa: S301 - this script wrote it
    start, cpu = time.perf_counter(), time.process_time()
    if made is None:
        study = large_study(arguments.arms, arguments.seeds)
        known.write_bytes(pickle.dumps(synthetic.write_study(folder, study, arguments.questions)))
    elif part == "compare":
        compare(made.study, made.evaluations, folder)
    else:
        build_report(made.study, made.report_data(folder), folder)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{part}: {seconds:.1f} s, {cpu:.1f} s of processor time, {peak:.0f} MB", flush=True)  # noqa: T201


def main() -> None:
    """Generate the study, compare it, and time the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", type=int, default=50, help="number of arms")
    parser.add_argument("--seeds", type=int, default=5, help="training seeds per arm")
    parser.add_argument("--questions", type=int, default=1319, help="test questions")
    parser.add_argument("--folder", type=Path, help="folder for the files (default: one that is removed at the end)")
    parser.add_argument("--part", choices=["artifacts", "compare", "report"], help="make this one in this process")
    arguments = parse(parser, arms=3, seeds=2, questions=12)
    folder = arguments.folder
    is_used = folder is not None and folder.exists() and any(folder.iterdir())
    if is_used and not artifacts_in(folder, arguments).exists():
        parser.error(f"--folder: {folder} has no artifacts of a study of this size, expected a new or empty folder")
    if arguments.part and folder is None:
        parser.error("--part needs --folder")
    if arguments.part:
        make(arguments.part, arguments.folder, arguments)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for part in ("artifacts", "compare", "report"):
            sizes = [f"--{name}={getattr(arguments, name)}" for name in ("arms", "seeds", "questions")]
            command = [sys.executable, __file__, "--part", part, "--folder", str(folder), *sizes]
            subprocess.run(command, check=True)  # noqa: S603 - this file
        page = folder / "report.html"
        opened = opening_seconds(page)
        opens = "no browser to open it" if opened is None else f"opens in {opened:.2f} s"
        print(f"page: {page.stat().st_size / 1e6:.2f} MB, {opens}")  # noqa: T201


if __name__ == "__main__":
    main()
