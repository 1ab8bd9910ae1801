"""Published figures beside the measured ones."""

from dataclasses import replace

import polars as pl
import pytest

from aqnpipe.artifacts.base import statement
from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.published import CheckedAccuracy, CheckedClaim, CheckedLoss, CheckedSeries, PublishedCheck
from aqnpipe.config.plan import StudyPlan
from aqnpipe.report.export import export_paper
from aqnpipe.report.inputs import read_study
from aqnpipe.report.published import side_by_side
from aqnpipe.report.words import load_words


def accuracy(name, printed, low, high, **changes):
    values = {
        "id": name,
        "label": f"{name}, 1.5B",
        "arm": name,
        "noise_level": None,
        "step": None,
        "printed": printed,
        "num_questions": 1319,
        "possible": True,
        "correct": (1014,),
        "nearest": (),
        "possible_sizes": (),
        "ci_low": low,
        "ci_high": high,
    }
    return CheckedAccuracy(**values | changes)


CLAIM = CheckedClaim(
    id="aqn-helps",
    claim="AQN helps",
    claim_zh="AQN 有益",
    kind="accuracies",
    test="superiority",
    treatment="E5b",
    control="E5",
    unit="points",
    margin=None,
    difference=2.43,
    ci_low=-1.09,
    ci_high=5.94,
    interval_level=0.95,
    p_value=0.18,
    p_holm=0.9,
    p_run_to_run=0.32,
    largest_discordance=None,
    p_paired_low=None,
    p_paired_high=None,
    questions_needed=5000,
    method=statement("method.wald"),
    verdict="not_shown",
    statements=(statement("conclusion.not_shown"),),
    notes=(),
    deviations=(),
)
CHECK = PublishedCheck(
    title="A paper",
    source="somewhere",
    alpha=0.05,
    power=0.8,
    family_size=1,
    run_sd_points=1.6,
    run_sd_runs=6,
    accuracies=(
        accuracy("baseline", "76.88", 0.745, 0.791, step=116),
        accuracy("baseline", "73.77", 0.712, 0.760, step=20),
        accuracy("baseline", "77.00", 0.707, 0.823, step=116, noise_level=0.0, num_questions=200),
        accuracy(
            "E7c", "89.50", 0.877, 0.910, possible=False, correct=(), nearest=(89.46, 89.54), possible_sizes=(200,)
        ),
        accuracy("E5b", "77.5", 0.712, 0.827, noise_level=0.1, num_questions=200),
    ),
    losses=(
        CheckedLoss(
            id="dz",
            label="dead zone",
            arm=None,
            mean=12.8541,
            std=0.0,
            ddof=1,
            num_runs=5,
            uniform=11.93,
            above_uniform=True,
        ),
    ),
    claims=(CLAIM,),
    series=(CheckedSeries(id="E5d", label="E5d", printed=("74.50",) * 3, identical=True, p_value=1.0),),
    detectable=(),
)


@pytest.fixture(scope="module")
def with_check(built, tmp_path_factory):
    folder = tmp_path_factory.mktemp("published")
    return built.build(data=replace(built.made.report_data(built.folder), published=CHECK), into=folder)


def rows(html, table):
    body = html.split(f'data-table="{table}"')[1].split("</table>")[0].split("<tbody>")[1].split("</tbody>")[0]
    return [[cell.split(">", 1)[1].strip() for cell in row.split("<td")[1:]] for row in body.split("<tr")[1:]]


def test_published_and_measured_are_side_by_side(with_check, built):
    shown = rows(with_check.html, "published-accuracies")
    measured = pl.read_parquet(built.folder / "accuracy.parquet")

    def mean(arm, level):
        chosen = measured.filter((pl.col("arm") == arm) & (pl.col("noise_level") == level))
        return 100 * chosen["accuracy"].mean()

    assert shown[0][:4] == ["baseline, 1.5B", "76.88", "1,319", "74.5 to 79.1"]
    assert float(shown[0][4]) == pytest.approx(mean("baseline", 0.0), abs=0.0500001)
    assert shown[3][4] == "–"
    assert shown[3][5] == "NO: between 89.46 and 89.54; possible with 200 questions"
    assert float(shown[4][4]) == pytest.approx(mean("E5b", 0.1), abs=0.0500001)


def test_published_claims_carry_their_verdict(with_check):
    (cells,) = rows(with_check.html, "published-claims")
    assert cells == [
        *("AQN helps", "not shown", "+2.43", "−1.09 to +5.94", "0.18", "0.90", "0.32"),
    ]
    assert rows(with_check.html, "published-sentences") == [
        ["AQN helps", "The figures do not show it. Method: two independent proportions, Wald z."]
    ]
    assert '<a href="#published">' in with_check.html


def test_red_flags_are_raised(with_check):
    (series,) = rows(with_check.html, "published-series")
    assert series == ["E5d", "74.50 / 74.50 / 74.50", "the same at every level: was there noise?", "1.00"]
    (loss,) = rows(with_check.html, "published-losses")
    assert loss == ["dead zone", "12.8541", "0.0000", "5", "11.93", "worse than guessing"]


def test_only_arms_with_both_figures_are_drawn_together_at_one_noise_level(built):
    last = pl.read_parquet(built.folder / "accuracy.parquet").filter(pl.col("step") == 60)
    table = side_by_side(CHECK, last)
    assert set(table["arm"]) == {"baseline", "E5b"}
    clean = table.filter(pl.col("arm") == "baseline")
    assert clean.filter(pl.col("kind") == "published")["accuracy"].to_list() == [76.88]
    assert clean.filter(pl.col("kind") == "measured")["seed"].to_list() == [0, 1]
    level = next(figure.noise_level for figure in CHECK.accuracies if figure.arm == "E5b")
    measured = last.filter((pl.col("arm") == "E5b") & (pl.col("noise_level") == level))["accuracy"] * 100
    drawn = table.filter((pl.col("arm") == "E5b") & (pl.col("kind") == "measured"))["accuracy"]
    assert level > 0
    assert sorted(drawn) == pytest.approx(sorted(measured))


def test_without_a_check_there_is_no_such_section(built):
    assert 'id="published"' not in built.html
    assert "#published" not in built.html


def test_published_figures_are_an_input_if_the_study_names_a_file(synthetic, tmp_path):
    study = synthetic.study(statistics={"published": "config/published.yaml"})
    data = read_study(StudyPlan(study), tmp_path)
    assert tmp_path / "results" / "published.json" in data.missing
    write_json(tmp_path / "results" / "published.json", CHECK)
    assert read_study(StudyPlan(study), tmp_path).published == CHECK


def test_a_paper_gets_the_published_figures_too(built, tmp_path):
    data = replace(built.made.report_data(built.folder), published=CHECK)
    written = export_paper(built.study, data, load_words("en"), tmp_path, ["svg"], ["csv"])
    names = {path.stem for path in written if path.stem.startswith("published")}
    assert names == {
        "published-1-published-each-at-its-noise-level",
        "published-2-measured-here-at-the-same-noise-level",
        *("published-published-claims", "published-published-sentences", "published-published-accuracies"),
        *("published-published-series", "published-published-losses"),
    }
