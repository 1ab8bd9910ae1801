"""Evaluations of several samples per question: rows, which draws are shared, refusals."""

import polars as pl
import pytest
from pydantic import ValidationError

from aqnpipe.artifacts.evaluations import EvaluationTable
from aqnpipe.artifacts.files import read_json, read_table, write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.generated import generate_problems
from aqnpipe.evaluation.shards import sampling_of
from aqnpipe.evaluation.stage import evaluate, pass_summary
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

NUM_QUESTIONS = 7


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "test.parquet"
    generated = generate_problems(GeneratedDataset(num_train=1, num_test=NUM_QUESTIONS), "test")
    write_table(
        path,
        pl.DataFrame(
            {
                "question_id": [f"test-{number:05d}" for number in range(NUM_QUESTIONS)],
                "question": [problem.question for problem in generated],
                "answer": [problem.answer for problem in generated],
                "gold_answer": [problem.answer.rsplit("#### ")[-1] for problem in generated],
            }
        ),
        ProblemTable,
    )
    return path


@pytest.fixture(scope="module")
def run(problems, tmp_path_factory):
    def evaluated(lines=None, **evaluation):
        folder = tmp_path_factory.mktemp("evaluated")
        settings = {"noise_levels": (0.0, 0.1), "max_response_tokens": 12, "batch_size": 5} | evaluation
        spec = EvaluationSpec(
            model_role="base", arm_id="a", seed=0, step=1, dtype="float32", attention="eager", prompt={},
            evaluation=settings,
        )  # fmt: skip
        outputs = StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")
        evaluate(spec, builtin_folder("tiny"), problems, outputs, (lines if lines is not None else []).append)
        return read_table(outputs.table, EvaluationTable), read_json(outputs.receipt, EvaluationReceipts)

    return evaluated


@pytest.fixture(scope="module")
def sampled(run):
    return run(sampling={"temperature": 1.5, "num_samples": 3})


def responses(table, **keys):
    return table.filter(**keys).sort("question_id")["response"].to_list()


def test_a_row_per_question_pass_and_sample_with_receipts_of_all(sampled):
    table, receipts = sampled
    assert table.group_by("noise_level", "sample").len().sort("noise_level", "sample").rows() == [
        (level, sample, NUM_QUESTIONS) for level in (0.0, 0.1) for sample in (0, 1, 2)
    ]
    assert receipts.problems() == []
    assert len(receipts.passes) == 2


def test_samples_differ_and_are_reproducible(run, sampled):
    table, _ = sampled
    first, second = (responses(table, noise_level=0.0, sample=sample) for sample in (0, 1))
    assert sum(a != b for a, b in zip(first, second, strict=True)) > NUM_QUESTIONS // 2
    again, _ = run(sampling={"temperature": 1.5, "num_samples": 3})
    assert again.equals(table)


def test_fewer_samples_are_the_first_ones_and_another_seed_draws_others(run, sampled):
    table, _ = sampled
    fewer, _ = run(sampling={"temperature": 1.5, "num_samples": 1}, noise_levels=(0.0,))
    assert responses(fewer) == responses(table, noise_level=0.0, sample=0)
    other, _ = run(sampling={"temperature": 1.5, "num_samples": 1, "seed": 1}, noise_levels=(0.0,))
    assert responses(other) != responses(fewer)


def test_samples_at_a_temperature_near_zero_are_the_greedy_response(run):
    greedy, _ = run(noise_levels=(0.0,))
    cold, _ = run(noise_levels=(0.0,), sampling={"temperature": 1e-4, "num_samples": 2})
    assert greedy["sample"].unique().to_list() == [0]
    for sample in (0, 1):
        assert responses(cold, sample=sample) == responses(greedy)


def test_draws_are_keyed_only_by_noise_seed_sample_and_batch():
    settings = {"sampling": {"temperature": 0.7, "num_samples": 2}, "noise_seeds": (3, 4), "noise_levels": (0.0,)}
    spec = EvaluationSpec(
        model_role="base", arm_id="a", seed=0, step=1, dtype="float32", attention="eager", prompt={},
        evaluation=settings | {"max_response_tokens": 8, "batch_size": 2},
    )  # fmt: skip
    keys = [(noise_seed, sample, batch) for noise_seed in (3, 4) for sample in (0, 1) for batch in (0, 1, 2)]
    seeds = [sampling_of(spec, *key).seed for key in keys]
    assert len(set(seeds)) == len(keys)
    assert {sampling_of(spec, *key).temperature for key in keys} == {0.7}


def test_the_log_counts_responses_cut_off_or_without_an_answer(run):
    lines = []
    table, _ = run(lines, noise_levels=(0.0,), max_response_tokens=3)
    assert set(table["finish_reason"]) == {"length"}
    assert pass_summary(table, "strict") in lines[0]
    assert (
        f"0/{NUM_QUESTIONS} correct, {NUM_QUESTIONS} cut off; without an answer: strict {NUM_QUESTIONS}, " in lines[0]
    )


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0, "num_samples": 2}, {"temperature": 1}, {"temperature": 1, "num_samples": 0}]
)
def test_bad_sampling_is_refused(sampling):
    with pytest.raises(ValidationError):
        EvaluationConfig(max_response_tokens=8, batch_size=2, sampling=sampling)
