"""Studies and arms: shipped files are valid, and every mistake is one line with file, key, found and expected."""

import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from aqnpipe.config.arm import ArmsFile
from aqnpipe.config.model import ModelConfig, source_kind
from aqnpipe.config.study import load_study, load_study_file, load_study_files, study_schema
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
NO_STUDIES = {"arms.yaml", "published.yaml"}
STUDY_FILES = sorted(path for path in (ROOT / "config").glob("*.yaml") if path.name not in NO_STUDIES)

RELATIVE = {"kind": "relative_gaussian", "scale": 0.05}


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


def _set(config, path, value):
    *parents, last = path
    for key in parents:
        config = config[key]
    config[last] = value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["sedds"], [0], r"study\.yaml: sedds: unknown key"),
        (["training", "learning_rat"], 1, r"study\.yaml: training\.learning_rat: unknown key"),
        (["training", "learning_rate"], "fast", r"training\.learning_rate: found 'fast', expected a number"),
        (["training"], None, r"study\.yaml: training: found null, expected a mapping of keys"),
        (["machines"], {}, r"study\.yaml: machines: found {}, expected at least 1 entries"),
        (["training", "micro_batch_size"], 50, r"training: .*micro_batch_size 50 must divide .* = 128"),
        (["seeds"], [0, 0], r"study\.yaml: seeds: found 0 twice, expected each value once"),
        (
            ["arms"],
            ["baseline", "E99"],
            r"study\.yaml: arms\.1: found 'E99', expected .* \(did you mean E9\w*\?\) of config/arms\.yaml",
        ),
        (
            ["arms"],
            ["baseline", "nothing"],
            r"study\.yaml: arms\.1: found 'nothing', expected one of .* of config/arms\.yaml",
        ),
        (["arms_file"], "config/nowhere.yaml", r"config/nowhere\.yaml: no such file"),
        (["models", "base", "source"], "./nowhere", r"nowhere.*no such folder"),
        (["models", "base", "source"], "huge", r"'huge' is unknown"),
        (
            ["machines", "target", "faults", 0, "layer"],
            6,
            r"machines\.target\.faults\.0\.layer: found 6, expected layers 0 to 5, which model base \(tiny\) has",
        ),
        (
            ["machines"],
            {"device": {}},
            r"aqn\.layer_sigmas_from: found 'target', expected one of device",
        ),
        (
            ["training", "epochs"],
            3,
            r"config/arms\.yaml: .*robust_first\.aqn\.schedule\.ranges: found 2 entries, expected .* 3 epochs",
        ),
        (
            ["training", "validation_questions"],
            501,
            r"study\.yaml: training\.validation_questions: found 501, expected at most the 500 test questions",
        ),
        (
            ["machines", "device", "counterpart"],
            {"dtype": "float32"},
            r"machines\.device\.counterpart: found counterpart, expected other settings than dtype float32",
        ),
        (["comparisons", 0, "treatment"], "E5d", r"study\.yaml: comparisons\.0\.treatment: found 'E5d', expected "),
        (["comparisons", 1, "noise_level"], 0.2, r"comparisons\.1\.noise_level: found 0\.2, .*0\.05"),
        (["evaluation", "noise_levels"], [0.0, -0.1], r"evaluation\.noise_levels\.1: .*found -0\.1"),
        (["results_dir"], "../elsewhere", r"results_dir"),
        (["dataset"], {"source": "local", "path": "x"}, r"dataset\.num_train is null, expected a number"),
        (
            ["training", "loss_scale"],
            1024,
            r"study\.yaml: training\.loss_scale: found 1024, expected no value, which has an effect on .*float16 alone",
        ),
        (["dataset", "task"], "poetry", r"study\.yaml: dataset\..*task.*found 'poetry'"),
        (
            ["arms"],
            ["baseline", "E9"],
            r"config/arms\.yaml: arms\.E9\.task: found 'comparison', expected word_problems, .* study\.yaml",
        ),
    ],
)
def test_a_mistake_is_one_line(config, path, value, message):
    _set(config, path, value)
    with pytest.raises(ConfigError, match=message) as caught:
        load_study(config, "study.yaml")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["training", "validation_questions"], 500),
        (["machines", "device", "counterpart"], {"dtype": "float32", "attention": "sdpa"}),
        (["machines", "device", "counterpart"], {"dtype": "float32", "batch_size": 4}),
    ],
)
def test_the_nearest_right_study_is_valid(config, path, value):
    _set(config, path, value)
    load_study(config, "study.yaml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (
            ["generation", "tensor_parallel"],
            8,
            r"found 8, expected a number by which .*: 12 attention heads do not divide by 8",
        ),
        (["evaluation", "max_response_tokens"], 32768, r"found 32768, expected fewer than the 32768 positions of"),
        (
            ["machines", "target", "faults", 0, "layer"],
            28,
            r"found 28, expected layers 0 to 27, which model base \(Qwen/",
        ),
    ],
)
def test_sizes_of_well_known_models_of_the_hub_are_checked_before_the_download(path, value, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    study = yaml.safe_load((ROOT / "config" / "qwen2.5-1.5b.yaml").read_text()) | {"arms_file": "config/arms.yaml"}
    load_study(study, "study.yaml")
    _set(study, path, value)
    with pytest.raises(ConfigError, match=message):
        load_study(study, "study.yaml")


def test_of_fewer_test_questions_than_the_default_all_are_for_validations(config):
    config["dataset"]["num_test"] = 40
    del config["training"]["validation_questions"]
    load_study(config, "study.yaml")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda arms: arms["E5b"]["aqn"]["schedule"]["ranges"][0].update(sigma_start=-0.1),
            r"arms\.E5b\.aqn\..*found -0\.1",
        ),
        (
            lambda arms: arms["E5"]["operator_noise"]["error"].update(scale=float("nan")),
            r"arms\.E5\.operator_noise\.error",
        ),
        (lambda arms: arms["E5"]["operator_noise"].update(sigma=1), r"arms\.E5\.operator_noise\.sigma: unknown key"),
        (
            lambda arms: arms["E5"]["operator_noise"].update(phases=["backward"]),
            r"phases has backward without actor_forward",
        ),
        (lambda arms: arms["E5"]["operator_noise"].update(phases=["evaluation"]), r"training has no phase evaluation"),
        (
            lambda arms: arms["E5"]["operator_noise"].update(layer_scales={7: 0.1}),
            r"layer_scales: found \{7: 0\.1\}, expected layers 0 to 5",
        ),
        (
            lambda arms: arms["E5"]["operator_noise"].update(layer_scales={1: -0.1}),
            r"layer_scales\.1: found -0\.1, expected at least 0",
        ),
        (lambda arms: arms["E5"]["operator_noise"].update(operators="conv"), r"operator_noise\.operators"),
        (lambda arms: arms["E5"]["operator_noise"]["error"].update(scale=-0.1), r"operator_noise\.error.*scale"),
        (lambda arms: arms["E5"]["operator_noise"]["error"].update(kind="cosmic"), r"operator_noise\.error"),
        (
            lambda arms: arms["E5"].update(module_noise={"modules": "conv", "error": RELATIVE}),
            r"arms\.E5\.module_noise\.modules",
        ),
        (
            lambda arms: arms["E5"].update(module_noise={"modules": [], "error": RELATIVE}),
            r"module_noise: .*modules is empty",
        ),
        (
            lambda arms: arms["E5"].update(module_noise={"modules": "all", "error": RELATIVE, "phases": ["backward"]}),
            r"module_noise: .*phases has backward",
        ),
        (
            lambda arms: arms["E5"].update(operator_noise={"error": {"kind": "fake_quantization", "format": "mxfp4"}}),
            r"fake_quantization has no separate backward error",
        ),
        (
            lambda arms: arms["E5"]["operator_noise"].update(layers=[7]),
            r"operator_noise\.layers: found \[7\], expected layers",
        ),
    ],
)
def test_a_mistake_in_an_arm_names_the_arms_file(config, tmp_path, edit, message):
    arms = yaml.safe_load((ROOT / "config" / "arms.yaml").read_text())
    edit(arms["arms"])
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump(arms))
    config["arms_file"] = str(tmp_path / "arms.yaml")
    with pytest.raises(ConfigError, match=message) as caught:
        load_study(config, "study.yaml")
    assert "arms.yaml: " in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_scale_is_of_models_in_float16(config):
    _set(config, ["training", "loss_scale"], 1024)
    _set(config, ["models", "base", "dtype"], "float16")
    load_study(config, "study.yaml")


@pytest.mark.parametrize("place", ["arm", "noise of evaluations"])
def test_a_fixed_machine_needs_a_model_with_eager_attention(config, place):
    if place == "arm":
        config.update(arms=["baseline", "E5_fixed"], comparisons=[])
    else:
        error = {"kind": "relative_gaussian", "scale": 0.05, "redraw": "never", "machine": 3}
        _set(config, ["evaluation", "noises"], {"fixed": {"operator_noise": {"error": error}}})
    load_study(config, "study.yaml")
    _set(config, ["models", "base", "attention"], "sdpa")
    where = r"arms\.E5_fixed" if place == "arm" else r"evaluation\.noises\.fixed"
    expected = r"\.operator_noise\.error\.redraw: found 'never', expected always, or models\.base\.attention: eager"
    with pytest.raises(ConfigError, match=where + expected):
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
