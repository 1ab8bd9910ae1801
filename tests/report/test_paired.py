"""The table of a claim's seeds: the mean of their differences is the claim's difference, whatever is claimed."""

from statistics import fmean

import polars as pl
import pytest
from checksum_files import write_parquet_with_checksum

from aqnpipe.artifacts.comparisons import Claim, ClaimsFile, SeedComparison
from aqnpipe.artifacts.files import read_json
from aqnpipe.comparison.stage import compare
from aqnpipe.report import numbers
from aqnpipe.report.claims import paired_table
from aqnpipe.report.words import load_words

CLAIMS = [
    {"kind": "arms", "treatment": "E5", "control": "baseline", "noise_level": 0.1, "expected": "lower"},
    {"kind": "arms", "treatment": "baseline", "control": "pretrained", "noise_level": 0.05, "expected": "higher"},
    {"kind": "arms", "treatment": "pretrained", "control": "E5", "expected": "lower"},
    {"kind": "levels", "arm": "baseline", "noise_level": 0.1},
    {"kind": "degradation", "treatment": "E5", "control": "baseline", "noise_level": 0.1, "expected": "higher"},
]


def seed(number, better, worse, equal, difference):
    return SeedComparison(
        seed=number,
        treatment_better=better,
        control_better=worse,
        equal=equal,
        difference=difference,
        ci_low=-0.5,
        ci_high=0.5,
        p_value=0.5,
    )


def claim(*seeds):
    return Claim(comparison_id="a-vs-b@0", claim="a is better", verdict="not_shown", seeds=seeds)


def test_the_foot_has_the_means():
    table = paired_table(claim(seed(0, 6, 2, 2, 0.4), seed(1, 3, 4, 3, -0.1)), 0.95, load_words("en"), 600)
    assert [row.cells for row in table.foot] == [("mean", "4.5", "3.0", "2.5", "+15.0", "", "")]
    assert table.note == "The mean difference of the 2 seeds is that of the claim."
    assert [row.cells[0] for row in table.rows] == ["0", "1"]


def test_counts_that_do_not_give_the_difference_are_explained():
    """Six questions better and two worse of ten are +0.4 only where every answer to them differs."""
    table = paired_table(claim(seed(0, 6, 2, 2, 0.25), seed(1, 3, 4, 3, -0.1)), 0.95, load_words("en"), 600)
    assert table.foot[0].cells[4] == "+7.5"
    assert "The numbers of questions do not give it" in table.note


def test_one_seed_has_no_mean():
    table = paired_table(claim(seed(0, 6, 2, 2, 0.4)), 0.95, load_words("zh"), 600)
    assert (table.foot, table.note) == ((), "")


@pytest.mark.parametrize("clustered", [False, True])
def test_seeds_add_up_with_every_kind_of_claim(synthetic, make_report, tmp_path, clustered):
    """Questions in clusters of unlike size, too: 40 in one and 20 in the other."""
    named = [{"claim": f"claim {number}"} | one for number, one in enumerate(CLAIMS)]
    study = synthetic.study(arms=["baseline", "E5"], seeds=[0, 1, 2], comparisons=named)
    built = make_report(tmp_path, study, 60)
    if clustered:
        number = pl.col("question_id").str.slice(1).cast(pl.Int64)
        for source in built.made.evaluations:
            names = pl.when(number < 40).then(pl.lit("first")).otherwise(pl.lit("second"))
            write_parquet_with_checksum(source.table, pl.read_parquet(source.table).with_columns(cluster=names))
        compare(study, built.made.evaluations, tmp_path)
        built = built.build()
    rows = {row["comparison_id"]: row for row in pl.read_parquet(tmp_path / "comparisons.parquet").to_dicts()}
    found = read_json(tmp_path / "claims.json", ClaimsFile).claims
    assert len(found) == len(CLAIMS)
    assert all(row["method"].endswith("clusters") == clustered for row in rows.values())
    for one in found:
        difference = rows[one.comparison_id]["difference"]
        assert len(one.seeds) == 3
        assert len({seed.difference for seed in one.seeds}) > 1, "seeds differ, so that their mean is none of them"
        assert fmean(seed.difference for seed in one.seeds) == pytest.approx(difference, abs=1e-12)
        foot = built.html.split(f'data-table="paired-{one.comparison_id}"')[1].split("<tfoot>")[1].split("</tfoot>")[0]
        assert foot.split("<td>")[5] == numbers.points(difference)
