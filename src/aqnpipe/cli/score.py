"""`aqnpipe score`: every scorer on stored responses; `aqnpipe check-published`: published figures, tested again."""

import json as json_format
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer
from pydantic import BaseModel, ConfigDict, StrictFloat, StrictInt, StrictStr, ValidationError

from aqnpipe.cli.options import as_printed, console_of
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.custom_code import source_digest
from aqnpipe.config.evaluation import Scorer, refuse_unknown_scorer
from aqnpipe.data.graders import Grader, grader, pairs
from aqnpipe.data.scoring import NUMBER_SCORERS, SCORERS, normalise_number
from aqnpipe.errors import DataError

if TYPE_CHECKING:
    import polars as pl

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


def score(
    transcripts: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines file with response, gold_answer (or answer) and optionally question_id and "
            "finish_reason, or an evaluation of a study (.parquet)"
        ),
    ],
    problems: Annotated[
        Path | None, typer.Option(help="questions of an evaluation; default: data/test.parquet in its results folder")
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
    custom: dict[str, Grader] = {}
    for name in scorer or ():
        refuse_unknown_scorer(name)
        custom[name] = grader(name, source_digest(name) if ":" in name else None)
    if transcripts.suffix == ".parquet":
        rows = read_evaluation(transcripts, problems)
    elif problems is not None:
        raise DataError(f"--problems {problems}: {transcripts} is not a .parquet file and contains gold answers")
    else:
        rows = read_transcripts(transcripts, numbers_only=custom.keys() <= {*NUMBER_SCORERS})
    scored = score_transcripts(str(transcripts), rows, custom)
    typer.echo(json_format.dumps(scored, indent=2, ensure_ascii=False) if json else "\n".join(_lines(scored)))


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
    found = []
    for row in joined.sort("noise_level", "noise_seed", "sample", maintain_order=True).iter_rows(named=True):
        group, cut = f"noise {row['noise_level']:g} seed {row['noise_seed']}", row["finish_reason"] == "length"
        place, gold = f"{group} sample {row['sample']}", row["gold_answer"]
        found.append(Transcript(place, group, row["question_id"], gold, row["response"], cut))
    return found


def score_transcripts(
    name: str, transcripts: Sequence[Transcript], custom: Mapping[str, Grader] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the output of `aqnpipe score --json`: results of every scorer by group, agreement, and disagreements.

    custom: graders by name, applied beside the scorers of numbers. `truncated`, of a group, is the number of responses
    that were cut off at the token limit, null unless known for every response. `found`, of a response on which scorers
    disagree, has the answer that each found (null for none), and whether it is correct.
    """
    import polars as pl

    graders = {scorer: grader(scorer) for scorer in SCORERS} | dict(custom)
    table = pl.DataFrame(
        [
            transcript._asdict()
            | pairs({scorer: grade(transcript.response, transcript.gold_answer) for scorer, grade in graders.items()})
            for transcript in transcripts
        ],
        infer_schema_length=None,
    )
    differ = pl.concat_list([f"correct_{scorer}" for scorer in graders]).list.n_unique() > 1
    return {
        "file": name,
        "responses": table.height,
        "groups": [
            {
                "name": str(group),
                "responses": members.height,
                "truncated": None if members["truncated"].null_count() else members["truncated"].sum(),
                "scorers": [_counts(scorer, members) for scorer in graders],
            }
            for (group,), members in table.group_by("group", maintain_order=True)
        ],
        "agreement": [
            {"scorer": ours, "harness": theirs, "same": (table[f"correct_{ours}"] == table[f"correct_{theirs}"]).sum()}
            for ours, theirs in HARNESS_COUNTERPARTS.items()
        ],
        "disagreements": [
            {name: row[name] for name in ("place", "question_id", "gold_answer")}
            | {"found": {name: {kind: row[f"{kind}_{name}"] for kind in ("answer", "correct")} for name in graders}}
            for row in table.filter(differ).iter_rows(named=True)
        ],
    }


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
        question_id=None if content.question_id is None else _printable(str(content.question_id)),
        gold_answer=_printable(gold),
        response=_printable(content.response),
        truncated=None if content.finish_reason is None else content.finish_reason == "length",
    )


def _printable(text: str) -> str:
    """Return a text that can be printed: JSON may contain half a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def _counts(scorer: str, members: "pl.DataFrame") -> dict[str, Any]:
    correct, failures = members[f"correct_{scorer}"].sum(), members[f"answer_{scorer}"].null_count()
    return {"scorer": scorer, "correct": correct, "accuracy": correct / members.height, "parse_failures": failures}


def _lines(scored: Mapping[str, Any]) -> Iterator[str]:
    width = max(18, *(len(result["scorer"]) + 1 for result in scored["groups"][0]["scorers"]))
    for group in scored["groups"]:
        cut = "unknown" if group["truncated"] is None else str(group["truncated"])
        name = f", {group['name']}" if group["name"] else ""
        yield f"{scored['file']}{name}: {group['responses']} responses, cut off: {cut}"
        yield f"  {'scorer':<{width}}{'correct':>8}{'%':>8}{'no answer':>12}"
        for result in group["scorers"]:
            counts = f"{result['correct']:>8}{100 * result['accuracy']:>8.1f}{result['parse_failures']:>12}"
            yield f"  {result['scorer']:<{width}}{counts}"
    for pair in scored["agreement"]:
        yield f"{pair['scorer']} and {pair['harness']} agree on {pair['same']} of {scored['responses']}"
    differing = scored["disagreements"]
    yield f"responses on which scorers disagree: {len(differing)}"
    for response in differing[:MAX_SHOWN]:
        name = "" if response["question_id"] is None else f" {response['question_id']!r}"
        answers = ", ".join(
            f"{scorer} {'none' if found['answer'] is None else repr(found['answer'])} "
            f"{'correct' if found['correct'] else 'wrong'}"
            for scorer, found in response["found"].items()
        )
        yield f"  {response['place']}{name}, gold {response['gold_answer']}: {answers}"
    if len(differing) > MAX_SHOWN:
        yield f"  and {len(differing) - MAX_SHOWN} more; --json prints all"


def check_published(
    published: Annotated[Path, typer.Argument(help="file of published figures, described in config/README.md")],
    json: Annotated[bool, typer.Option("--json", help="print the whole check as JSON")] = False,
) -> None:
    """Test published figures again: which are possible, how precise they are, and which claims they support."""
    from aqnpipe.published.check import check_published_file
    from aqnpipe.report.claims import summary_line
    from aqnpipe.report.published import published_detectable, published_tables
    from aqnpipe.report.words import load_words

    check = check_published_file(published)
    if json:
        typer.echo(check.model_dump_json(indent=2))
        return
    words, console = load_words("en"), console_of(stderr=False, width=160)
    console.print(f"{check.title}\n{check.source}\n", markup=False)
    claims, sentences, accuracies, series, losses = published_tables(check, words, {})
    for table in (accuracies, losses, series, claims, sentences, published_detectable(check, words)):
        if table.rows:
            console.print(as_printed(table))
    remarks = [f"- {one.id}: {words.of(remark)}" for one in check.claims for remark in (*one.deviations, *one.notes)]
    impossible = words(
        "published.num_impossible",
        impossible=sum(not accuracy.possible for accuracy in check.accuracies),
        accuracies=len(check.accuracies),
    )
    conclusion = words.paragraph([summary_line((claim.verdict for claim in check.claims), words), impossible])
    for line in [*([words("published.remarks")] if remarks else []), *remarks, conclusion]:
        console.print(line, markup=False)
