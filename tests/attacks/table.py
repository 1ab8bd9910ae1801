"""Try every sabotage on a fresh study, print which check caught it, and write docs/attacks.csv.

The summary of the rows goes into docs/attacks.md.

PYTHONPATH=tests/attacks:tests/support python tests/attacks/table.py
"""

import argparse
import csv
import dataclasses
import json
import multiprocessing
import re
import resource
import sys
import tempfile
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from attack_list import SABOTAGES, TEN_WAYS
from micro_study import MicroStudy, finished_study
from sabotage import Job, Outcome, Sabotage, attempt, names_cause, untouched
from study_variants import VARIANTS
from transformers.utils import logging

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
_COLUMNS = ("group", "name", "what", "fault", "caught_by", "words")
_LONGEST = 160
_BY_NAME = {sabotage.name: sabotage for sabotage in SABOTAGES}


@dataclass(frozen=True)
class Control:
    """Jobs of a variant that run without any sabotage."""

    variant: str
    jobs: tuple[Job, ...]


def main() -> int:
    """Run the control jobs and all sabotages; return 0 if all but those with a reason were caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "attacks.md")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--only", default="", help="try sabotages whose `group: name` matches; the page has the others too"
    )
    parser.add_argument("--results", type=Path, help="file of outcomes; those that it has are not tried again")
    parser.add_argument("--rows", type=Path, default=ROOT / "docs" / "attacks.csv")
    arguments = parser.parse_args()
    known = _read(arguments.results)
    tried = [s for s in SABOTAGES if s.name not in known and re.search(arguments.only, f"{s.group}: {s.name}")]
    # A fresh process, not a fork: torch has threads.
    context = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(arguments.processes, context, _prepare, (name,)) as pool,
    ):
        controls = sorted({(s.variant, s.jobs) for s in tried}, key=str)
        flaws = [flaw for flaw in pool.map(_build, _variants(tried)) if flaw]
        if not arguments.only:
            flaws += [flaw for flaw in pool.map(_control, controls) if flaw]
        if flaws:
            return _say("\n".join(flaws))
        for name, outcome in pool.map(_try, [sabotage.name for sabotage in tried]):
            known[name] = outcome
            _append(arguments.results, name, outcome)
    seconds = resource.getrusage(resource.RUSAGE_CHILDREN)
    _say(f"{seconds.ru_utime + seconds.ru_stime:.0f} CPU seconds")
    rows = [(sabotage, known[sabotage.name]) for sabotage in SABOTAGES if sabotage.name in known]
    table = [row_of(sabotage, outcome) for sabotage, outcome in rows]
    if not arguments.only or arguments.results:
        write_rows(arguments.rows, table)
        write_summary(arguments.page, table)
    for group, (caught, of) in _counts(table).items():
        _say(f"{group}: {caught} of {of}")
    missed = [sabotage.name for sabotage, outcome in rows if outcome.is_caught == bool(sabotage.reason)]
    return _say(f"not as expected ({len(missed)}): {', '.join(missed)}") if missed else 0


def row_of(sabotage: Sabotage, outcome: Outcome) -> dict[str, str]:
    """Return a row of docs/attacks.csv; `caught_by` is empty and `words` say why where nothing caught it."""
    caught = outcome.is_caught
    values = (
        sabotage.group,
        sabotage.name,
        sabotage.what,
        str(sabotage.facts or ""),
        (outcome.check or "") if caught else "",
        _short(outcome.words) if caught else _why(sabotage, outcome),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """Write one row per sabotage."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_summary(page: Path, rows: list[dict[str, str]]) -> None:
    """Write the summary of the rows between the marks of the page."""
    text = page.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text(f"{before}{BEGIN}\n{summary_of(rows)}\n{END}{after}", encoding="utf-8")


def summary_of(rows: list[dict[str, str]]) -> str:
    """Return counts by group and by fault, and the sabotages that were not caught, as Markdown."""
    caught = sum(bool(row["caught_by"]) for row in rows)
    groups = [f"| {group} | {tried} | {number} |" for group, (number, tried) in _counts(rows).items()]
    missed = [row for row in rows if not row["caught_by"]]
    not_caught = ["### Not caught", "", *(f"- {_line(row)}" for row in missed), ""] if missed else []
    return "\n".join(
        [
            f"{caught} of {len(rows)} sabotages were caught. {_controls(len(rows))}",
            "",
            "| group | sabotages | caught |",
            "|---|---|---|",
            *groups,
            "",
            *not_caught,
            "### The ten faults of the original experiments",
            "",
            "Sabotages that repeat one of them (column `fault` of the table):",
            "",
            "| fault | what happened | sabotages | caught |",
            "|---|---|---|---|",
            *(_fault(number, text, rows) for number, text in TEN_WAYS.items()),
        ]
    )


