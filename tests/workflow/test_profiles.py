"""The profiles, by dry runs of the studies that they are for: every job goes where it should, with its devices."""

import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import warm_python
import yaml
import yte
from faulted_study import WarmPython
from replacing import replaced

ROOT = Path(__file__).parents[2]
DEVICE_RULES = ("train", "evaluate", "diagnose", "parity", "loss study")
PROGRAMS = ("bash", "env", "sh", "which")
"""All that a dry run needs. Programs of a Slurm on this machine are out of its reach."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """A folder with the only programs of a machine without Slurm."""
    folder = tmp_path_factory.mktemp("programs")
    for name in PROGRAMS:
        (folder / name).symlink_to(shutil.which(name))
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory, programs):
    """Forks Snakemake from a process that has its imports made."""
    server = WarmPython(
        tmp_path_factory.mktemp("warm"), {"PATH": str(programs)}, ROOT / "src", modules=warm_python.PLANNING
    )
    yield server
    server.close()


@pytest.fixture
def planned(python, programs):
    """Function (profile, *arguments, path, **environment) -> what a dry run prints."""

    def run(profile, *arguments, path=(), **environment):
        path = os.pathsep.join([*map(str, path), str(programs)])
        options = ("--profile", str(profile), "--dry-run", "--forceall", "--nolock")
        done = python.snakemake(ROOT, *options, *arguments, PATH=path, **environment)
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.fixture
def dry_run(planned):
    """Function of the same arguments -> number of jobs that compute on a device by (rule, what the profile gives)."""

    def run(*arguments, **options):
        messages = re.findall(r"(?m)^Job \d+: ([a-z ]+): [^(\n]*(?:\((.*)\))?$", planned(*arguments, **options))
        return Counter((rule, given) for rule, given in messages if rule in DEVICE_RULES)

    return run


@pytest.fixture
def cluster(tmp_path):
    """A folder with the programs of Slurm; `sinfo` answers as that of a cluster."""
    rows = (
        "gpu|gpu:a100:8|infinite|128|1000000|2",
        "npu|npu:910c:8|infinite|128|1000000|2",
        "cpu|(null)|infinite|64|1000|1",
    )
    scripts = {"sinfo": "\n".join(f"echo '{row}'" for row in rows), "sbatch": "exit 1", "squeue": "exit 1"}
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("profile", "arguments", "partition", "gres"),
    [
        ("a100", (), "gpu", "gpu:a100"),
        ("a100", ("--configfile", "config/qwen2.5-7b.yaml"), "gpu", "gpu:a100"),
        ("ascend", (), "npu", "npu:910c"),
    ],
)
def test_every_job_of_the_real_studies_gets_its_devices(profile, arguments, partition, gres, cluster, dry_run):
    jobs = dry_run(profile, *arguments, path=[cluster])
    requested = {
        "train": f"slurm_partition {partition}, nodes 1, gres {gres}:8, runtime 2880",
        "evaluate": f"slurm_partition {partition}, nodes 1, gres {gres}:1, workers 1, runtime 240",
        "diagnose": f"slurm_partition {partition}, gres {gres}:1, runtime 240",
    }
    assert set(jobs) == set(requested.items())
    assert jobs["train", requested["train"]] >= 5
    assert jobs["evaluate", requested["evaluate"]] > jobs["train", requested["train"]]


@pytest.mark.parametrize("profile", ["a100", "ascend"])
def test_without_slurm_the_same_command_leases_the_devices_of_the_machine(profile, cluster, dry_run):
    """The hosts of the original runs were containers with eight devices and no scheduler."""
    (cluster / "sinfo").write_text("#!/bin/sh\nexit 1\n")
    jobs = dry_run(profile, path=[cluster])
    assert {("train", "devices 8"), ("evaluate", "devices 1, workers 1"), ("diagnose", "devices 1")} == set(jobs)


def test_jobs_on_a_workstation_lease_devices_and_others_need_none(dry_run):
    assert set(dry_run("workstation")) == {
        ("train", "devices 1"),
        ("evaluate", "devices 1, workers 1"),
        ("diagnose", "devices 1"),
    }
    assert {given for _, given in dry_run("profiles/default", "--configfile", "config/smoke.yaml")} == {""}


@pytest.mark.parametrize(
    ("profile", "given"),
    [("workstation", "devices 1"), ("a100", "slurm_partition gpu, gres gpu:a100:1, runtime 240")],
)
def test_the_parity_of_a_machine_is_measured_on_a_device(profile, given, cluster, dry_run):
    assert ("parity", given) in dry_run(profile, "--configfile", "config/measured.yaml", path=[cluster])


OTHER_DEVICE = ("--configfile", "config/measured.yaml", "--config", "device=cuda", "machines={measured: {device: npu}}")


def test_jobs_of_a_machine_get_the_resources_of_its_device(cluster, dry_run):
    """A workstation leases NPUs for them; a cluster with both kinds has a partition for each."""
    assert dry_run("workstation", *OTHER_DEVICE)["parity", "devices 1"] == 1
    assert ("parity", "slurm_partition npu, gres npu:910c:1, runtime 240") in dry_run(
        "ascend", *OTHER_DEVICE, path=[cluster]
    )
    both = cluster / "both"
    both.mkdir()
    text = (ROOT / "profiles" / "a100" / "config.yaml").read_text()
    (both / "config.yaml").write_text(replaced(text, 'npu_partition: ""', "npu_partition: npus"))
    jobs = dry_run(both, *OTHER_DEVICE, path=[cluster])
    assert ("parity", "slurm_partition npus, gres npu:910c:1, runtime 240") in jobs
    assert ("diagnose", "slurm_partition gpu, gres gpu:a100:1, runtime 240") in jobs


def test_a_place_without_the_device_of_a_planned_job_refuses_and_names_the_jobs(cluster, planned):
    refusal = (
        "ERROR: config/measured.yaml: machines.measured.device: the profile has no npu for srdd_diagnose_npu, expected "
        "its resources in set-resources; where there are such devices, `--until srdd_diagnose_npu measure_parity_npu` "
        "runs these jobs alone"
    )
    assert refusal in planned("a100", *OTHER_DEVICE, path=[cluster])
    assert "ERROR" not in planned("a100", *OTHER_DEVICE, "--until", "prepare_model", "prepare_data", path=[cluster])


def test_a_plan_whose_runs_get_too_few_devices_says_so(cluster, planned):
    folder = cluster / "four"
    folder.mkdir()
    text = (ROOT / "profiles" / "a100" / "config.yaml").read_text()
    (folder / "config.yaml").write_text(replaced(text, "train_devices: 8 ", "train_devices: 4 "))

    refusal = (
        "ERROR: config/qwen2.5-1.5b.yaml: training.num_workers: found 8, the profile gives a training run 4 devices"
    )
    assert refusal in planned(folder, "--until", "train", path=[cluster])
    assert "ERROR" not in planned(folder, "--until", "prepare_model", path=[cluster])
    fewer = ("--config", "training={num_workers: 4}")
    assert "ERROR" not in planned(folder, "--until", "train", *fewer, path=[cluster])


def test_a_workstation_with_eight_devices_runs_a_study_for_eight_as_it_is(dry_run):
    devices = ",".join(map(str, range(8)))
    arguments = ("--configfile", "config/qwen2.5-7b.yaml")
    assert ("train", "devices 8") in dry_run("workstation", *arguments, CUDA_VISIBLE_DEVICES=devices)


def test_an_evaluation_gets_the_devices_that_share_its_layers(cluster, tmp_path, dry_run):
    """And a worker for every two of them, if the site block gives it more."""
    study = yaml.safe_load((ROOT / "config" / "qwen2.5-7b.yaml").read_text())
    study["arms_file"] = str(ROOT / "config" / study["arms_file"])
    study["generation"] = {"backend": "vllm", "rollout_backend": "transformers", "tensor_parallel": 2}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    given = {
        given
        for rule, given in dry_run("a100", "--configfile", str(tmp_path / "study.yaml"), path=[cluster])
        if rule == "evaluate"
    }
    assert given == {"slurm_partition gpu, nodes 1, gres gpu:a100:2, workers 1, runtime 240"}


@pytest.mark.parametrize("profile", ["a100", "ascend", "workstation"])
def test_the_default_profile_overrides_nothing(profile):
    default, keys = (
        yte.process_yaml((ROOT / "profiles" / name / "config.yaml").open(), require_use_yte=True)
        for name in ("default", profile)
    )
    assert not set(default) & set(keys)
    assert (ROOT / profile).resolve() == ROOT / "profiles" / profile


def test_no_profile_starts_a_solver():
    """The default profile overrides the others; a study hung on the process of the solver after SIGTERM."""
    given = {
        path.parent.name: [line for line in path.read_text().splitlines() if line.startswith("scheduler:")]
        for path in (ROOT / "profiles").glob("*/config.yaml")
    }
    assert given == {"default": ["scheduler: greedy"], "a100": [], "ascend": [], "workstation": []}
