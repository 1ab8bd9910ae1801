"""`aqnpipe score`: counts, disagreements, evaluations, and errors that name the line; `aqnpipe check-published`."""

import json
from pathlib import Path

import polars as pl
import pytest
from typed import typed

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.published import PublishedCheck
from aqnpipe.cli.main import main
from aqnpipe.cli.score import read_evaluation, read_transcripts, score_transcripts
from aqnpipe.data.scoring import SCORERS
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.report.words import load_words

LINES = [
    {"question_id": "a", "response": "#### 7", "gold_answer": 7, "finish_reason": "stop"},
    {"question_id": "b", "response": "It is 7.", "gold_answer": "7", "finish_reason": "length"},
    {"question_id": 3, "response": "#### $1,000", "answer": "10*100\n#### 1,000", "finish_reason": "stop"},
    {"response": "no idea", "gold_answer": "-3", "finish_reason": "length", "left": "alone"},
]
# scorer: (right, without an answer)
COUNTS = {"strict": (2, 2), "last_number": (3, 1), "harness_strict": (1, 3), "harness_flexible": (3, 1)}


@pytest.fixture
def transcripts(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)) + "\n\n")
    return path


def run(*arguments):
    return typed("score", *arguments, catch_exceptions=False)


def test_every_scorer_counts_by_hand(transcripts):
    scored = json.loads(run(transcripts, "--json").stdout)
    (group,) = scored["groups"]
    assert (scored["responses"], group["truncated"]) == (4, 2)
    assert {result["scorer"]: (result["correct"], result["parse_failures"]) for result in group["scorers"]} == COUNTS
    assert {result["scorer"]: result["accuracy"] for result in group["scorers"]} == {
        scorer: right / 4 for scorer, (right, _) in COUNTS.items()
    }
    assert [(pair["scorer"], pair["same"]) for pair in scored["agreement"]] == [("strict", 3), ("last_number", 4)]
    assert [(response["place"], response["question_id"]) for response in scored["disagreements"]] == [
        ("line 2", "b"),
        ("line 3", "3"),
    ]
    assert scored["disagreements"][1]["found"]["harness_strict"] == {"answer": None, "correct": False}


def test_the_table_says_the_same(transcripts):
    text = run(transcripts).stdout
    assert f"{transcripts}: 4 responses, cut off: 2" in text
    for scorer, (right, missing) in COUNTS.items():
        line = next(line for line in text.splitlines() if line.split()[:1] == [scorer])
        assert line.split()[1:] == [str(right), f"{25 * right:.1f}", str(missing)]
    assert "line 2 'b', gold 7: strict none wrong, last_number '7' correct" in text


def test_truncation_is_unknown_unless_every_line_says(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in [*LINES, {"response": "1", "gold_answer": 1}]))
    assert score_transcripts("t", read_transcripts(path))["groups"][0]["truncated"] is None
    assert "cut off: unknown" in run(path).stdout


