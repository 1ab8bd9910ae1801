"""Studies and arms: shipped files are valid, and every mistake is one line with file, key, found and expected."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from aqnpipe.config.arm import ArmsFile
from aqnpipe.config.model import ModelConfig, source_kind
from aqnpipe.config.schema import study_schema
from aqnpipe.config.study import load_study, load_study_file, load_study_files
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
NO_STUDIES = {"arms.yaml", "published.yaml"}
STUDY_FILES = sorted(path for path in (ROOT / "config").glob("*.yaml") if path.name not in NO_STUDIES)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config():
    return yaml.safe_load((ROOT / "config" / "config.yaml").read_text()) | {"arms_file": "config/arms.yaml"}


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
def test_every_shipped_study_parses(path):
    study = load_study_file(path)
    assert set(study.arms) == set(study.config.arms)


def test_every_arm_parses_and_the_issue_s_arms_are_there():
    arms = ArmsFile.model_validate(yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())).arms
    assert {"baseline", "E5", "E5a", "E5b", "E5c", "E5d", "E7a", "E7b", "E7c", "srdd_guided"} <= set(arms)
    assert arms["baseline"].operator_noise is None
    assert arms["baseline"].aqn is None
    assert {name for name, arm in arms.items() if arm.model == "large"} == {
        "E7a",
        "E7b",
        "E7b_fixed",
        "E7c",
        "E7_guided",
    }


def test_every_arm_is_run_by_a_shipped_study():
    arms = ArmsFile.model_validate(yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())).arms
    trained = [study for path in STUDY_FILES if (study := load_study_file(path)).has_training]
    assert {arm for study in trained for arm in study.config.arms} == set(arms)


def test_the_committed_schema_is_the_generated_one():
    """If this fails: `aqnpipe schema > config/schema.json`."""
    assert (ROOT / "config" / "schema.json").read_text() == study_schema()


def test_configuration_is_importable_without_torch():
    import subprocess
    import sys

    modules = "aqnpipe.config.plan, aqnpipe.config.study, aqnpipe.artifacts.provenance"
    code = f"import {modules}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_of_fewer_test_questions_than_the_default_all_are_for_validations(config):
    config["dataset"]["num_test"] = 40
    del config["training"]["validation_questions"]
    load_study(config, "study.yaml")


def test_broken_yaml_is_one_line(tmp_path):
    (tmp_path / "study.yaml").write_text("a: [1\nb: 2")
    with pytest.raises(ConfigError, match=r"study\.yaml:2:2: not valid YAML") as caught:
        load_study_file(tmp_path / "study.yaml")
    assert "\n" not in str(caught.value)


def test_arms_are_found_beside_the_study(tmp_path, monkeypatch, config):
    arms = yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "arms.yaml").write_text(yaml.safe_dump(arms))
    del config["arms_file"]
    (tmp_path / "elsewhere" / "study.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "changes.yaml").write_text("arms_file: elsewhere/arms.yaml\n")
    monkeypatch.chdir(tmp_path)
    study = Path("elsewhere/study.yaml")
    assert load_study_files([study]).config.arms_file == "elsewhere/arms.yaml"
    assert load_study_files([study.absolute()]).config.arms_file == str(tmp_path / "elsewhere" / "arms.yaml")
    # A file names its arms from its own folder, the command line from the working directory.
    assert load_study_files([study, Path("changes.yaml")]).config.arms_file == "elsewhere/arms.yaml"
    with pytest.raises(ConfigError, match=r"^arms\.yaml: no such file$"):
        load_study_files([study], {"arms_file": "arms.yaml"})


@pytest.mark.parametrize(
    "folder",
    [
        *(
            "results",
            "results/a b",
            "/var/tmp/Größe 2/results",
            "/data",
            "res_1.2/",
            "results/docs",
            "/home/me/workflow",
        ),
        *(
            "/opt/data/x",
            "/opt/data/tests",
            "/mnt/x",
            "/media/me/disk",
            "/srv/x",
            "/tmp/x/y",
            "/scratch/me",
            "/var/tmp/a",
        ),
        *("/variable/lib", "/var/libs/x", "/home/x/results", "/data/usr/lib"),
    ],
)
def test_results_may_be_anywhere_that_is_named(config, folder):
    assert load_study(config | {"results_dir": folder}).config.results_dir == folder


@pytest.mark.parametrize("folder", ["", " results", "results ", "/", "a{b}", "$HOME/x", "~/x", "a:b", "a/../b", "a\nb"])
def test_results_are_not_in_folders_that_snakemake_would_misread(config, folder):
    with pytest.raises(ConfigError, match="results_dir"):
        load_study(config | {"results_dir": folder})


@pytest.mark.parametrize(
    "folder",
    [
        *("workflow", "workflow/rules", "config", "src/results", "/etc/x", "/usr/lib/results", "/dev/x", "/dev/shm"),
        *(str(Path.cwd()), str(Path.cwd() / "workflow" / "x"), "/var/lib/x", "/var/log", "/var/spool/a/b"),
        *("docs", "tests/x", "benchmarks", "containers/results", "examples", "a100", str(Path.cwd() / "docs" / "x")),
    ],
)
def test_results_are_not_among_files_of_the_workflow_or_the_system(config, folder):
    with pytest.raises(ConfigError, match=r"results_dir: found .*, a folder of the (project|system), expected another"):
        load_study(config | {"results_dir": folder})
    load_study(config | {"results_dir": f"my_{folder.strip('/')}"})


def test_no_folder_of_the_project_is_missing(config):
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=False, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a clone: git does not say which folders are the project's")
    folders = {Path(line).parts[0] for line in listed.stdout.splitlines() if "/" in line}
    folders.remove("config")  # tested above; the fixture's study has its arms in it
    for folder in sorted(name for name in folders if not name.startswith(".")):
        with pytest.raises(ConfigError, match="a folder of the project"):
            load_study(config | {"results_dir": folder})


@pytest.mark.parametrize("folder", ["docs", "tests/x", "benchmarks/today", "examples/a", "containers"])
def test_a_folder_of_ones_own_may_have_the_name_of_one_in_a_clone(config, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = config | {"arms_file": str(ROOT / "config" / "arms.yaml"), "results_dir": folder}
    assert load_study(own).config.results_dir == folder
    (tmp_path / "src" / "aqnpipe").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a folder of the project"):
        load_study(own)


@pytest.mark.parametrize("folder", ["/home", "/tmp", "/var", "/var/tmp", "/opt/x", "/mnt", "/home/me", "linked"])
def test_results_are_not_the_folder_that_users_or_programs_have_theirs_in(config, folder, tmp_path, monkeypatch):
    """Those below it may have results, as a home folder may."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("/")
    own = config | {"arms_file": str(ROOT / "config" / "arms.yaml")}
    with pytest.raises(ConfigError, match=r"results_dir: found .*, a folder of the machine or its user, expected"):
        load_study(own | {"results_dir": folder})
    load_study(own | {"results_dir": f"{folder}/a"})
    with pytest.raises(ConfigError, match="a folder of the machine"):
        load_study(own | {"results_dir": "/opt"})


