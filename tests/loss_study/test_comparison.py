"""Comparisons of a loss study: effects put into synthetic losses are found, and none is found without an effect."""

import math

import numpy as np
import polars as pl
import pytest
from scipy import stats

from aqnpipe.artifacts.files import read_json, write_json, write_table
from aqnpipe.artifacts.loss_studies import LossStudyFile, LossStudyTable
from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.analysis import StatisticsConfig
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault
from aqnpipe.errors import DataError
from aqnpipe.loss_study.comparison import compare_losses
from aqnpipe.noise.receipts.receipt import LossStudyPass, LossStudyReceipts, Receipt
from aqnpipe.noise.receipts.table import AQN, Row
from aqnpipe.report.words import load_words

NUM_TEXTS, SEEDS, VOCABULARY, MAGNITUDE = 40, (0, 1, 2, 3), 100, 0.3
LAYERS = {"clean": (), "fault_only": (), "global": (0, 1, 2, 3), "targeted": (1,), "wrong_layers": (3,)}
MEANS = {"clean": 0.1, "fault_only": 0.5, "global": 0.5, "targeted": 0.45, "wrong_layers": 0.5}


def receipt_of(condition):
    """A receipt without problems, like that of a pass of this condition."""
    fault = Fault(type="dead_zone", layer=1, magnitude=MAGNITUDE)
    faulty, layers = condition != "clean", LAYERS[condition]
    phases = ("evaluation", "backward") if faulty else ("evaluation",)
    uniform = condition == "global"
    aqn = AdaptiveNoise(
        schedule=ConstantSigma(sigma=0.01), targets="hidden_states", layer_sigmas_from=None if uniform else "broken"
    )
    squares = {"elements": 4, "squares": 4e-4, "drawn_squares": 4e-4}
    counts = {"calls": 1, "targets": 4, "recomputed": 1000}
    sync = Row("rollout", 0, operator="AQN sync", sigma=0.01, digests={"a"}, **counts, **squares)
    place = {"layer": 1, "operator": "fault 0"}
    of_fault = (
        Row("evaluation", **place, calls=NUM_TEXTS, elements=1000, changed=250, num_channels=8, num_faulty_channels=8),
        Row("backward", **place, calls=1, elements=800, zeroed=200, squares=25.0, zeroed_squares=9.0),
    )
    sums = {"drawn_squares": 1000.0, "recomputed": 1000}
    return Receipt(
        operator_noise=None,
        aqn=aqn if layers else None,
        faults=(fault,) if faulty else (),
        expected_phases=phases,
        rows=(
            *(Row(phase, passes=NUM_TEXTS, compared=10) for phase in phases),
            *(Row("rollout", None, layer, AQN, squares=1000.0, elements=1000, **sums) for layer in layers),
            *(of_fault if faulty else ()),
            *((sync,) if layers else ()),
        ),
        layer_factors={layer: float(layer in layers) for layer in range(4)} if layers and not uniform else None,
        num_layers=4,
        num_norms=9,
        num_steps=1 if layers else 0,
        num_epochs=1 if layers else 0,
    )


def write_losses(folder, means=MEANS, seed=0, documents=None, declared=True):
    """Write losses with SD 0.2 between texts, 0.002 between noise seeds and 0.01 between pairs of the two.

    documents: of the texts, each of which changes every noisy condition (SD 0.1). declared: as clusters.
    """
    rng = np.random.default_rng(seed)
    names = [f"document {number}" for number in documents or ()]
    by_text = rng.normal(0, 0.2, NUM_TEXTS)
    rows, passes = [], []
    for condition, mean in means.items():
        noisy = bool(LAYERS[condition])
        order = "after_noise" if condition in ("global", "targeted") else None
        magnitude = 0.0 if condition == "clean" else MAGNITUDE
        shared = rng.normal(0, 0.1, NUM_TEXTS)[list(documents)] if documents and noisy else np.zeros(NUM_TEXTS)
        for noise_seed in SEEDS if noisy else (0,):
            scatter = rng.normal(0, 0.002) + rng.normal(0, 0.01, NUM_TEXTS) if noisy else np.zeros(NUM_TEXTS)
            rows += [
                {
                    "question_id": f"test-{index:02}",
                    **({"cluster": names[index]} if names and declared else {}),
                    "condition": condition,
                    "magnitude": magnitude,
                    "order": order,
                    "noise_seed": noise_seed,
                    "loss": float(abs(mean + text + extra)),
                    "text_loss": 4.0,
                    "scored_tokens": 9,
                    "text_tokens": 30,
                    "survival_rate": 0.75 if magnitude else 1.0,
                }
                for index, (text, extra) in enumerate(zip(by_text + 1.0, scatter + shared, strict=True))
            ]
            passes.append(
                LossStudyPass(
                    condition=condition,
                    magnitude=magnitude,
                    order=order,
                    noise_seed=noise_seed,
                    noised_layers=LAYERS[condition],
                    receipt=receipt_of(condition),
                )
            )
    inputs = StageFiles(folder / "t.parquet", folder / "t.receipt.json", folder / "t.run.json")
    write_table(inputs.table, pl.DataFrame(rows, schema_overrides={"order": pl.String}), LossStudyTable)
    receipts = LossStudyReceipts(
        vocabulary_size=VOCABULARY, num_layers=4, faulty_layers=(1,), gamma=0.01, passes=tuple(passes)
    )
    write_json(inputs.receipt, receipts)
    identity = {"model": "base", "name": "made-up"}
    record = RunRecord(
        stage="loss_study", identity=identity, config={}, code_digest="", inputs_sha256={}, versions={}, device="cpu"
    )
    write_json(inputs.record, record)
    record_digests(inputs)
    return inputs