def test_only_the_first_disagreements_are_printed(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"response": "it is 1", "gold_answer": 1}\n' * 25)
    text = run(path).stdout
    assert text.count("gold 1:") == 20
    assert "and 5 more; --json prints all" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "found '[1]', expected an object"),
        ('{"gold_answer": 1}', "response: missing key"),
        ('{"response": 5, "gold_answer": 1}', "response: "),
        ('{"response": "5"}', "found neither of gold_answer and answer, expected one of them"),
        ('{"response": "5", "gold_answer": 5, "answer": 5}', "found both of gold_answer and answer"),
        ('{"response": "5", "gold_answer": "five"}', "gold answer 'five' is not a number"),
        ('{"response": "5", "gold_answer": true}', "gold_answer"),
        ('{"response": "5", "gold_answer": NaN}', "gold answer 'nan' is not a number"),
        ('{"response": "5", "gold_answer": 5, "finish_reason": "eos"}', "finish_reason: "),
        ("[" * 100_000, "unreadable JSON"),
        ('{"response": "5", "gold_answer": 1' + "0" * 5000 + "}", "unreadable JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(LINES[0]) + "\n" + line + "\n")
    with pytest.raises(DataError) as error:
        read_transcripts(path)
    assert str(error.value).startswith(f"{path}:2: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"response": "1", "gold_answer": 1}\r\n{"response": "\xff", "gold_answer": 1}')
    with pytest.raises(DataError, match=r"t\.jsonl:2: not valid UTF-8"):
        read_transcripts(path)


def test_half_a_character_can_be_printed(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text('{"question_id": "\\ud800", "response": "\\ud800 1", "gold_answer": 1}')
    for arguments in ((), ("--json",)):
        assert "ud800" in run(path, *arguments).stdout


def test_files_that_hold_nothing_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"missing\.jsonl: no such file, expected JSON Lines"):
        read_transcripts(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="found no lines"):
        read_transcripts(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="directory"):
        read_transcripts(tmp_path)


@pytest.fixture
def evaluation(tmp_path):
    table = tmp_path / "results" / "eval" / "base" / "E5" / "seed0" / "step10.parquet"
    rows = [("a", 0.0, 0), ("b", 0.0, 0), ("a", 0.1, 0), ("b", 0.1, 0), ("a", 0.1, 1), ("b", 0.1, 1)]
    content = pl.DataFrame(rows, schema=["question_id", "noise_level", "noise_seed"], orient="row").select(
        pl.all(),
        pl.lit(0, pl.Int64).alias("sample"),
        pl.Series("response", ["#### 1", "#### 2", "1", "#### 2", "#### 9", ""]),
        *(pl.lit(None, pl.String).alias(f"answer_{scorer}") for scorer in SCORERS),
        *(pl.lit(False).alias(f"correct_{scorer}") for scorer in SCORERS),
        pl.lit(3, pl.Int64).alias("response_tokens"),
        pl.Series("finish_reason", ["stop"] * 4 + ["length"] * 2),
    )
    write_table(table, content, EvaluationTable)
    problems = pl.DataFrame({"question_id": ["a", "b"], "question": ["?", "??"], "answer": ["", ""]})
    problems = problems.with_columns(gold_answer=pl.Series(["1", "2"]))
    write_table(tmp_path / "results" / "data" / "test.parquet", problems, ProblemTable)
    return table


def test_an_evaluation_is_scored_again_pass_by_pass(evaluation):
    groups = score_transcripts("e", read_evaluation(evaluation, None))["groups"]
    assert [(group["name"], group["responses"], group["truncated"]) for group in groups] == [
        ("noise 0 seed 0", 2, 0),
        ("noise 0.1 seed 0", 2, 0),
        ("noise 0.1 seed 1", 2, 2),
    ]
    strict = [group["scorers"][0] for group in groups]
    assert [(found["correct"], found["parse_failures"]) for found in strict] == [(2, 0), (1, 1), (0, 1)]
    assert run(evaluation).exit_code == 0


def test_questions_that_are_missing_are_named(evaluation, tmp_path, transcripts):
    problems = evaluation.parents[4] / "data" / "test.parquet"
    moved = problems.rename(tmp_path / "elsewhere.parquet")
    with pytest.raises(DataError, match="give their file as --problems"):
        read_evaluation(evaluation, None)
    assert len(read_evaluation(evaluation, moved)) == 6
    write_table(moved, pl.read_parquet(moved).head(1), ProblemTable)
    with pytest.raises(DataError, match="question b is not in"):
        read_evaluation(evaluation, moved)
    with pytest.raises(DataError, match="contains gold answers"):
        run(transcripts, "--problems", Path(moved))


def test_scorers_of_texts_and_functions_are_applied_beside_those_of_numbers(own_module):
    starts = f"{own_module('def starts(response, gold): return response.startswith(gold)')}:starts"
    lines = [{"response": "rose red", "gold_answer": "rose"}, {"response": "red rose", "gold_answer": "red rose"}]
    Path("t.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(DataError, match="gold answer 'rose' is not a number; other answers need --scorer"):
        run("t.jsonl")
    with pytest.raises(DataError, match="gold answer 'rose' is not a number"):
        run("t.jsonl", "--scorer", "strict")
    scored = json.loads(run("t.jsonl", "--scorer", starts, "--scorer", "text", "--json").stdout)
    counts = {result["scorer"]: result["correct"] for result in scored["groups"][0]["scorers"]}
    assert (counts[starts], counts["text"], counts["strict"]) == (2, 1, 0)


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        ("strickt", "--scorer: found 'strickt', expected 'strict'"),
        ("gone_for_good:f", "gone_for_good:f: no module gone_for_good in the working directory"),
    ],
)
def test_a_scorer_that_is_not_there_is_one_line(transcripts, scorer, message):
    with pytest.raises(ConfigError) as refused:
        run(transcripts, "--scorer", scorer)
    assert str(refused.value).startswith(message)


PUBLISHED = str(Path(__file__).parents[2] / "config" / "published.yaml")


@pytest.fixture
def check(monkeypatch, capsys):
    """Run `aqnpipe check-published` in this process; return exit code, standard output and standard error."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["aqnpipe", "check-published", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, *capsys.readouterr()

    return run


def test_the_table_names_every_claim_and_the_impossible_figure(check):
    code, output, errors = check(PUBLISHED)
    assert (code, errors) == (0, "")
    assert "NO: between 89.46 and 89.54" in output
    assert "1 of 50 accuracies are impossible" in output
    assert "26 claims: 17 not shown, 9 invalid" in output
    assert max(map(len, output.splitlines())) <= 160


def test_json_is_the_artifact(check):
    found = PublishedCheck.model_validate(json.loads(check(PUBLISHED, "--json")[1]))
    assert found.claims[0].verdict == "not_shown"
    assert found.claims[0].p_holm < 0.05 < found.claims[0].p_run_to_run_holm
    assert load_words("zh").all_of(found.claims[0].statements).startswith("E5 对 baseline：−8.72 个百分点")


def test_a_broken_file_is_one_line_and_exit_2(check, tmp_path):
    path = tmp_path / "paper.yaml"
    path.write_text("title: A paper\nsource: x\naccuracies: [{id: a}]\n")
    code, output, errors = check(str(path))
    assert (code, output) == (2, "")
    assert errors.startswith(f"ERROR: {path}: accuracies.0.label: missing key")
    assert errors.count("\n") == 1
