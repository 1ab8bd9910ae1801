"""`aqnpipe score`: apply every scorer to the stored responses of a JSON Lines file or of an evaluation."""

import json as json_format
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, StrictStr, ValidationError

from aqnpipe.config.base import FrozenModel, describe_validation_error
from aqnpipe.config.custom_code import source_digest
from aqnpipe.config.evaluation import Scorer, refuse_unknown_scorer
from aqnpipe.data.graders import Grader, grader
from aqnpipe.data.scoring import NUMBER_SCORERS, SCORERS, Graded, normalise_number, tally
from aqnpipe.errors import DataError

MAX_SHOWN = 20
"""Number of disagreements that are printed; `--json` prints all."""

HARNESS_COUNTERPARTS: Mapping[Scorer, Scorer] = {"strict": "harness_strict", "last_number": "harness_flexible"}
"""The filter of lm-evaluation-harness that corresponds to each of our scorers."""


class Transcript(NamedTuple):
    """A stored response. `place` is its place in the file, `group` its pass, "" if there is only one."""

    place: str
    group: str
    question_id: str | None
    gold_answer: str
    response: str
    truncated: bool | None


class TranscriptLine(BaseModel):
    """A line of a transcripts file. Either `gold_answer` or `answer` is required; other keys are ignored.

    gold_answer: the correct number. answer: the number, or worked text that ends in `#### number` as in GSM8K.
    """

    model_config = ConfigDict(frozen=True)

    question_id: StrictStr | StrictInt | None = None
    response: StrictStr
    gold_answer: StrictStr | StrictInt | StrictFloat | None = None
    answer: StrictStr | StrictInt | StrictFloat | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ScorerResult(FrozenModel):
    """Number of responses that a scorer finds correct, and number in which it finds no answer."""

    scorer: str
    correct: int
    accuracy: float
    parse_failures: int


class GroupResult(FrozenModel):
    """Scores of a pass. `truncated`: responses cut off at the token limit, null unless known for every response."""

    name: str
    responses: int
    truncated: int | None
    scorers: tuple[ScorerResult, ...]


class FoundAnswer(FrozenModel):
    """The answer that a scorer found in a response, null for none, and whether it is correct."""

    answer: str | None
    correct: bool


class Disagreement(FrozenModel):
    """A response that some scorers find correct and others wrong."""

    place: str
    question_id: str | None
    gold_answer: str
    found: dict[str, FoundAnswer]


class Agreement(FrozenModel):
    """Number of responses on which our scorer and its counterpart in lm-evaluation-harness agree."""

    scorer: Scorer
    harness: Scorer
    same: int


class ScoredFile(FrozenModel):
    """Output of `aqnpipe score --json`."""

    file: str
    responses: int
    groups: tuple[GroupResult, ...]
    agreement: tuple[Agreement, ...]
    disagreements: tuple[Disagreement, ...]