def test_results_may_be_in_memory_and_below_the_working_directory_by_its_whole_path(config):
    for folder in ("/dev/shm/results", str(Path.cwd() / "results"), str(Path.cwd() / "results" / "docs")):
        assert load_study(config | {"results_dir": folder}).config.results_dir == folder


def test_results_behind_a_link_are_not_among_files_of_the_system(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linked").symlink_to("/etc")
    (tmp_path / "disk").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match=r"results_dir: found 'linked/x', a folder of the system"):
        load_study(config | {"results_dir": "linked/x", "arms_file": str(ROOT / "config" / "arms.yaml")})
    load_study(config | {"results_dir": "disk/x", "arms_file": str(ROOT / "config" / "arms.yaml")})


def test_a_home_in_a_folder_of_the_system_may_have_results(config, monkeypatch):
    """As the accounts of services have."""
    monkeypatch.setenv("HOME", "/var/lib/me")
    assert load_study(config | {"results_dir": "/var/lib/me/a"}).config.results_dir == "/var/lib/me/a"
    for home, folder in (("/var/lib/me", "/var/lib/me"), ("/var/lib/me", "/var/lib/you"), ("/", "/etc/x")):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(ConfigError, match="a folder of the system"):
            load_study(config | {"results_dir": folder})


def test_a_working_directory_in_a_folder_of_the_system_may_have_results(config, tmp_path, monkeypatch):
    """As /usr/src/app in many containers."""
    monkeypatch.setattr("aqnpipe.config.study._SYSTEM_FOLDERS", (tmp_path.resolve().parts[1],))
    monkeypatch.chdir(tmp_path)
    own = config | {"arms_file": str(ROOT / "config" / "arms.yaml")}
    assert load_study(own | {"results_dir": "results"}).config.results_dir == "results"
    with pytest.raises(ConfigError, match="a folder of the system"):
        load_study(own | {"results_dir": str(tmp_path.parent / "elsewhere")})


