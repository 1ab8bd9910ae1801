"""`aqnpipe doctor`: checks of versions, devices and profiles."""

import json
from pathlib import Path

import pytest
import yaml
import yte
from typed import typed

from aqnpipe.cli.doctor import command, slurm
from aqnpipe.cli.doctor.command import profile_checks, read_profile, version_checks
from aqnpipe.cli.doctor.slurm import SlurmPartition, parse_partitions
from aqnpipe.errors import ConfigError
from aqnpipe.runtime import device_allocation

ROOT = Path(__file__).parents[2]
CLUSTER = (
    SlurmPartition("gpu", "gpu:a100:8", None, 128, 1_000_000, 2),
    SlurmPartition("npu", "npu:910c:16(S:0-1)", 2880, 320, 2_000_000, 1),
    SlurmPartition("cpu", "", None, 64, 256_000, 4),
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)
    for variable in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(variable, raising=False)


def problems(found):
    return {check.name: f"{check.found} {check.advice}" for check in found if check.status == "problem"}


def on_a_cluster(monkeypatch, partitions=CLUSTER):
    """Let `sinfo` answer with these partitions."""
    monkeypatch.setattr(slurm, "read_partitions", lambda: partitions)


def profile(name, **site):
    """A profile's keys, after an edit of its site block."""
    keys = yaml.safe_load(Path("profiles", name, "config.yaml").read_text())
    keys["__variables__"].update(site)
    return yte.process_yaml(yaml.safe_dump(keys, sort_keys=False), require_use_yte=True)


def test_partitions_are_read_as_sinfo_prints_them():
    gpu, batch = parse_partitions(
        "gpu*|gpu:a100:8(S:0-1),nvme:1|1-12:30:00|128+|1000000+|3\nbatch|(null)|infinite|4|8000|1\n"
    )
    assert gpu == SlurmPartition("gpu", "gpu:a100:8(S:0-1),nvme:1", 2190, 128, 1_000_000, 3)
    assert batch == SlurmPartition("batch", "", None, 4, 8000, 1)
    assert [gpu.num_devices(gres) for gres in ("gpu:a100", "gpu", "gpu:h100", "nvme")] == [8, 8, 0, 1]
    assert parse_partitions("short|(null)|45:00|1|1|1")[0].minutes == 45


def test_greetings_and_types_with_hyphens_are_read():
    (found,) = parse_partitions("Welcome!\n\ngpu|gpu:nvidia_a100-sxm4-80gb:8(S:0-1)|UNLIMITED|1|1|1\n")
    assert found.minutes is None
    assert [found.num_devices(gres) for gres in ("gpu", "gpu:nvidia_a100-sxm4-80gb", "gpu:a100")] == [8, 8, 0]


def test_durations_and_several_partitions_are_accepted(monkeypatch):
    on_a_cluster(monkeypatch)
    monkeypatch.setattr(command, "can_compute_on", lambda kind: True)
    for site in ({"train_minutes": "48h"}, {"device_partition": "gpu,npu"}):
        assert not problems(profile_checks(profile("a100", **site), CLUSTER))


def test_a_profile_may_be_named_by_its_file():
    assert read_profile("profiles/default/config.yaml")["cores"] == "all"


@pytest.mark.parametrize("name", ["a100", "ascend"])
def test_a_cluster_that_has_what_a_profile_asks_for(name, monkeypatch):
    on_a_cluster(monkeypatch)
    monkeypatch.setattr(command, "can_compute_on", lambda kind: True)
    found = profile_checks(read_profile(name), CLUSTER)
    assert not problems(found)
    assert {"train", "evaluate", "srdd_diagnose", "loss_study", "other jobs", "study"} <= {
        check.name for check in found
    }