def record_digests(inputs):
    """Write the digests of table and receipt as they are now into the record."""
    record = read_json(inputs.record, RunRecord)
    written = sha256_of_files({"table": inputs.table, "receipt": inputs.receipt})
    write_json(inputs.record, record.model_copy(update={"outputs_sha256": written}))


def compared(folder, **changes):
    compare_losses(write_losses(folder, **changes), StatisticsConfig(), folder / "claims.json")
    return read_json(folder / "claims.json", LossStudyFile)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return compared(tmp_path_factory.mktemp("losses"))


def by_id(file):
    return {comparison.comparison_id: comparison for comparison in file.comparisons}


def test_effects_that_are_there_are_found_and_others_are_not(found):
    verdicts = {name: comparison.verdict for name, comparison in by_id(found).items()}
    assert verdicts == {
        "fault_only_vs_clean_0.3": "supported",
        "global_vs_fault_only_0.3_after_noise": "not_shown",
        "targeted_vs_fault_only_0.3_after_noise": "supported",
        "wrong_layers_vs_fault_only_0.3": "not_shown",
        "targeted_vs_global_0.3_after_noise": "supported",
        "targeted_vs_wrong_layers_0.3_after_noise": "supported",
    }
    assert {family.name: family.size for family in found.families} == {"harm": 1, "noise": 3, "place": 2}


def test_claims_name_the_place_of_the_noise_and_the_order(found):
    comparisons = by_id(found)
    english, chinese = load_words("en"), load_words("zh")
    place = comparisons["targeted_vs_global_0.3_after_noise"].claim
    assert english.of(place) == (
        "Noise in the faulty layers gives a lower loss than noise in all layers, magnitude 0.3 (noise, then fault)"
    )
    assert chinese.of(place) == "强度 0.3 时，故障层的噪声比所有层的噪声损失更低（先噪声后故障）"
    noise = comparisons["wrong_layers_vs_fault_only_0.3"].claim
    assert english.of(noise) == (
        "Noise in as many layers far from the fault lowers the loss under a fault of magnitude 0.3"
    )


def test_differences_and_intervals_are_computed_from_the_table(found, tmp_path):
    table = pl.read_parquet(write_losses(tmp_path).table)

    def losses(condition):
        rows = table.filter(pl.col("condition") == condition).sort("noise_seed", "question_id")
        return rows["loss"].to_numpy().reshape(-1, NUM_TEXTS)

    comparison = by_id(found)["targeted_vs_global_0.3_after_noise"]
    difference = losses("targeted") - losses("global")
    assert comparison.difference == pytest.approx(difference.mean())
    assert comparison.ci_low < difference.mean() < comparison.ci_high
    harm = by_id(found)["fault_only_vs_clean_0.3"]
    assert harm.num_seeds == 1
    assert harm.difference == pytest.approx(0.4)


