"""What `aqnpipe run` passes to Snakemake."""

from pathlib import Path

import pytest

from aqnpipe.cli.run import snakemake_arguments
from aqnpipe.errors import ConfigError
from aqnpipe.shipped import SNAKEFILE

WORKFLOW = ["--snakefile", str(SNAKEFILE)]


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["a b.yaml"], ["--configfile", "a b.yaml"]),
        (["study.yaml", "-n", "--config", "seeds=[1]"], ["--configfile", "study.yaml", "-n", "--config", "seeds=[1]"]),
        (["--profile", "a100"], ["--profile", "a100"]),
        (["-n", "--configfile=study.yaml"], ["-n", "--configfile=study.yaml"]),
    ],
)
def test_a_study_first_then_options_of_snakemake(tmp_path, monkeypatch, given, passed):
    monkeypatch.chdir(tmp_path)
    assert snakemake_arguments(given) == [*WORKFLOW, *passed]


@pytest.mark.parametrize("given", [[], ["-n"]])
def test_the_default_study_has_to_be_there(tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config/config\.yaml: no such file, expected .*aqnpipe init"):
        snakemake_arguments(given)
    Path("config").mkdir()
    Path("config", "config.yaml").touch()
    assert snakemake_arguments(given) == [*WORKFLOW, *given]


def test_the_workflow_is_part_of_the_package():
    assert SNAKEFILE.is_file()