@pytest.mark.parametrize(
    ("site", "said"),
    [
        ({"device_partition": "big"}, "no partition big the cluster has cpu, gpu, npu"),
        ({"device_gres": "gpu:h100"}, "0 gpu:h100 per node (gpu:a100:8)"),
        ({"train_nodes": 3}, "partition gpu has 2 nodes for the 3 of a job"),
        ({"train_devices": 16}, "8 gpu:a100 per node"),
        ({"cpus_per_device": 32}, "128 CPUs per node"),
        ({"mem_mb_per_device": 200_000}, "1000000 MB per node"),
        (
            {"device_partition": "npu", "device_gres": "npu:910c", "train_minutes": 10_000},
            "a time limit of 2880 minutes",
        ),
    ],
)
def test_what_the_cluster_lacks_is_said(site, said, monkeypatch):
    on_a_cluster(monkeypatch)
    assert said in problems(profile_checks(profile("a100", **site), CLUSTER))["train"]


@pytest.mark.parametrize(("devices", "status"), [(4, "problem"), (8, "ok"), (16, "untested")])
def test_every_worker_of_a_run_needs_a_device(devices, status):
    workers = next(
        check for check in profile_checks(profile("a100", train_devices=devices), CLUSTER) if check.name == "workers"
    )
    assert (workers.status, workers.found) == (status, f"8 per training run, on {devices} devices")


def test_jobs_on_gpus_need_a_torch_built_for_them(monkeypatch):
    """The login node has no GPU, so the devices cannot be looked at; the jobs would fail on the first node with one."""
    on_a_cluster(monkeypatch)
    monkeypatch.setattr(command, "can_compute_on", lambda kind: kind == "cpu")
    found = problems(profile_checks(read_profile("a100"), CLUSTER))
    assert found == {"torch": "built for a CPU only, the study needs cuda make setup DEVICE=cuda"}
    found = problems(profile_checks(read_profile("ascend"), CLUSTER))
    assert found == {"torch": "built for a CPU only, the study needs npu make setup DEVICE=npu, beside CANN"}
    # Jobs may have another environment than the login node.
    elsewhere = profile_checks(profile("a100", setup="module load aqnpipe"), CLUSTER)
    assert {check.name: check.status for check in elsewhere}["torch"] == "untested"


@pytest.mark.parametrize(("kind", "name"), [("cpu", ""), ("cuda", "-cuda"), ("npu", "-ascend")])
def test_versions_are_those_for_the_devices_that_torch_was_built_for(kind, name, monkeypatch):
    monkeypatch.setattr(command, "can_compute_on", lambda other: other in (kind, "cpu"))
    monkeypatch.setattr(command, "_version", lambda name: "0.1")
    monkeypatch.setattr(command, "_demands", lambda names: {})
    found = {check.name: check.advice for check in version_checks()}
    assert found["trl"] == f"constraints{name}.txt has 1.16.0"


@pytest.mark.parametrize("partitions", [None, ()])
def test_a_profile_with_slurm_as_its_executor_needs_a_cluster(partitions):
    own = {"executor": "slurm", "configfile": "config/smoke.yaml"}
    assert "no cluster here" in problems(profile_checks(own, partitions))["Slurm"]


@pytest.mark.parametrize("name", ["a100", "ascend"])
def test_without_slurm_a_cluster_profile_leases_the_devices_of_the_machine(name, monkeypatch, capsys):
    on_a_cluster(monkeypatch, None)
    kind = {"a100": "cuda", "ascend": "npu"}[name]
    monkeypatch.setattr(device_allocation, "_ids_in_dev", lambda wanted: tuple("01234567") if wanted == kind else ())
    keys = read_profile(name)
    assert "executor" not in keys
    assert keys["resources"] == {"devices": 8}
    assert keys["set-resources"]["train"] == {"devices": 8}
    assert keys["set-resources"]["evaluate"] == {"devices": 1, "workers": 1}
    assert (
        capsys.readouterr().err
        == "no Slurm here: jobs run on this machine and reserve its devices, train_devices in all\n"
    )
    found = {check.name: check for check in profile_checks(keys, None)}
    assert (found["leases"].status, found["leases"].found) == ("ok", f"8 devices of kind {kind}")