def _controls(tried: int) -> str:
    if tried == len(SABOTAGES):
        return "The unchanged studies and the same jobs without sabotage pass."
    return f"{len(SABOTAGES) - tried} more have not been tried yet; the outcomes are of several runs."


def _line(row: dict[str, str]) -> str:
    return f"{row['group']}: {row['name']} ({row['what']}): {row['words']}"


def _fault(number: int, text: str, rows: list[dict[str, str]]) -> str:
    repeats = [row for row in rows if row["fault"] == str(number)]
    return f"| {number} | {text} | {len(repeats)} | {sum(bool(row['caught_by']) for row in repeats)} |"


def _why(sabotage: Sabotage, outcome: Outcome) -> str:
    if outcome.check is None:
        same = "" if outcome.changed else " (no result differs)"
        return (sabotage.reason or outcome.words) + same
    if not outcome.has_effect:
        return f"did not take effect, yet {outcome.check}: {_short(outcome.words)}"
    return f"stopped for another reason, by {outcome.check}: {_short(outcome.words)}"


def _short(words: str) -> str:
    return f"{words[:_LONGEST]} ..." if len(words) > _LONGEST else words


def _counts(rows: list[dict[str, str]]) -> dict[str, tuple[int, int]]:
    """Return (caught, tried) by group."""
    tried = Counter(row["group"] for row in rows)
    caught = Counter(row["group"] for row in rows if row["caught_by"])
    return {group: (caught[group], number) for group, number in tried.items()}


def _read(path: Path | None) -> dict[str, Outcome]:
    """Return the outcomes of a file by name; none if there is no file."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = {line.pop("name"): Outcome(**line) for line in lines}
    # By the present causes, which may have changed since.
    return {
        name: dataclasses.replace(outcome, names_cause=names_cause(_BY_NAME[name], outcome.words))
        for name, outcome in found.items()
        if name in _BY_NAME
    }


def _append(path: Path | None, name: str, outcome: Outcome) -> None:
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"name": name, **dataclasses.asdict(outcome)}) + "\n")


def _variants(tried: list[Sabotage]) -> list[str]:
    used = {sabotage.variant for sabotage in tried}
    return [variant for variant in VARIANTS if variant in used]


# -- in the processes of the pool --------------------------------------------------------------------------------------


def _prepare(folder: str) -> None:
    global _folder
    _folder = Path(folder)
    torch.set_num_threads(1)
    logging.disable_progress_bar()


def _build(variant: str) -> str | None:
    """Build a study; return why it does not pass, or None."""
    try:
        invalid = finished_study(_folder / variant, variant).invalid()
    except Exception:  # noqa: BLE001 - shown with the others
        return f"the unchanged study {variant} does not pass: {traceback.format_exc()}"
    return f"the unchanged study {variant} does not pass: {invalid}" if invalid else None


def _finished(variant: str, name: str) -> MicroStudy:
    return MicroStudy(_folder / variant, variant).copied(Path(tempfile.mkdtemp(dir=_folder)) / name)


def _control(control: tuple[str, tuple[Job, ...]]) -> str | None:
    """Run jobs without sabotage; return why they do not pass, or None."""
    variant, jobs = control
    outcome = untouched(_finished(variant, "control"), jobs)
    return f"without sabotage {jobs} of study {variant} do not pass: {outcome}" if outcome.check else None


def _try(name: str) -> tuple[str, Outcome]:
    sabotage = _BY_NAME[name]
    study = _finished(sabotage.variant, "attacked")
    try:
        outcome = attempt(study, sabotage)
    except Exception as error:  # noqa: BLE001 - a crash is shown in the table
        sys.stderr.write(traceback.format_exc())
        outcome = Outcome("crash", f"{type(error).__name__}: {error}", names_cause=False)
    word = "caught" if outcome.is_caught else "NOT CAUGHT"
    note = "" if outcome.has_effect else " (no effect)"
    note += " (nothing changed)" if outcome.changed is False else ""
    _say(f"{word}{note}: {sabotage.group}: {name}: {outcome.check}: {outcome.words[:300]}")
    return name, outcome


def _say(text: str) -> int:
    sys.stderr.write(f"{text}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
