"""Receipts on the page: runs whose noise the number format swallowed."""

from dataclasses import replace
from types import SimpleNamespace

import made_up

from aqnpipe.config.noise import CacheNoise, OperatorNoise, RelativeGaussian
from aqnpipe.noise.receipts.table import CACHE, Row
from aqnpipe.report.receipts import evaluation_table, phase_table, run_overview, run_table
from aqnpipe.report.words import load_words

NOISE = OperatorNoise(error=RelativeGaussian(scale=1e-4), phases=("rollout",))


def run(arm, **changes):
    receipt = made_up.receipt(NOISE, None, ("rollout",))
    rows = tuple(replace(row, **changes) if row.error else row for row in receipt.rows)
    return SimpleNamespace(arm=arm, seed=0, model="base", receipt=receipt.model_copy(update={"rows": rows}))


def test_noise_that_the_number_format_swallows_is_warned_of_and_accepted():
    swallowed = {"measured_elements": 100, "squares": 100 * 1e-12, "rounding_squares": 100 * 1.6e-3**2}
    lost, whole = run("E4b", **swallowed), run("E5")
    table = run_overview([lost, whole], load_words("en"), lambda *where: "")
    assert [row.alert for row in table.rows] == [True, False]
    assert [row.cells[1] for row in table.rows] == ["accepted", "accepted"]
    assert "E4b seed 0 1.0 %" in table.note.replace("\u00a0", " ")
    assert "E5" not in table.note


def test_without_such_noise_there_is_no_warning():
    assert run_overview([run("E5")], load_words("en"), lambda *where: "").note == ""


def test_the_page_names_runs_and_evaluations_whose_engine_replayed_graphs():
    for table_of, changes in ((run_table, {}), (evaluation_table, {"shards": 1})):
        made = []
        for arm, eager in (("baseline", False), ("E5", True), ("E6", None)):
            generation = {} if eager is None else {"backend": "vllm", "enforce_eager": eager}
            record = SimpleNamespace(device="8 x A100", code_digest="0" * 64, inputs_sha256={}, generation=generation)
            source = SimpleNamespace(model="base", arm=arm, seed=0, step=4, record="run.json")
            receipts = SimpleNamespace(facts=SimpleNamespace(**changes))
            parts = {"source": source, "path": source.record, "record": record, "receipts": receipts}
            made.append(SimpleNamespace(**vars(source) | parts))
        texts = [" ".join(map(str, row.cells)) for row in table_of(made, load_words("en"), lambda *where: "").rows]
        assert ["8 x A100, CUDA graphs without noise (vLLM)" in text for text in texts] == [True, False, False]
        assert all("8 x A100" in text for text in texts)


def test_a_cache_is_named_with_the_error_that_was_measured():
    cache = CacheNoise(format="int8")
    rows = [
        Row("rollout", layer=layer, operator=CACHE, calls=10, recomputed=40, elements=60)
        for layer in range(made_up.receipt(None, None, ("rollout",)).num_layers)
    ]
    for row in rows:
        row.add(squares=0.25, expected_squares=10_000.0)
    plain = made_up.receipt(None, None, ("rollout",))
    receipt = plain.model_copy(update={"kv_cache": cache, "rows": (*plain.rows, *rows)})
    made = SimpleNamespace(arm="kv", seed=0, model="base", receipt=receipt)
    (row,) = run_overview([made], load_words("en"), lambda *where: "").rows
    assert not row.alert
    assert row.cells[2:4] == ("kv cache, int8", "0.005")
    (phase,) = (row for row in phase_table(receipt, load_words("en")).rows if row.cells[0] == "rollout")
    assert not phase.alert
    assert phase.cells[1:3] == ("kv cache, int8", "0.005")
