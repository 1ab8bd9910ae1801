"""Options and output that several commands share."""

import pytest

from aqnpipe.cli.options import aligned, dataset_of, refuse_level
from aqnpipe.errors import ConfigError


def test_columns_are_as_wide_as_their_longest_cell_and_lines_have_no_blanks_at_their_end():
    assert aligned([("a", "bb", ""), ("ccc", "d", "e")]) == ["a    bb", "ccc  d   e"]


@pytest.mark.parametrize(
    ("level", "may_be_zero", "said"),
    [
        (5, True, "found 5, expected below 1; did you mean 0.05?"),
        (1, True, "found 1, expected below 1; did you mean 0.01?"),
        (7.5, False, "found 7.5, expected below 1; did you mean 0.075?"),
        (100, False, "found 100, expected below 1"),
        (-0.1, True, "found -0.1, expected at least 0 and below 1"),
        (0, False, "found 0, expected above 0 and below 1"),
        (float("nan"), True, "found nan, expected at least 0 and below 1"),
    ],
)
def test_a_noise_level_that_is_none_names_the_share_that_is_meant(level, may_be_zero, said):
    with pytest.raises(ConfigError) as refused:
        refuse_level("--noise", level, may_be_zero=may_be_zero)
    assert str(refused.value) == f"--noise: {said}"


@pytest.mark.parametrize(("level", "may_be_zero"), [(0.99, False), (1e-6, False), (0.0, True)])
def test_noise_levels_are_accepted(level, may_be_zero):
    refuse_level("--noise", level, may_be_zero=may_be_zero)


def test_a_file_is_local_and_an_id_of_the_hub_may_have_dots(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").touch()
    local = dataset_of("data.jsonl", None, trust_code=False)
    hub = dataset_of("owner/data.v2", 5, trust_code=False)
    assert (local.source, local.path) == ("local", "data.jsonl")
    assert (hub.source, hub.num_test) == ("hub", 5)


@pytest.mark.parametrize("name", ["owner/data.jsonl", "data.parquet", "./data", "/nowhere/data"])
def test_a_file_that_is_not_there_is_no_id_of_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        dataset_of(name, None, trust_code=False)
    assert str(refused.value).startswith(f"--data {name}: no such file or folder, expected word_problems, ")
