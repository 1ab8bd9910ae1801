"""The section on simulated faults: loss studies, and survival and gradients in training."""

import dataclasses
import re

import pytest

from aqnpipe.artifacts.base import statement
from aqnpipe.artifacts.comparisons import Family
from aqnpipe.artifacts.loss_studies import LossStudyComparison, LossStudyCondition, LossStudyFile
from aqnpipe.config.noise import Fault
from aqnpipe.noise.receipts.table import Row


def condition(name, magnitude, loss, order=None, above=False):
    return LossStudyCondition(
        condition=name,
        magnitude=magnitude,
        order=order,
        noised_layers=(1,) if name == "targeted" else (),
        mean_loss=loss,
        seed_sd=0.002 if order else None,
        mean_text_loss=4.0,
        survival_rate=0.875 if magnitude else None,
        gradient_zeroed_share=0.125 if magnitude else None,
        gradient_zeroed_norm_share=0.25 if magnitude else None,
        above_uniform=above,
    )


def comparison(number, family, verdict):
    return LossStudyComparison(
        comparison_id=str(number),
        family=family,
        magnitude=0.3,
        order=None,
        treatment="targeted",
        control="fault_only",
        num_seeds=5,
        num_texts=50,
        difference=-0.0123,
        ci_low=-0.03,
        ci_high=0.005,
        p_value=0.2,
        p_holm=None if verdict == "invalid" else 0.4,
        claim=statement("loss_claim.fault_raises_loss", magnitude=float(number)),
        verdict=verdict,
        statements=(statement("conclusion.not_shown"),),
    )


def losses():
    return LossStudyFile(
        name="made-up",
        model="base",
        gamma=0.01,
        num_layers=4,
        faulty_layers=(1,),
        num_texts=50,
        uniform=4.6,
        alpha=0.05,
        families=(Family(name="harm", size=1), Family(name="noise", size=1)),
        conditions=(
            condition("clean", 0.0, 0.1),
            condition("fault_only", 0.1, 0.2),
            condition("fault_only", 0.3, 5.0, above=True),
            condition("targeted", 0.1, 0.19, "after_noise"),
            condition("targeted", 0.1, 0.21, "around_noise"),
        ),
        comparisons=(
            comparison(1, "harm", "supported"),
            comparison(2, "noise", "not_shown"),
            comparison(3, "noise", "invalid"),
        ),
    )


@pytest.fixture(scope="module")
def page(synthetic, built, tmp_path_factory):
    """The synthetic study with a loss study and a fault in the receipt of one run."""
    folder = tmp_path_factory.mktemp("faults")
    data = built.made.report_data(built.folder)
    receipt = data.runs[0].receipt
    place = {"layer": 1, "operator": "fault 0"}
    cell = Row("rollout", **place, calls=7, elements=1000, changed=250, num_channels=8, num_faulty_channels=8)
    flow = Row("backward", **place, calls=3, elements=800, zeroed=200, squares=25.0, zeroed_squares=9.0)
    faulty = receipt.model_copy(
        update={
            "faults": (Fault(type="dead_zone", layer=1, magnitude=0.3),),
            "rows": (*receipt.rows, cell, flow),
        }
    )
    run = dataclasses.replace(data.runs[0], receipt=faulty)
    changed = dataclasses.replace(
        data, runs=(run, *data.runs[1:]), loss_studies=(losses(),), missing=(folder / "missing.json",)
    )
    html = {}
    for language in ("en", "zh"):
        content = built.study.model_dump()
        content["config"]["report"]["language"] = language
        study = type(built.study).model_validate(content)
        html[language] = built.build(study=study, data=changed, into=folder).html
    return html


def cells_of(html, name):
    table = re.search(rf'data-table="{name}">(.*?)</table>', html, re.DOTALL).group(1)
    return [re.findall(r"<td[^>]*>([^<\n]*)", row) for row in table.split("<tr")[2:]]


def test_tables_of_comparisons_and_conditions(page):
    rows = cells_of(page["en"], "loss-comparisons")
    assert rows[1] == [
        "A fault of magnitude 2 raises the loss",
        "not shown",
        "−0.0123",
        "−0.0300 to +0.0050",
        "0.20",
        "0.40",
    ]
    assert rows[2][1] == "invalid"
    assert cells_of(page["en"], "loss-sentences")[1] == [rows[1][0], "The figures do not show it."]
    rows = cells_of(page["en"], "loss-conditions")
    assert rows[0] == ["clean", "–", "–", "–", "0.1000", "–", "–", "–", "–", "better than guessing"]
    assert rows[3][:7] == ["targeted", "0.1", "noise, then fault", "1", "0.1900", "0.0020", "87.5"]
    assert rows[2][-1] == "worse than guessing"


def test_the_sentence_counts_verdicts_and_losses_above_uniform(page):
    assert "tested 2 times: 1 not shown, 1 invalid" in page["en"]
    assert "1 condition has a loss above ln|V| = 4.60" in page["en"]


def test_there_is_one_picture_per_order(page):
    labels = re.findall(r'aria-label="(Loss against the magnitude[^"]*)"', page["en"])
    assert len(labels) == 2
    assert labels[0].endswith("noise, then fault")


def test_survival_and_gradients_in_training_are_shown(page):
    rows = cells_of(page["en"], "training-faults")
    assert [row[2:] for row in rows] == [
        ["rollout", "7", "75.0", "–", "–"],
        ["backward", "3", "–", "25.0", "60.0"],
    ]


def test_loss_studies_on_a_chinese_page(page):
    assert cells_of(page["zh"], "loss-comparisons")[0][0] == "强度 1 的故障使损失升高"
    assert "检验 2 次" in page["zh"]


def test_a_study_without_faults_has_no_such_section(built):
    assert 'id="faults"' not in built.html
    assert 'href="#faults"' not in built.html


def test_a_missing_loss_study_is_named(page):
    assert "missing.json" in page["en"]