DOCUMENTS = [number // 8 for number in range(NUM_TEXTS)]


def test_texts_of_one_document_are_one_unit_as_questions_are_in_evaluations(tmp_path):
    """Of 60 claims without an effect, five documents as units reject 5 %, texts as units far more."""
    rejected = {True: 0, False: 0}
    for seed in range(30):
        for declared in rejected:
            changes = {"means": dict.fromkeys(MEANS, 0.5), "documents": DOCUMENTS, "declared": declared}
            comparisons = by_id(compared(tmp_path, seed=seed, **changes))
            rejected[declared] += comparisons["global_vs_fault_only_0.3_after_noise"].p_value < 0.05
            rejected[declared] += comparisons["wrong_layers_vs_fault_only_0.3"].p_value < 0.05
    assert rejected[True] <= stats.binom.ppf(0.999, 60, 0.05)
    assert rejected[False] > stats.binom.ppf(0.999, 60, 0.05)
    clustered = by_id(compared(tmp_path, documents=DOCUMENTS))["targeted_vs_fault_only_0.3_after_noise"]
    assert "4 seeds, 40 questions in 5 clusters" in load_words("en").of(clustered.statements[0])


def test_documents_that_nobody_declared_are_noticed_and_independent_texts_are_not(found, tmp_path):
    def warned(comparisons):
        return [one for one in comparisons if any(each.key == "claim.clustered" for each in one.statements)]

    assert warned(compared(tmp_path, documents=DOCUMENTS, declared=False).comparisons)
    assert not warned(compared(tmp_path, documents=DOCUMENTS).comparisons)
    assert not warned(found.comparisons)


def test_a_single_document_is_refused(tmp_path):
    with pytest.raises(DataError, match="cluster: found 1 value, expected at least 2"):
        compared(tmp_path, documents=[0] * NUM_TEXTS)


def test_conditions_carry_survival_and_gradient_flow(found):
    conditions = {condition.condition: condition for condition in found.conditions}
    assert conditions["clean"].survival_rate is None
    assert conditions["targeted"].survival_rate == 0.75
    assert conditions["targeted"].gradient_zeroed_share == 0.25
    assert conditions["targeted"].gradient_zeroed_norm_share == pytest.approx(0.6)
    assert conditions["targeted"].seed_sd > 0
    assert conditions["fault_only"].seed_sd is None
    assert conditions["wrong_layers"].noised_layers == (3,)
    assert found.uniform == pytest.approx(math.log(100))


def test_an_effect_against_the_claim_refutes_it(tmp_path):
    worse = compared(tmp_path, means={**MEANS, "targeted": 0.6})
    comparison = by_id(worse)["targeted_vs_fault_only_0.3_after_noise"]
    assert comparison.verdict == "refuted"
    numbers, conclusion = comparison.statements
    assert numbers.values["difference"] == comparison.difference
    assert numbers.key == "result.nats"
    assert conclusion.key == "conclusion.refuted"


def test_losses_worse_than_guessing_are_not_compared(tmp_path):
    """The published dead-zone study compared losses above ln|V|."""
    broken = compared(tmp_path, means={**MEANS, "fault_only": 5.0, "global": 5.0, "targeted": 4.0})
    verdicts = {name: comparison.verdict for name, comparison in by_id(broken).items()}
    assert verdicts["targeted_vs_fault_only_0.3_after_noise"] == "invalid"
    assert verdicts["targeted_vs_global_0.3_after_noise"] == "invalid"
    assert by_id(broken)["targeted_vs_global_0.3_after_noise"].p_holm is None
    _, conclusion = by_id(broken)["targeted_vs_global_0.3_after_noise"].statements
    assert conclusion.key == "evidence.invalid"
    assert {reason.key for reason in conclusion.values["reasons"]} == {"reason.above_uniform"}
    assert [reason.values["name"] for reason in conclusion.values["reasons"]] == ["targeted", "global"]
    assert "worse than guessing uniformly" in load_words("en").of(conclusion)
    assert {condition.condition for condition in broken.conditions if condition.above_uniform} == {
        "fault_only",
        "global",
        "targeted",
    }


@pytest.mark.slow
def test_false_alarms_without_any_effect_stay_at_alpha(tmp_path):
    """Two comparisons of noise in each of 60 synthetic studies: at 5 % each, at most 14 of 120 (five SD)."""
    equal = dict.fromkeys(("fault_only", "global", "targeted"), 0.5)
    p_values = [
        comparison.p_value
        for seed in range(60)
        for comparison in compared(tmp_path / str(seed), means=equal, seed=seed).comparisons
        if comparison.family == "noise"
    ]
    assert len(p_values) == 120
    assert sum(p < 0.05 for p in p_values) <= 6 + 5 * (120 * 0.05 * 0.95) ** 0.5


def test_rows_without_a_receipt_are_refused(tmp_path):
    inputs = write_losses(tmp_path)
    receipts = read_json(inputs.receipt, LossStudyReceipts)
    write_json(inputs.receipt, receipts.model_copy(update={"passes": receipts.passes[:-1]}))
    record_digests(inputs)
    with pytest.raises(DataError, match="no receipt for evaluation"):
        compare_losses(inputs, StatisticsConfig(), tmp_path / "claims.json")


def test_a_pass_whose_noise_went_elsewhere_is_refused(tmp_path):
    inputs = write_losses(tmp_path)
    receipts = read_json(inputs.receipt, LossStudyReceipts)
    wrong = receipts.passes[-1].model_copy(update={"noised_layers": (0,)})
    write_json(inputs.receipt, receipts.model_copy(update={"passes": (*receipts.passes[:-1], wrong)}))
    record_digests(inputs)
    with pytest.raises(DataError, match=r"noise was measured in layers \[3\]"):
        compare_losses(inputs, StatisticsConfig(), tmp_path / "claims.json")
