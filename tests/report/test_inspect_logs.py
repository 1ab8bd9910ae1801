"""Logs for Inspect's viewer: what they say of every response, read as JSON, and by inspect_ai where it is installed."""

import json
from pathlib import Path

import polars as pl
import pytest
from made_up import evaluation_pass

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.errors import DataError
from aqnpipe.report.export import write_inspect_logs

NUM_QUESTIONS = 20
SETTINGS = EvaluationConfig(max_response_tokens=24, batch_size=8)
HOSTILE = "<script>alert(1)</script> \x00 é"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two arms, of which one was evaluated twice, at two levels, with two noise seeds at the second."""
    folder = tmp_path_factory.mktemp("results")
    ids = [f"q{number:05d}" for number in range(NUM_QUESTIONS)]
    questions = {"question_id": ids, "question": [f"{name}?" for name in ids]}
    problems = pl.DataFrame(questions | {"answer": "#### 7", "gold_answer": "7"})
    write_table(folder / "data" / "test.parquet", problems, ProblemTable)
    for arm, step in (("plain", 4), ("plain", 8), ("noisy", 8)):
        passes = [(0.0, 0), (0.05, 0), (0.05, 1)]
        table = pl.concat([evaluation_pass(arm, 3, *each, NUM_QUESTIONS, step / 8) for each in passes])
        text = pl.when(pl.col("question_id") == ids[0]).then(pl.lit(HOSTILE)).otherwise("response")
        table = table.with_columns(response=text)
        write_table(folder / "eval" / "base" / arm / "seed3" / f"step{step}.parquet", table, EvaluationTable)
    return folder


@pytest.fixture(scope="module")
def logs(results, tmp_path_factory):
    folder = tmp_path_factory.mktemp("logs")
    assert write_inspect_logs(results, "small", SETTINGS, folder) == 4
    return folder


def by_task(logs):
    read = [json.loads(path.read_text()) for path in logs.iterdir()]
    return {(log["eval"]["task"], log["eval"]["model"]): log for log in read}


def test_a_log_per_last_checkpoint_and_level(logs):
    assert set(by_task(logs)) == {
        (f"small, noise {level}", f"base/{arm}/seed3/step8") for level in ("0", "0.05") for arm in ("plain", "noisy")
    }


def test_every_response_has_its_sample_with_scores(results, logs):
    log = by_task(logs)["small, noise 0.05", "base/plain/seed3/step8"]
    rows = pl.read_parquet(results / "eval/base/plain/seed3/step8.parquet").filter(noise_level=0.05)
    assert log["eval"]["config"] == {"epochs": 2}
    assert len({(sample["id"], sample["epoch"]) for sample in log["samples"]}) == 2 * NUM_QUESTIONS
    found = {(sample["id"], sample["metadata"]["noise_seed"]): sample for sample in log["samples"]}
    for row in rows.iter_rows(named=True):
        sample = found[row["question_id"], row["noise_seed"]]
        assert sample["output"]["choices"][0]["message"]["content"] == row["response"]
        assert sample["input"] == f"{row['question_id']}?"
        assert sample["target"] == "7"
        score = {"value": "C" if row["correct_strict"] else "I", "answer": row["answer_strict"]}
        assert sample["scores"]["strict"] == score
        cut = sample["output"]["choices"][0]["stop_reason"] == "max_tokens"
        assert cut == (row["finish_reason"] == "length")
    first = log["results"]["scores"][0]
    assert (first["name"], first["metrics"]["accuracy"]["value"]) == ("strict", rows["correct_strict"].mean())


def test_a_log_with_noise_has_the_score_without_for_the_viewer_s_filter(results, logs):
    plain, noisy = (by_task(logs)[f"small, noise {level}", "base/plain/seed3/step8"] for level in ("0", "0.05"))
    assert all("without_noise" not in sample["scores"] for sample in plain["samples"])
    before = {sample["id"]: sample["scores"]["strict"] for sample in plain["samples"]}
    assert all(sample["scores"]["without_noise"] == before[sample["id"]] for sample in noisy["samples"])
    changed = [one for one in noisy["samples"] if one["scores"]["strict"] != one["scores"]["without_noise"]]
    assert 0 < len(changed) < len(noisy["samples"])
    score = noisy["results"]["scores"][-1]
    assert score["name"] == "without_noise"
    assert score["metrics"]["accuracy"]["value"] == plain["results"]["scores"][0]["metrics"]["accuracy"]["value"]


def test_logs_of_an_evaluation_without_a_level_0_have_no_score_without_noise(results, tmp_path):
    path = Path("eval") / "base" / "plain" / "seed3" / "step8.parquet"
    write_table(tmp_path / path, pl.read_parquet(results / path).filter(noise_level=0.05), EvaluationTable)
    assert write_inspect_logs(tmp_path, "small", SETTINGS, tmp_path / "logs") == 1
    (log,) = by_task(tmp_path / "logs").values()
    assert "without_noise" not in log["samples"][0]["scores"]


def test_writing_again_leaves_the_same_files(results, logs):
    before = {path.name: path.read_bytes() for path in logs.iterdir()}
    write_inspect_logs(results, "small", SETTINGS, logs)
    assert {path.name: path.read_bytes() for path in logs.iterdir()} == before


def test_a_damaged_evaluation_is_one_line(results, tmp_path):
    path = tmp_path / "eval" / "base" / "plain" / "seed0" / "step1.parquet"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"step1\.parquet"):
        write_inspect_logs(tmp_path, "small", SETTINGS, tmp_path / "logs")


def test_inspect_reads_them(results, logs):
    log = pytest.importorskip("inspect_ai.log", reason="inspect_ai is not installed")
    listed = [log.read_eval_log(info) for info in log.list_eval_logs(str(logs))]
    assert len(listed) == 4
    read = {(one.eval.task, one.eval.model): one for one in listed}["small, noise 0.05", "base/plain/seed3/step8"]
    assert (read.status, read.results.total_samples, len(read.samples)) == ("success", 40, 40)
    rows = pl.read_parquet(results / "eval/base/plain/seed3/step8.parquet").filter(noise_level=0.05)
    assert read.results.scores[0].metrics["accuracy"].value == rows["correct_strict"].mean()
    assert sum(sample.scores["strict"].value == "C" for sample in read.samples) == rows["correct_strict"].sum()
    texts = {row["response"] for row in rows.iter_rows(named=True)}
    assert {sample.output.completion for sample in read.samples} == texts
    assert {sample.messages[1].text for sample in read.samples} == texts


def test_the_study_s_scorer_is_first_and_names_of_noises_are_its_own(results, tmp_path):
    (tmp_path / "eval").symlink_to(results / "eval")
    noises = {"fp4": "w4a16_mxfp4"}
    settings = EvaluationConfig(
        max_response_tokens=24, batch_size=8, noises=noises, noise_levels=(0.0,), primary_scorer="last_number"
    )
    assert write_inspect_logs(tmp_path, "small", settings, tmp_path / "logs") == 4
    log = by_task(tmp_path / "logs")["small, noise 0", "base/plain/seed3/step8"]
    assert [score["name"] for score in log["results"]["scores"]][:2] == ["last_number", "strict"]
    assert log["samples"][0]["input"] == log["samples"][0]["id"], "the questions are not there"


def test_without_evaluations_it_is_one_line(tmp_path):
    with pytest.raises(DataError, match="found no evaluations in eval/, expected the results folder of a study"):
        write_inspect_logs(tmp_path, "small", SETTINGS, tmp_path / "logs")