def test_a_machine_on_another_device_needs_that_device(tmp_path, monkeypatch):
    content = yaml.safe_load(Path("config/smoke.yaml").read_text(encoding="utf-8"))
    content |= {"device": "cpu", "arms_file": str(Path("config/arms.yaml").resolve())}
    content["machines"]["npu"] = {"device": "npu"}
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump(content), encoding="utf-8")
    here = problems(profile_checks({"configfile": str(study)}, None))
    assert here["device of machines (npu)"].startswith("requested npu, found none")
    cluster_profile = {"configfile": str(study), "executor": "slurm", "set-resources": {"train": {}}}
    found = problems(profile_checks(cluster_profile, None))
    assert found["srdd_diagnose_npu"].startswith("the profile has no npu for it")


def test_the_workstation_needs_as_many_devices_as_its_jobs_lease(monkeypatch):
    monkeypatch.setattr(device_allocation, "_ids_in_dev", lambda kind: ("0", "1") if kind == "cuda" else ())
    assert profile("workstation")["resources"] == {"devices": 2}
    assert not problems(profile_checks(profile("workstation"), None))
    assert "2 devices of kind cuda" in problems(profile_checks(profile("workstation", devices=4), None))["leases"]
    monkeypatch.setattr(device_allocation, "_ids_in_dev", lambda kind: ())
    assert "plain `snakemake` reserves none" in problems(profile_checks(profile("workstation"), None))["leases"]


def test_a_study_that_does_not_load_is_a_problem():
    found = profile_checks({"configfile": "config/none.yaml"}, None)
    assert problems(found) == {"study": "config/none.yaml: no such file choose another with --configfile"}


def test_an_unknown_profile_is_named_beside_those_there_are():
    with pytest.raises(ConfigError, match="no profile 'a10', found a100, ascend, default, workstation"):
        read_profile("a10")


def test_versions_are_held_against_requirements_and_tested_ones(monkeypatch, tmp_path):
    installed = {"torch": "2.13.0+cu128", "trl": "1.16.0", "ray": "2.1"}
    required = {"aqnpipe": ["torch", "trl>=1", "ray"], "trl": ["torch<2.9", "ray>=3; extra == 'many'"]}
    monkeypatch.setattr(command, "_version", installed.get)
    monkeypatch.setattr(command.metadata, "requires", lambda name: required.get(name))
    (tmp_path / "constraints.txt").write_text("# pins\nray==2.2\ntorch==2.13.0\n")
    found = {check.name: (check.status, check.advice) for check in version_checks(tmp_path / "constraints.txt")}
    assert found["torch"] == ("problem", "trl needs torch<2.9")
    assert found["trl"] == ("ok", "")
    assert found["ray"] == ("untested", "constraints.txt has 2.2")
    assert found["vllm"][0] == "missing"


def test_a_folder_without_pinned_versions_is_named(tmp_path):
    found = {check.name: check for check in version_checks(tmp_path / "constraints.txt")}
    assert (found["versions"].status, found["versions"].found) == ("untested", f"no {tmp_path}/constraints.txt here")
    assert "versions" not in {check.name for check in version_checks(ROOT / "constraints.txt")}


def test_a_library_that_everybody_needs_is_a_problem_where_it_is_not(monkeypatch):
    monkeypatch.setattr(command, "_version", lambda name: None if name == "polars" else "1")
    monkeypatch.setattr(command, "_demands", lambda names: {})
    assert problems(version_checks()) == {
        "polars": "not installed make setup (DEVICE=cuda on GPUs, DEVICE=npu on NPUs)"
    }


def test_without_a_clone_no_advice_names_make_or_pages(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "_version", lambda name: None)
    monkeypatch.setattr(command, "_demands", lambda names: {})
    monkeypatch.setattr(command, "can_compute_on", lambda kind: kind == "cpu")

    def advice():
        found = [*version_checks(), *(command.build_check(kind) for kind in ("cuda", "npu"))]
        return {f"{check.name} {check.found}": check.advice for check in found if check.advice}

    here = advice()
    assert here["vllm not installed"].startswith("make setup DEVICE=cuda")
    monkeypatch.chdir(tmp_path)
    elsewhere = advice()
    assert here.keys() <= elsewhere.keys()
    assert not [said for said in elsewhere.values() if "make " in said or "docs/" in said]
    assert elsewhere["snakemake-executor-plugin-slurm not installed"].startswith("pip install 'aqnpipe[slurm]'")
    assert elsewhere["polars not installed"] == "pip install aqnpipe"
    assert "'aqnpipe[ascend]'" in elsewhere["torch built for a CPU only, the study needs npu"]


