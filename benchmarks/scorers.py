"""Agreement of our scorers with the gsm8k task of lm-evaluation-harness on the same responses.

`python benchmarks/scorers.py` prints the table of docs/scorers.md for the hard cases of the tests. Each further file of
transcripts (as for `aqnpipe score`) adds columns. It needs lm_eval (extra dev) and no network.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")

from smallest import parse

from aqnpipe.cli.score import Transcript, read_transcripts
from aqnpipe.config.evaluation import Scorer
from aqnpipe.data.scoring import SCORERS, grade

SUPPORT = Path(__file__).parents[1] / "tests" / "support"
sys.path.insert(0, str(SUPPORT))
from lm_harness import FILTERS, harness_grades  # noqa: E402 - in the folder of the tests

HARD_CASES = SUPPORT / "transcripts.jsonl"


def agreement(transcripts: Sequence[Transcript]) -> dict[tuple[Scorer, str], int]:
    """Return the number of responses on which each scorer and each filter of the harness agree."""
    with tempfile.TemporaryDirectory() as folder:
        harness = harness_grades(
            Path(folder),
            [transcript.gold_answer for transcript in transcripts],
            [transcript.response for transcript in transcripts],
        )
    return {
        (scorer, name): sum(
            grade(transcript.response, transcript.gold_answer, scorer).correct == correct
            for transcript, (_, correct) in zip(transcripts, harness[twin], strict=True)
        )
        for scorer in SCORERS
        for twin, name in FILTERS.items()
    }


def table(files: Sequence[Path]) -> str:
    """Return the agreement on every file as a Markdown table."""
    names = list(FILTERS.values())
    sets = [(path.stem, read_transcripts(path)) for path in files]
    found = [agreement(transcripts) for _, transcripts in sets]
    headers = [f"{label} ({len(transcripts):,}): {name}" for label, transcripts in sets for name in names]
    lines = [f"| scorer | {' | '.join(headers)} |", f"|---|{'---|' * len(headers)}"]
    for scorer in SCORERS:
        cells = [f"{counts[scorer, name]:,}" for counts in found for name in names]
        lines.append(f"| `{scorer}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, default=[], help="further files of transcripts")
    print(table([HARD_CASES, *parse(parser).files]))  # noqa: T201 - a report on standard output


if __name__ == "__main__":
    main()