PUBLISHED_STUDIES = [path for path in STUDY_FILES if "weight_decay" in path.read_text()]


def test_the_studies_of_the_published_runs_train_and_grade_as_verl():
    assert {path.stem for path in PUBLISHED_STUDIES} == {
        *("qwen2.5-1.5b", "qwen2.5-7b", "ascend", "dead-zone-qwen2.5-1.5b", "small-errors-qwen2.5-1.5b"),
    }
    for path in PUBLISHED_STUDIES:
        config = load_study_file(path).config
        training = config.training
        assert (training.weight_decay, training.clip_ratio_c) == (0.01, 3.0), path
        assert [reward.scorer for reward in training.rewards] == ["verl_strict"], path
        assert config.evaluation.primary_scorer == "verl_strict", path


NAMES = ("study", "description", "results_dir", "arms_file", "device", "report")
"""Sections that name things and choose nothing."""


@pytest.mark.parametrize("path", PUBLISHED_STUDIES, ids=lambda path: path.stem)
def test_every_value_of_the_published_studies_says_where_it_comes_from(path):
    """Each value of the training and the evaluation in its line; other sections in them or in the lines above them."""
    lines = path.read_text().splitlines()
    starts = [number for number, line in enumerate(lines) if re.match("[a-z_]+:", line)]
    for start, end in itertools.pairwise([*starts, len(lines)]):
        name = lines[start].partition(":")[0]
        above = itertools.takewhile(lambda line: line.startswith("#"), reversed(lines[:start]))
        whole = lines[start:end]
        if name in ("training", "evaluation"):
            values = [line for line in whole[1:] if line.startswith("  ") and not line.lstrip().startswith("#")]
            assert values
            for value in values:
                assert re.search("# (published|verl|ours)", value), value
        elif name not in NAMES:
            assert any(re.search("# .*(published|verl|ours)", line) for line in (*above, *whole)), name


@pytest.mark.parametrize("path", STUDY_FILES, ids=lambda path: path.stem)
def test_shipped_studies_pin_what_they_fetch(path):
    """Models and questions on the hub change; a commit does not."""
    content = yaml.safe_load(path.read_text())
    models = [*content.get("models", {}).values(), *content.get("checkpoints", {}).values()]
    models = [ModelConfig.model_validate(model) for model in models if isinstance(model, dict)]
    fetched = [model.revision for model in models if source_kind(model.source) == "hub"]
    if content["dataset"]["source"] == "hub":
        fetched.append(content["dataset"].get("revision"))
    assert all(re.fullmatch(r"[0-9a-f]{40}", str(revision)) for revision in fetched), fetched


def test_a_pair_of_arms_may_be_named(config):
    config["report"] |= {"language": "zh", "explore": {"treatment": "E5", "control": "pretrained", "noise_level": 0.1}}
    report = load_study(config, "study.yaml").config.report
    assert (report.language, report.explore.treatment, report.explore.noise_level) == ("zh", "E5", 0.1)