def test_on_the_command_line(monkeypatch):
    monkeypatch.setattr(command, "read_partitions", lambda: None)
    on_a_cluster(monkeypatch)
    monkeypatch.setattr(command, "machine_checks", lambda results, partitions: [])
    done = typed("doctor", "--profile", "a100", "--json")
    assert done.exit_code == 2
    assert json.loads(done.stdout)["can_run"] is False
    done = typed("doctor", "--profile", "a100")
    assert "!! Slurm" in done.stdout
    assert done.stdout.endswith("Profile a100 cannot run here.\n")
    done = typed("doctor", "--profile", "default")
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (0, "Profile default can run here.")


@pytest.mark.parametrize(
    ("compilers", "variable", "headers", "needed", "status"),
    [
        ({"gcc"}, None, True, True, "ok"),
        ({"clang"}, None, True, True, "ok"),
        ({"gcc-12"}, "gcc-12", True, True, "ok"),
        ({"ccache", "gcc"}, "ccache gcc", True, True, "problem"),  # Triton takes it for the name of one program
        (set(), None, True, True, "problem"),
        ({"gcc"}, "no-such-compiler", True, True, "problem"),
        ({"gcc"}, None, False, True, "problem"),
        (set(), None, False, False, "missing"),
    ],
)
def test_triton_needs_a_compiler_and_headers_where_there_are_gpus(
    compilers, variable, headers, needed, status, monkeypatch, tmp_path
):
    monkeypatch.delenv("CC", raising=False)
    if variable:
        monkeypatch.setenv("CC", variable)
    if headers:
        (tmp_path / "Python.h").touch()
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/usr/bin/{name}" if name in compilers else None)
    monkeypatch.setattr(command.sysconfig, "get_path", lambda name: str(tmp_path))
    found = command.compiler_check(needed)
    assert found.status == status
    assert ("-dev (Triton" in found.advice) == (status != "ok")


def test_this_machine_is_looked_at():
    found = {check.name: check for check in command.machine_checks(Path("results"), None)}
    assert {"GPUs", "NPUs", "python", "torch", "vllm", "ray", "Slurm", "disk", "machine", "compiler"} <= set(found)
    assert found["torch"].status in ("ok", "untested")
    assert found["Slurm"].status == "missing"


@pytest.mark.parametrize(
    ("given", "status", "said"),
    [
        ({"evaluate": {"devices": 2, "workers": 1}}, "ok", "2 devices per worker"),
        ({"evaluate": {"devices": 1, "workers": 1}}, "problem", "found 1 devices, enough for 0 of 1 workers"),
        ({"evaluate": {"gres": "gpu:a100:1"}}, "problem", "gres: found 1 devices per node"),
        (
            {"evaluate": {"devices": 2}, "evaluate_on_machine": {"devices": 1}},
            "problem",
            "evaluate_on_machine: devices: found 1",
        ),
    ],
)
def test_every_engine_of_an_evaluation_needs_its_devices(given, status, said, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = yaml.safe_load((ROOT / "config" / "qwen2.5-1.5b.yaml").read_text())
    study["arms_file"] = str(ROOT / "config" / study["arms_file"])
    study["generation"] = study.get("generation", {}) | {"backend": "vllm", "tensor_parallel": 2}
    study["evaluation"]["machines"] = ["target"]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    keys = {"configfile": str(tmp_path / "study.yaml"), "set-resources": given}
    (found,) = [check for check in profile_checks(keys, None) if check.name == "evaluations"]
    assert found.status == status
    assert said in found.found
