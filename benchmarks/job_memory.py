"""Compare the memory that rules declare with the peaks that their jobs recorded, in a study that has run.

    python benchmarks/job_memory.py STUDY [STUDY ...]

Per rule: what it declares before its first job (an estimate from the sizes of the model), the largest recorded peak,
and what it declares now (the peak and a quarter more). Exit code 1 if a peak was larger than what was declared before.
"""

import argparse
import copy
import sys
from pathlib import Path

from smallest import parse

from aqnpipe.artifacts.runs import read_cost
from aqnpipe.cli.memory_estimate import declared_megabytes
from aqnpipe.cli.study import open_study

RULES = ("train", "evaluate", "srdd_diagnose", "loss_study", "measure_parity", "evaluate_on_machine")


def main() -> int:
    """Print a table; return 1 if an estimate was too small."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", type=Path, nargs="*", help="study files; their results are read where they say")
    arguments = parse(parser, studies=[Path(__file__).parents[1] / "config" / "smoke.yaml"])
    sys.stdout.write("| study, rule | jobs | declared before, MB | largest peak, MB | declared now, MB |\n")
    sys.stdout.write("|---|---|---|---|---|\n")
    too_small = False
    for path in arguments.studies:
        plan = open_study([path])
        unused = copy.copy(plan)
        unused.results = "no-results"
        for rule in RULES:
            costs = [read_cost(file) for file in sorted(Path(plan.results, "benchmarks", rule).glob("*.tsv"))]
            peak, before = max((cost.peak_mb for cost in costs if cost), default=0.0), declared_megabytes(unused, rule)
            if costs or arguments.smallest:
                row = f"{len(costs)} | {before} | {peak:.0f} | {declared_megabytes(plan, rule)}"
                sys.stdout.write(f"| {plan.study.config.study}, {rule} | {row} |\n")
                too_small |= peak > before
    return int(too_small)


if __name__ == "__main__":
    raise SystemExit(main())
