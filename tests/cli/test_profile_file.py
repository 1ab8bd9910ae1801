"""Profiles: every mistake in one is one line, and the settings of real sites are accepted."""

import sys
from pathlib import Path

import pytest

from aqnpipe.cli.doctor import slurm
from aqnpipe.cli.profile_file import read_profile_file, refuse_unreadable_studies
from aqnpipe.errors import ConfigError

PROFILES = Path(__file__).parents[2] / "profiles"


@pytest.fixture(autouse=True)
def on_a_cluster(monkeypatch):
    monkeypatch.setattr(slurm, "read_partitions", lambda: (slurm.SlurmPartition("gpu", "gpu:8", None, 64, 1000, 1),))
    monkeypatch.setattr(sys, "argv", ["snakemake"])
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "SNAKEMAKE_PROFILE", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def edited(tmp_path):
    """Return a function that copies the profile a100 with one key of its site block changed."""

    def edit(key, line):
        rows = (PROFILES / "a100" / "config.yaml").read_text().splitlines()
        (place,) = [number for number, row in enumerate(rows) if row.startswith(f"  {key}:")]
        rows[place] = f"  {line}"
        path = tmp_path / "config.yaml"
        path.write_text("\n".join(rows) + "\n")
        return path

    return edit


@pytest.mark.parametrize("name", ["a100", "ascend", "workstation"])
def test_the_shipped_profiles_are_right(name):
    assert read_profile_file(PROFILES / name / "config.yaml")["set-resources"]["train"]


@pytest.mark.parametrize(
    ("line", "rule", "key", "expected"),
    [
        ("train_devices: 4", "train", "gres", "gpu:a100:4"),
        ("device_gres: gpu:3090", "train", "gres", "gpu:3090:8"),
        ("device_gres: gpu:l4", "train", "gres", "gpu:l4:8"),
        ("device_gres: gpu", "evaluate", "gres", "gpu:1"),
        ("device_partition: long,short", "train", "slurm_partition", "long,short"),
        ("train_minutes: 48h", "train", "runtime", "48h"),
        ("evaluate_devices: ?2 * shards", "evaluate", "workers", 2),
        ("npu_partition: npus", "srdd_diagnose_npu", "slurm_partition", "npus"),
    ],
)
def test_settings_of_real_sites_reach_the_jobs(edited, line, rule, key, expected):
    assert read_profile_file(edited(line.partition(":")[0], line))["set-resources"][rule][key] == expected


def test_a_site_may_have_variables_of_its_own(edited):
    path = edited("account", 'account: "4711"\n  gpu_partition: mine')
    assert read_profile_file(path)["default-resources"]["slurm_account"] == "4711"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("train_devices: eight", "train_devices: found 'eight', expected a whole number"),
        ('train_devices: "8"', "train_devices: found '8', expected a whole number"),
        ("train_devices: 0", "train_devices: found 0, expected at least 1"),
        ("mem_mb_per_device: 100G", "mem_mb_per_device: found '100G', expected a whole number"),
        ("train_minutes: 5", "train_minutes: found 5, expected a number above 10"),
        ("train_minutes: 2-00:00:00", "train_minutes: found '2-00:00:00', expected a whole number or a duration"),
        ("device_gres: gpu:a100:8", "device_gres: found 'gpu:a100:8', expected a name such as gpu or gpu:a100, with"),
        ("device_gres: gpu:8", "device_gres: found 'gpu:8', expected a name"),
        ("device_gres: gpu:a100-sxm4", "device_gres: found 'gpu:a100-sxm4', expected a name"),
        ("device_partition: ''", "device_partition: found '', expected the name of a partition"),
        ("account: 0123", "found 0123"),
        ("account:", "account: found null, expected text"),
        ("setup: true", "setup: found true, expected text"),
        ("evaluate_whole_runs: 1", "evaluate_whole_runs: found 1, expected true or false"),
    ],
)
def test_a_wrong_value_is_named(edited, line, said):
    path = edited(line.partition(":")[0], line)
    with pytest.raises(ConfigError) as refused:
        read_profile_file(path)
    assert str(refused.value).startswith(str(path))
    assert said in str(refused.value)


def test_a_misspelt_key_is_named(edited):
    with pytest.raises(ConfigError, match=r"site block: missing key setup \(did you mean set_up\?\)"):
        read_profile_file(edited("setup", 'set_up: "true"'))


def test_an_expression_that_fails_is_named(edited):
    with pytest.raises(ConfigError, match="cannot be processed: ZeroDivisionError: "):
        read_profile_file(edited("evaluate_devices", "evaluate_devices: ?1 // 0"))


@pytest.mark.parametrize("content", ["configfile: [\n", "- a\n"])
def test_snakemake_ends_in_one_line(monkeypatch, capsys, tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    monkeypatch.setattr(sys, "argv", ["snakemake", "-n", "--profile", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        refuse_unreadable_studies()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ERROR: {tmp_path}/config.yaml:")
    assert error.count("\n") == 1


def test_the_default_profile_itself_and_missing_ones_are_left_to_snakemake(monkeypatch, capsys):
    monkeypatch.chdir(PROFILES.parent)
    monkeypatch.setattr(sys, "argv", ["snakemake", "--profile", "profiles/default", "--profile", "none"])
    refuse_unreadable_studies()
    monkeypatch.setattr(sys, "argv", ["snakemake", "--profile", "a100"])
    refuse_unreadable_studies()
    assert capsys.readouterr().err == ""


def test_a_wrong_list_of_devices_ends_snakemake_in_one_line(monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0-3")
    with pytest.raises(SystemExit):
        refuse_unreadable_studies()
    assert capsys.readouterr().err.startswith("ERROR: CUDA_VISIBLE_DEVICES: found '0-3', expected")