def score(
    transcripts: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines file with response, gold_answer (or answer) and optionally question_id and "
            "finish_reason, or an evaluation of a study (.parquet)",
        ),
    ],
    problems: Annotated[
        Path | None,
        typer.Option(help="questions of an evaluation; default: data/test.parquet in its results folder"),
    ] = None,
    scorer: Annotated[
        list[str] | None,
        typer.Option(
            help="another scorer: verl_strict, boxed, letter, text, or a custom module:function, run with your "
            "rights; may be repeated"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Score stored responses with every scorer and list the responses on which scorers disagree."""
    custom = custom_graders(scorer or ())
    if transcripts.suffix == ".parquet":
        rows = read_evaluation(transcripts, problems)
    elif problems is not None:
        raise DataError(f"--problems {problems}: {transcripts} is not a .parquet file and contains gold answers")
    else:
        rows = read_transcripts(transcripts, numbers_only=custom.keys() <= {*NUMBER_SCORERS})
    scored = score_transcripts(str(transcripts), rows, custom)
    typer.echo(scored.model_dump_json(indent=2) if json else "\n".join(_lines(scored)))


def custom_graders(scorers: Sequence[str]) -> dict[str, Grader]:
    """Return the graders of scorers and functions by name; ConfigError for one that is unknown or cannot be used."""
    found: dict[str, Grader] = {}
    for name in scorers:
        refuse_unknown_scorer(name)
        found[name] = grader(name, source_digest(name) if ":" in name else None)
    return found


def read_transcripts(path: Path, *, numbers_only: bool = True) -> list[Transcript]:
    """Read a JSON Lines file; DataError naming the file and the first invalid line.

    numbers_only: refuse gold answers that are no numbers, which the scorers of numbers never find right.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file, expected JSON Lines, or an evaluation (.parquet)") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
    found = [
        _transcript(line, f"{path}:{number}", number, numbers_only)
        for number, line in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path}: found no lines, expected transcripts as JSON Lines")
    return found


def read_evaluation(path: Path, problems: Path | None) -> list[Transcript]:
    """Read an evaluation of a study; DataError if it or the gold answer of a question is missing."""
    import polars as pl

    from aqnpipe.artifacts.evaluations import EvaluationTable
    from aqnpipe.artifacts.files import read_table
    from aqnpipe.artifacts.problems import ProblemTable

    table = read_table(path, EvaluationTable)
    if problems is None:
        # results/eval/<model>/<arm>/seed<S>/step<N>.parquet
        parents = path.resolve().parents
        problems = parents[min(4, len(parents) - 1)] / "data" / "test.parquet"
        if not problems.is_file():
            raise DataError(f"{path}: found no questions at {problems}, give their file as --problems")
    golds = read_table(problems, ProblemTable).select("question_id", "gold_answer")
    joined = table.join(golds, on="question_id", how="left", maintain_order="left")
    unknown = joined.filter(pl.col("gold_answer").is_null())
    if not unknown.is_empty():
        raise DataError(f"{path}: question {unknown['question_id'][0]} is not in {problems}")
    return [
        Transcript(
            place=f"noise {row['noise_level']:g} seed {row['noise_seed']} sample {row['sample']}",
            group=f"noise {row['noise_level']:g} seed {row['noise_seed']}",
            question_id=row["question_id"],
            gold_answer=row["gold_answer"],
            response=row["response"],
            truncated=row["finish_reason"] == "length",
        )
        for row in joined.sort("noise_level", "noise_seed", "sample", maintain_order=True).iter_rows(named=True)
    ]


def score_transcripts(
    name: str, transcripts: Sequence[Transcript], custom: Mapping[str, Grader] = MappingProxyType({})
) -> ScoredFile:
    """Return the results of every scorer on `transcripts`, in which the members of a group are consecutive.

    custom: graders by name, applied beside the scorers of numbers.
    """
    graders = {scorer: grader(scorer) for scorer in SCORERS} | dict(custom)
    graded = [
        {scorer: grade(transcript.response, transcript.gold_answer) for scorer, grade in graders.items()}
        for transcript in transcripts
    ]
    groups = []
    for group, members in groupby(range(len(transcripts)), key=lambda index: transcripts[index].group):
        indices = list(members)
        groups.append(
            _group_result(group, [transcripts[index] for index in indices], [graded[index] for index in indices])
        )
    return ScoredFile(
        file=name,
        responses=len(transcripts),
        groups=tuple(groups),
        agreement=tuple(
            Agreement(scorer=ours, harness=theirs, same=sum(row[ours].correct == row[theirs].correct for row in graded))
            for ours, theirs in HARNESS_COUNTERPARTS.items()
        ),
        disagreements=tuple(_disagreements(transcripts, graded)),
    )


def _transcript(line: bytes, where: str, number: int, numbers_only: bool) -> Transcript:
    try:
        parsed = json_format.loads(line)
    except json_format.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON ({error.msg} at character {error.pos + 1})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not valid UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: unreadable JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise DataError(
            f"{where}: found {str(parsed)[:40]!r}, expected an object with the keys response and gold_answer"
        )
    try:
        content = TranscriptLine.model_validate(parsed)
    except ValidationError as error:
        raise DataError(f"{where}: {describe_validation_error(error)}") from error
    if (content.gold_answer is None) == (content.answer is None):
        state = "neither" if content.answer is None else "both"
        raise DataError(f"{where}: found {state} of gold_answer and answer, expected one of them")
    text = str(content.gold_answer if content.answer is None else content.answer)
    gold = text.rsplit("####", 1)[-1].strip()
    if numbers_only and normalise_number(gold) is None:
        raise DataError(f"{where}: gold answer {gold[:40]!r} is not a number; other answers need --scorer")
    return Transcript(
        place=f"line {number}",
        group="",
        # JSON may contain half a surrogate pair, which cannot be printed.
        question_id=None
        if content.question_id is None
        else str(content.question_id).encode("utf-8", "backslashreplace").decode(),
        gold_answer=gold,
        response=content.response,
        truncated=None if content.finish_reason is None else content.finish_reason == "length",
    )


def _group_result(name: str, members: Sequence[Transcript], graded: Sequence[Mapping[str, Graded]]) -> GroupResult:
    cut = [transcript.truncated for transcript in members if transcript.truncated is not None]
    counts = {scorer: tally([row[scorer] for row in graded]) for scorer in graded[0]}
    return GroupResult(
        name=name,
        responses=len(members),
        truncated=sum(cut) if len(cut) == len(members) else None,
        scorers=tuple(
            ScorerResult(
                scorer=scorer,
                correct=count.correct,
                accuracy=count.correct / len(members),
                parse_failures=count.parse_failures,
            )
            for scorer, count in counts.items()
        ),
    )


def _disagreements(transcripts: Sequence[Transcript], graded: Sequence[Mapping[str, Graded]]) -> Iterator[Disagreement]:
    for transcript, row in zip(transcripts, graded, strict=True):
        if len({grading.correct for grading in row.values()}) > 1:
            yield Disagreement(
                place=transcript.place,
                question_id=transcript.question_id,
                gold_answer=transcript.gold_answer,
                found={
                    scorer: FoundAnswer(answer=grading.answer, correct=grading.correct)
                    for scorer, grading in row.items()
                },
            )


def _lines(scored: ScoredFile) -> Iterator[str]:
    width = max(18, *(len(result.scorer) + 1 for group in scored.groups for result in group.scorers))
    for group in scored.groups:
        cut = "unknown" if group.truncated is None else str(group.truncated)
        name = f", {group.name}" if group.name else ""
        yield f"{scored.file}{name}: {group.responses} responses, cut off: {cut}"
        yield f"  {'scorer':<{width}}{'correct':>8}{'%':>8}{'no answer':>12}"
        for result in group.scorers:
            counts = f"{result.correct:>8}{100 * result.accuracy:>8.1f}{result.parse_failures:>12}"
            yield f"  {result.scorer:<{width}}{counts}"
    for pair in scored.agreement:
        yield f"{pair.scorer} and {pair.harness} agree on {pair.same} of {scored.responses}"
    yield f"responses on which scorers disagree: {len(scored.disagreements)}"
    for difference in scored.disagreements[:MAX_SHOWN]:
        name = "" if difference.question_id is None else f" {difference.question_id!r}"
        answers = ", ".join(
            f"{scorer} {'none' if found.answer is None else repr(found.answer)} "
            f"{'correct' if found.correct else 'wrong'}"
            for scorer, found in difference.found.items()
        )
        yield f"  {difference.place}{name}, gold {difference.gold_answer}: {answers}"
    if len(scored.disagreements) > MAX_SHOWN:
        yield f"  and {len(scored.disagreements) - MAX_SHOWN} more; --json prints all"
