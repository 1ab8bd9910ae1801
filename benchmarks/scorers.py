"""Scorers against lm-evaluation-harness's own task gsm8k on the same responses, as the table of docs/scorers.md.

`python benchmarks/scorers.py` takes the hard cases of the tests; further files of transcripts (as for `aqnpipe score`)
are a column each. Needs lm_eval (extra dev), no network.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

from aqnpipe.cli.score import Transcript, read_transcripts
from aqnpipe.config.evaluation import Scorer
from aqnpipe.data.scoring import SCORERS, grade

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
from lm_harness import FILTERS, harness_grades  # noqa: E402 - found beside the tests

HARD_CASES = SUPPORT / "transcripts.jsonl"


def agreement(transcripts: Sequence[Transcript]) -> dict[tuple[Scorer, str], int]:
    """Return how many responses a scorer and a filter of the harness judge alike, right or wrong."""
    with tempfile.TemporaryDirectory() as folder:
        harness = harness_grades(
            Path(folder), [one.gold_answer for one in transcripts], [one.response for one in transcripts]
        )
    return {
        (scorer, name): sum(
            grade(one.response, one.gold_answer, scorer).correct == correct
            for one, (_, correct) in zip(transcripts, harness[twin], strict=True)
        )
        for scorer in SCORERS
        for twin, name in FILTERS.items()
    }


def table(files: Sequence[Path]) -> str:
    """Return agreement on every file as a Markdown table."""
    names = list(FILTERS.values())
    sets = [(path.stem, read_transcripts(path)) for path in files]
    found = [agreement(transcripts) for _, transcripts in sets]
    headers = [f"{label} ({len(transcripts):,}): {name}" for label, transcripts in sets for name in names]
    lines = [f"| scorer | {' | '.join(headers)} |", f"|---|{'---|' * len(headers)}"]
    for scorer in SCORERS:
        cells = [f"{one[scorer, name]:,}" for one in found for name in names]
        lines.append(f"| `{scorer}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[], help="further transcripts")
    print(table([HARD_CASES, *parser.parse_args().files]))  # noqa: T201 - a report on standard output


if __name__ == "__main__":
    main()
