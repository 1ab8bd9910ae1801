import re
from pathlib import Path

import polars as pl
import pytest

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.config.study import load_study_file
from aqnpipe.report.markup import markdown
from aqnpipe.report.summary import accuracy
from aqnpipe.report.tables import arm_table
from aqnpipe.report.words import load_words

ROOT = Path(__file__).parents[2]

SHARES = ("truncated_fraction", "parse_failure_fraction")


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", r"a\|b"),
        ("<img src=x>", r"\<img src=x\>"),
        ("[x](http://y) ![z](u)", r"\[x\](http://y) !\[z\](u)"),
        ("@someone #12 `code` *b* _i_ ~s~ $m$", r"@<!-- -->someone \#12 \`code\` \*b\* \_i\_ \~s\~ \$m\$"),
        ("two\nlines\x1b", "two lines⟨U+001B⟩"),
        ("1. one", r"1\. one"),
        ("10) ten", r"10\) ten"),
        ("1.5 points", r"1\.5 points"),
        ("- one", r"\- one"),
        ("5-fold + 2", "5-fold + 2"),
    ],
)
def test_untrusted_text_is_no_markup(text, escaped):
    assert markdown(text) == escaped


def test_verdicts_and_numbers_are_the_artifacts(built):
    text = (built.folder / "summary.md").read_text(encoding="utf-8").replace("\u00a0", " ")
    claims = read_json(built.folder / "claims.json", ClaimsFile).claims
    rows = pl.read_parquet(built.folder / "comparisons.parquet").rows(named=True)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert "**Of 6 claims:" in text
    for claim, row in zip(claims, rows, strict=True):
        cells = next(line for line in lines if line[1] == claim.claim)
        assert cells[0] == "| " + claim.verdict.replace("_", " ")
        assert float(cells[2].replace("−", "-")) == pytest.approx(100 * row["difference"], abs=0.0500001)
    accuracy = pl.read_parquet(built.folder / "accuracy.parquet")
    for arm in ("pretrained", "baseline", "E5b"):
        cells = next(line for line in lines if line[0].strip("| ").replace("\\", "") == arm)
        means = accuracy.filter(pl.col("arm") == arm).group_by("noise_level").agg(pl.col("accuracy").mean())
        shown = [float(re.match(r"[\d.]+", cell)[0]) for cell in cells[1:]]
        assert shown == pytest.approx(list(100 * means.sort("noise_level")["accuracy"]), abs=0.0500001)
    truncated, missing = (
        accuracy.group_by("arm", "noise_level").agg(pl.col(name).mean())[name].max() for name in SHARES
    )
    assert f"at most {100 * truncated:.1f} % of the responses" in text
    assert f"counts as wrong: at most {100 * missing:.1f} %." in text
    arms = [line[0].strip("| ").replace("\\", "") for line in lines[-5:]]
    assert arms == ["pretrained", "baseline", "E5", "E5b", "srdd_guided"]


@pytest.mark.parametrize(("name", "has_steps"), [("checkpoints.yaml", False), ("smoke.yaml", True)])
def test_given_checkpoints_have_no_steps_seeds_or_arms(monkeypatch, name, has_steps):
    monkeypatch.chdir(ROOT)
    study = load_study_file(ROOT / "config" / name)
    rows = [
        {"model": study.model_roles()[0], "arm": arm, "seed": 0, "step": 0, "noise_level": 0.0, "accuracy": 0.5}
        | dict.fromkeys(SHARES, 0.0)
        for arm in study.arms
    ]
    words, last = load_words("en"), pl.DataFrame(rows)
    table = arm_table(study, last, words)
    found = accuracy(study, last, set(), words)
    text = " ".join([table.title, table.head, found.caption, *found.headers, found.note])
    assert [word in text for word in ("last step", "seeds", "arm")] == [has_steps] * 3
    assert ("checkpoint" in text) is not has_steps
    assert [row["cells"] for row in table.rows if row["name"] in study.arms] == [("50.0",)] * len(study.arms)


def test_hostile_summary_has_no_html(hostile):
    text = (hostile.folder / "summary.md").read_text(encoding="utf-8")
    assert not re.search(r"(?<!\\)<(?!!-- -->)", text)
    claims = [line for line in text.splitlines() if "Z" in line and line.startswith("|")]
    assert claims
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in claims} == {5}
