"""Shards of an evaluation: each batch once, results assembled in any order, missing or repeated shards refused."""

import random
from dataclasses import replace

import pytest
from tiny_evaluation import evaluation_spec

from aqnpipe.errors import WorkerError
from aqnpipe.evaluation.shards import (
    SHARD_JSON,
    SHARD_RESULT_JSON,
    assembled_passes,
    local_shard_runner,
    shards_of,
)

PROMPTS = [[5] * length for length in (4, 9, 4, 2, 7)]


def spec(**changes):
    return evaluation_spec({"noise_seeds": (3, 4)}, **changes)


@pytest.fixture(scope="module")
def results(save_model):
    shards = shards_of(spec(), PROMPTS)
    with local_shard_runner(spec(), save_model(num_layers=1), max_tokens=16) as runner:
        return list(runner.run(shards))


def test_a_shard_is_a_batch_of_prompts_of_similar_length():
    shards = shards_of(spec(), PROMPTS)
    assert [shard.number for shard in shards] == list(range(3 * 2 * 3))
    assert [(shard.noise_level, shard.noise_seed) for shard in shards[::6]] == [(0.0, 3), (0.2, 3), (0.2, 4)]
    assert {len(shard.batches) for shard in shards} == {1}
    first_pass = [shard.batches[0] for shard in shards[:6]]
    assert [batch.questions for batch in first_pass] == [(3, 0), (2, 4), (1,)] * 2
    assert [(batch.sample, batch.number, batch.step) for batch in first_pass] == [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2, 2),
        (1, 0, 3),
        (1, 1, 4),
        (1, 2, 5),
    ]
    assert first_pass[1].prompts == ((5,) * 4, (5,) * 7)


def test_a_pass_with_a_threshold_cached_from_its_first_call_is_one_shard():
    fault = {"type": "dead_zone", "layer": 0, "magnitude": 0.1}
    dynamic, cached = (shards_of(spec(faults=(fault | {"threshold": t},)), PROMPTS) for t in ("dynamic", "cached"))
    assert (len(dynamic), len(cached)) == (18, 3)
    assert [batch for shard in dynamic[:6] for batch in shard.batches] == list(cached[0].batches)


def test_shards_and_results_survive_json(results):
    shard = shards_of(spec(), PROMPTS)[7]
    assert SHARD_JSON.validate_json(SHARD_JSON.dump_json(shard)) == shard
    written = [SHARD_RESULT_JSON.dump_json(result) for result in results]
    assert [SHARD_RESULT_JSON.validate_json(text) for text in written] == list(results)


def test_the_order_of_results_does_not_matter(results):
    shards = shards_of(spec(), PROMPTS)
    in_order = list(assembled_passes(spec(), shards, results))
    shuffled = random.Random(1).sample(results, len(results))
    assert list(assembled_passes(spec(), shards, shuffled)) == in_order
    assert [(done.noise_level, done.noise_seed) for done in in_order] == [(0.0, 3), (0.2, 3), (0.2, 4)]
    assert [[len(sample) for sample in done.samples] for done in in_order] == [[5, 5]] * 3
    second = results[1].completions[0]
    assert [in_order[0].samples[0][question] for question in (2, 4)] == list(second)


def test_a_receipt_covers_all_shards_of_its_pass(results):
    passes = list(assembled_passes(spec(), shards_of(spec(), PROMPTS), results))
    for number, done in enumerate(passes):
        (record,) = done.receipt.check().phases
        states = [result.measurements.state for result in results[6 * number : 6 * (number + 1)]]
        assert record.passes == sum(state.phases[0].passes for state in states)
        assert record.calls == sum(state.phases[0].calls for state in states)
        assert sum(cell.elements for cell in done.receipt.cells) == sum(
            cell.elements for state in states for cell in state.cells
        )


def test_a_missing_shard_is_refused_and_its_pass_is_not_yielded(results):
    passes = assembled_passes(spec(), shards_of(spec(), PROMPTS), [result for result in results if result.number != 8])
    assert [(next(passes).noise_seed)] == [3]
    with pytest.raises(WorkerError, match="shards 8 of 18 of the evaluation were not run"):
        list(passes)


def test_a_shard_that_was_run_twice_is_refused(results):
    with pytest.raises(WorkerError, match="shard 2 of 18 of the evaluation was run twice"):
        list(assembled_passes(spec(), shards_of(spec(), PROMPTS), [*results[:3], results[2]]))


def test_a_shard_with_too_few_completions_is_refused(results):
    short = replace(results[0], completions=(results[0].completions[0][:1],))
    with pytest.raises(WorkerError, match="shard 0 of 18 of the evaluation is incomplete"):
        list(assembled_passes(spec(), shards_of(spec(), PROMPTS), [short, *results[1:]]))
