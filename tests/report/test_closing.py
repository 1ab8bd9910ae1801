"""The last lines of a finished study on the terminal."""

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json
from aqnpipe.report.summary import closing_lines
from aqnpipe.report.words import load_words


def test_every_verdict_has_a_line_decided_ones_first(built):
    lines = closing_lines(built.folder, "en", {})
    claims = read_json(built.folder / "claims.json", ClaimsFile).claims
    assert lines[0].startswith("Of 6 claims: ")
    for claim in claims:
        assert sum(claim.claim in line for line in lines) == 1
    undecided = ["not shown" in line for line in lines[1:]]
    assert undecided == sorted(undecided)
    assert all(line.isprintable() for line in lines)


def test_columns_are_aligned_in_chinese_too(built):
    lines = closing_lines(built.folder, "zh", {})
    assert lines[0].startswith("共 6 项论断")
    assert len(lines) == 7


def test_without_claims_there_is_nothing_to_say(tmp_path):
    assert closing_lines(tmp_path, "en", {}) == []


def test_a_named_noise_is_called_by_its_name():
    words = load_words("en", {1.0: "w4a16_nvfp4"})
    text = words("answer.degradation.less", level=1.0, difference=0.1)
    assert "w4a16_nvfp4" in text
    assert "100" not in text
