"""Kill training runs at random, start each again, and compare its bytes with those of an undisturbed run.

    OMP_NUM_THREADS=1 python benchmarks/kill_trials.py [--kills 200] [--minutes 60]

A run has eight steps in two epochs, noise in every phase, AQN, a fault, validations and checkpoints. It is killed with
SIGKILL up to five times in a row. Half of the kills happen at a uniformly random time, the others before or after a
random call of a random function (rollout, update, parts of a checkpoint or resume point, promotion). The trials end
after `--kills` kills and are tallied in benchmarks/kill_trials.md. The script ends with an error if a run differs.
"""

import argparse
import collections
import itertools
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from kill_server import RESUME_EVERY, KillServer, Outcome, random_kill, tree, whole_spec
from smallest import parse
from tiny_training import write_inputs

from conftest import random_qwen2

KILLS_PER_RUN = 5


def main() -> None:
    """Run the trials, print progress, write the tally."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="number of kills (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times and functions (default: 0)")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after this time (default: 60)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path(__file__).with_suffix(".md"),
        help="page of the tally (default: %(default)s)",
    )
    arguments = parse(parser, kills=2, output=Path("/dev/stdout"))
    generator = random.Random(arguments.seed)  # noqa: S311 - chooses when to kill
    deadline = time.monotonic() + 60 * arguments.minutes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = write_inputs(folder, random_qwen2, num_problems=16)
        server = KillServer(folder)
        reference = server.train(whole_spec(), inputs, folder / "reference", folder / "reference_scratch")
        expected = tree(folder / "reference")
        tally: collections.Counter[str] = collections.Counter()
        lost: list[int] = []
        runs = 0
        while tally.total() < arguments.kills and time.monotonic() < deadline:
            outcomes: list[Outcome] = []
            while len(outcomes) < KILLS_PER_RUN:
                how = random_kill(generator, reference.seconds)
                outcomes.append(server.train(whole_spec(), inputs, folder / "run", folder / "scratch", **how))
                if outcomes[-1].code == 0:
                    break
                tally[_place(how)] += 1
            if outcomes[-1].code != 0:
                outcomes.append(server.train(whole_spec(), inputs, folder / "run", folder / "scratch"))
            lost += _steps_lost(outcomes)
            runs += 1
            if outcomes[-1].code != 0 or tree(folder / "run") != expected:
                sys.exit(f"run {runs} of seed {arguments.seed} differs: {outcomes}")
            for used in ("run", "scratch"):
                shutil.rmtree(folder / used)
            sys.stderr.write(f"{tally.total()} kills, {runs} runs, all with the same bytes as the undisturbed run\n")
        server.close()
    arguments.output.write_text(_report(arguments.seed, runs, tally, lost), encoding="utf-8")


def _place(how: dict) -> str:
    return "at a random time" if "kill_after" in how else f"{how['kill'][2]} a call: {how['kill'][0]}"


def _steps_lost(outcomes: list[Outcome]) -> list[int]:
    """Return for each kill how many optimiser steps, the interrupted one included, the next process repeated."""
    lost, reached = [], 0
    for killed, following in itertools.pairwise(outcomes):
        reached = max([reached, *(step + 1 for step in killed.steps)])
        lost.append(reached - following.steps[0] if following.steps else 0)
    return lost


def _report(seed: int, runs: int, tally: collections.Counter[str], lost: list[int]) -> str:
    rows = "".join(f"| {place} | {count} |\n" for place, count in sorted(tally.items()))
    steps = collections.Counter(lost)
    again = "".join(f"| {number} | {steps[number]} |\n" for number in sorted(steps))
    return (
        "# Kill trials\n\n"
        f"`python benchmarks/kill_trials.py --seed {seed}`: {tally.total()} SIGKILLs in {runs} runs. Every run ended "
        "byte for byte\nlike an undisturbed one (weights, metrics, receipt, record).\n\n"
        "| killed | kills |\n|---|---|\n"
        f"{rows}\n"
        f"Optimiser steps repeated after a kill, including the interrupted one; resume points every {RESUME_EVERY} "
        "steps:\n\n"
        "| steps | kills |\n|---|---|\n"
        f"{again}"
    )


if __name__ == "__main__":
    main()
