"""Try every sabotage on a fresh study, print which check caught it, and write docs/attacks.md.

PYTHONPATH=tests/attacks:tests/support python tests/attacks/table.py
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

import torch
from attack_list import ACCEPTED, SABOTAGES, TEN_WAYS
from micro_study import MicroStudy, finished_study
from sabotage import Outcome, Sabotage, attempt, untouched
from transformers.utils import logging

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_LONGEST = 160


def main() -> int:
    """Run the control jobs and all sabotages; return 0 if all but the accepted ones were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "attacks.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    started = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        finished = finished_study(Path(name) / "study")
        if finished.invalid():
            return _say(f"the unchanged study does not pass: {finished.invalid()}")
        for number, jobs in enumerate(sorted({sabotage.jobs for sabotage in SABOTAGES})):
            outcome = untouched(finished.copied(Path(name) / f"control{number}"), jobs)
            if outcome.is_caught:
                return _say(f"without sabotage {jobs} do not pass: {outcome}")
        rows = [
            (sabotage, _tried(finished, sabotage, Path(name) / f"attack{number}"))
            for number, sabotage in enumerate(SABOTAGES)
        ]
    page = arguments.page.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    table = f"{BEGIN}\n{table_of(rows)}\n{END}"
    arguments.page.write_text(before + table + after, encoding="utf-8")
    _say(f"{time.process_time() - started:.0f} CPU seconds")
    missed = [sabotage.name for sabotage, outcome in rows if outcome.is_caught == (sabotage.name in ACCEPTED)]
    return _say(f"not as expected: {', '.join(missed)}") if missed else 0


def table_of(rows: list[tuple[Sabotage, Outcome]]) -> str:
    """Return counts and table as Markdown."""
    caught = sum(outcome.is_caught for _, outcome in rows)
    lines = [
        f"{caught} of {len(rows)} sabotages were caught. The unchanged study and the same jobs without sabotage pass.",
        "",
        "| sabotage | change | fault | caught by | message |",
        "|---|---|---|---|---|",
    ]
    for sabotage, outcome in rows:
        words = outcome.words if outcome.is_caught else f"**not caught**: {ACCEPTED.get(sabotage.name, outcome.words)}"
        if outcome.is_caught and len(words) > _LONGEST:
            words = f"{words[:_LONGEST]} ..."
        cells = (
            sabotage.name,
            sabotage.what,
            str(sabotage.facts or ""),
            outcome.check or "nothing",
            words.replace("|", "\\|"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    ways = "; ".join(f"{number}: {text}" for number, text in TEN_WAYS.items())
    return "\n".join([*lines, "", f"Fault: which of the ten faults of the original experiments it repeats. {ways}."])


def _tried(finished: MicroStudy, sabotage: Sabotage, folder: Path) -> Outcome:
    outcome = attempt(finished.copied(folder), sabotage)
    _say(f"{'caught' if outcome.is_caught else 'NOT CAUGHT'}: {sabotage.name}: {outcome.check}: {outcome.words[:200]}")
    return outcome


def _say(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
