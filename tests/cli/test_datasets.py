"""Data sets by the names of the command line."""

import pytest

from aqnpipe.cli.options import dataset_of
from aqnpipe.errors import ConfigError


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
