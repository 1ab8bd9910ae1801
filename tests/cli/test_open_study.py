"""Opening a study: what is checked outside its files, and what Snakemake reads before the workflow."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from typed import typed

from aqnpipe.cli import profile_file
from aqnpipe.cli.profile_file import (
    device_problem,
    refuse_unreadable_studies,
    shards_of_given_study,
    shards_without_devices,
    workers_of_given_study,
    workers_problem,
)
from aqnpipe.cli.study import open_study
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.study import shown_path
from aqnpipe.errors import ConfigError
from aqnpipe.models.untrusted import templates_in

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "config"


@pytest.fixture(autouse=True)
def in_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_path_below_the_working_directory_is_shown_as_typed(tmp_path):
    assert shown_path(ROOT / "config" / "smoke.yaml") == Path("config/smoke.yaml")
    assert shown_path(tmp_path / "study.yaml") == tmp_path / "study.yaml"


def test_jobs_do_not_look_outside_the_study():
    chat = {"prompt": {"style": "chat"}}
    with pytest.raises(ConfigError, match=r"config/smoke\.yaml: prompt\.style: found chat, expected plain"):
        open_study([ROOT / "config" / "smoke.yaml"], chat)
    assert open_study([ROOT / "config" / "smoke.yaml"], chat, look_outside=False).study.config.prompt.style == "chat"


def test_a_machine_measured_elsewhere_needs_its_file(tmp_path):
    machine = {"counterpart": None, "measured_in": f"{tmp_path}/{{model}}.json"}
    study = [ROOT / "config" / "measured.yaml"]
    with pytest.raises(ConfigError, match=r"machines\.measured\.measured_in: no file .*/base\.json, expected one that"):
        open_study(study, {"machines": {"measured": machine}})
    (tmp_path / "base.json").write_text("{}")
    assert open_study(study, {"machines": {"measured": machine}}).measured_by_kind() == {None: ()}


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_is_found(tmp_path, name):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not templates_in(tmp_path)
    (tmp_path / name).write_text('{"chat_template": "{{ messages }}"}')
    assert "{{ messages }}" in next(iter(templates_in(tmp_path).values()))


@pytest.mark.parametrize("key", ["content", pytest.param("value", marks=pytest.mark.slow)])
def test_a_chat_template_that_drops_the_question_is_refused(tmp_path, key):
    shutil.copytree(builtin_folder("tiny"), tmp_path / "model")
    template = f"{{% for m in messages %}}<{{{{ m.role }}}}>{{{{ m.{key} }}}}{{% endfor %}}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    chat = {"prompt": {"style": "chat"}, "models": {"base": {"source": str(tmp_path / "model")}}}
    if key == "content":
        assert open_study([CONFIG / "smoke.yaml"], chat).study.config.prompt.style == "chat"
        return
    with pytest.raises(ConfigError, match=r"prompt\.style: found chat, .* leaves out the content of a turn"):
        open_study([CONFIG / "smoke.yaml"], chat)


@pytest.mark.parametrize("installed", [True, False])
def test_a_tracker_must_be_installed(monkeypatch, installed):
    monkeypatch.setattr("aqnpipe.training.reporting.find_spec", lambda name: installed or None)
    overrides = {"training": {"report_to": ["wandb"]}}
    if installed:
        assert open_study([CONFIG / "smoke.yaml"], overrides).study.config.training.report_to == ("wandb",)
        return
    with pytest.raises(ConfigError, match=r"smoke\.yaml: training\.report_to: wandb is not installed \(pip install"):
        open_study([CONFIG / "smoke.yaml"], overrides)


def test_only_a_named_device_can_be_missing(monkeypatch):
    monkeypatch.setattr("aqnpipe.device._visible", lambda kind: None)
    assert device_problem("auto") is None
    assert device_problem("cpu") is None
    assert "requested cuda, found none" in (device_problem("cuda") or "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--configfile", "nowhere.yaml"],
        ["-n", "--configfile=nowhere.yaml", "--cores", "1"],
        ["--configfiles", "config/smoke.yaml", "nowhere.yaml", "-n"],
    ],
)
def test_an_unreadable_study_ends_snakemake_in_one_line(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["snakemake", *arguments])
    with pytest.raises(SystemExit) as ended:
        refuse_unreadable_studies()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ERROR: nowhere.yaml: no such file\n"


PROFILES = {
    "text": "configfile: nowhere.yaml\n",
    "list": "configfile: [config/smoke.yaml, nowhere.yaml]\n",
    "template": "__use_yte__: true\n__variables__:\n  stem: nowhere\nconfigfile: ?f'{stem}.yaml'\n",
    "good": "configfile: config/smoke.yaml\n",
    "silent": "cores: 1\n",
    "broken": "configfile: [\n",
}


@pytest.fixture
def profiles(tmp_path, monkeypatch):
    """Profiles by name, in the folder of profiles of a user."""
    for name, content in PROFILES.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(content)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    return tmp_path


@pytest.mark.parametrize("last", ["text", "list", "template"])
def test_an_unreadable_study_of_a_profile_ends_snakemake_in_one_line(monkeypatch, capsys, profiles, last):
    command = ["snakemake", "-n", "--profile", str(profiles / "good"), "--profile", str(profiles / last)]
    monkeypatch.setattr(sys, "argv", [*command, "--profile", str(profiles / "silent")])
    with pytest.raises(SystemExit) as ended:
        refuse_unreadable_studies()
    assert ended.value.code == 2
    assert capsys.readouterr().err == "ERROR: nowhere.yaml: no such file\n"


def test_a_profile_of_the_environment_is_read_too(monkeypatch, profiles):
    monkeypatch.setattr(sys, "argv", ["snakemake"])
    monkeypatch.setenv("SNAKEMAKE_PROFILE", str(profiles / "text"))
    with pytest.raises(SystemExit):
        refuse_unreadable_studies()


def test_a_study_beside_its_profile_is_read(monkeypatch, capsys, profiles):
    (profiles / "text" / "nowhere.yaml").write_text("study: [\n")
    monkeypatch.setattr(sys, "argv", ["snakemake", "--profile", str(profiles / "text")])
    with pytest.raises(SystemExit):
        refuse_unreadable_studies()
    assert "text/nowhere.yaml:2:1: not valid YAML" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["text", "--configfile", "config/smoke.yaml"], ["silent"], ["none"], ["no-such-profile"]]
)
def test_what_a_profile_does_not_decide_is_left_to_snakemake(monkeypatch, profiles, arguments):
    name, *rest = arguments
    profile = str(profiles / name) if (profiles / name).exists() else name
    monkeypatch.setattr(sys, "argv", ["snakemake", "--profile", profile, *rest])
    refuse_unreadable_studies()


@pytest.mark.parametrize("arguments", [[], ["-n", "--configfile", "config/smoke.yaml"], ["--config", "a=1"]])
def test_other_command_lines_are_left_to_snakemake(monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["snakemake", *arguments])
    refuse_unreadable_studies()


@pytest.mark.parametrize(
    ("arguments", "workers"),
    [
        ([], 1),
        (["--configfile", "config/smoke.yaml"], 1),
        (["--configfile", "config/qwen2.5-7b.yaml"], 8),
        (["--configfile", "config/qwen2.5-7b.yaml", "{changes}"], 2),
        (["--configfile", "config/none.yaml"], 1),
        (["--profile", "ascend"], 8),
    ],
)
def test_a_profile_learns_how_many_workers_a_study_has(arguments, workers, monkeypatch, tmp_path):
    (tmp_path / "changes.yaml").write_text("training: {num_workers: 2}")
    given = [argument.format(changes=tmp_path / "changes.yaml") for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["snakemake", *given])
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    assert workers_of_given_study() == workers


@pytest.mark.parametrize(
    ("written", "shards"), [("{tensor_parallel: 2}", 2), ("{backend: vllm}", 1), ("{tensor_parallel: 0}", 1), ("3", 1)]
)
def test_a_profile_learns_how_many_devices_share_a_layer(written, shards, monkeypatch, tmp_path):
    (tmp_path / "study.yaml").write_text(f"generation: {written}")
    monkeypatch.setattr(sys, "argv", ["snakemake", "--configfile", str(tmp_path / "study.yaml")])
    assert shards_of_given_study() == shards


@pytest.mark.parametrize(
    ("given", "shards", "problem"),
    [
        ({}, 2, None),
        ({"devices": 1, "workers": 1}, 1, None),
        ({"devices": 2, "workers": 1}, 2, None),
        (
            {"devices": 1, "workers": 1},
            2,
            "devices: found 1 devices, enough for 0 of 1 workers with the 2 of generation",
        ),
        ({"devices": 4, "workers": 4}, 2, "devices: found 4 devices, enough for 2 of 4 workers"),
        ({"gres": "gpu:a100:2", "nodes": 2, "workers": 2}, 2, None),
        # An engine is on one node.
        (
            {"gres": "gpu:a100:3", "nodes": 2, "workers": 3},
            2,
            "gres: found 3 devices per node, enough for 2 of 3 workers",
        ),
        ({"gres": "gpu:1", "workers": "lambda wildcards: 1"}, 2, None),
    ],
)
def test_a_profile_that_gives_an_engine_too_few_devices_is_refused(given, shards, problem):
    found = shards_without_devices("evaluate", given, shards)
    assert found == problem if problem is None else f"set-resources: evaluate: {problem}" in found


@pytest.mark.parametrize(
    ("requested", "ids", "shards", "problem"),
    [
        ("cuda", ("0", "1"), 2, None),
        ("cuda", ("0", "1"), 4, "found 4, this machine has 2 cuda devices; every worker needs one"),
        ("cpu", (), 2, None),
        ("cpu", (), 4, "found 4, this machine has 2 CPU cores"),
        # There `device_problem` says that there is no device.
        ("cuda", (), 4, None),
        ("cuda", ("0",), 1, None),
    ],
)
def test_more_shards_than_devices_are_refused_before_anything_runs(requested, ids, shards, problem, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    kind = "cuda" if ids else "cpu"
    monkeypatch.setattr(profile_file, "devices_to_compute_on", lambda _: (kind, ids))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    found = profile_file.shards_problem(requested, shards)
    assert found == problem if problem is None else problem in found


def test_check_counts_the_devices_of_evaluations_on_another_kind(tmp_path, monkeypatch):
    study = yaml.safe_load((CONFIG / "smoke.yaml").read_text())
    study |= {"device": "cuda", "arms_file": str(CONFIG / "arms.yaml")}
    study["generation"] = {"backend": "vllm", "rollout_backend": "transformers", "tensor_parallel": 2}
    study["models"]["base"] |= {"attention": "sdpa"}
    study["machines"]["host"] = {"device": "cpu"}
    study["evaluation"]["machines"] = ["host"]
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(study))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shown = []
    for cores in (1, 2):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, found=cores: set(range(found)))
        result = typed("check", str(path))
        assert result.exit_code == 0, result.exception
        shown.append(next(line for line in result.stdout.splitlines() if line.startswith("on cpu: ")))
    problem = "; its evaluations not on this machine: generation.tensor_parallel: found 2, this machine has 1 CPU cores"
    assert [problem in line for line in shown] == [True, False]


LORA = {"rank": 4, "alpha": 4.0}
SCALED = {"kind": "relative_gaussian", "scale": 0.05}


def in_modules(pattern):
    return {"evaluation": {"noises": {"here": {"module_noise": {"modules": [pattern], "error": SCALED}}}}}


@pytest.mark.parametrize(
    ("study", "changes", "message"),
    [
        (
            "smoke",
            {"training": {"lora": {**LORA, "target_modules": ["q_proj", "c_attn"]}}},
            r"smoke\.yaml: training\.lora\.target_modules: 'c_attn' is no linear module of the layers .* of down_",
        ),
        (
            "qwen2.5-7b",
            {"training": {"parallelism": "data", "lora": {**LORA, "target_modules": ["qproj"]}}},
            r"qwen2\.5-7b\.yaml: training\.lora\.target_modules: found 'qproj', expected a subset of q_proj, k_proj",
        ),
        (
            "smoke",
            in_modules("*.dwn_proj"),
            r"smoke\.yaml: evaluation\.noises\.here\.module_noise\.modules: \w+: pattern '\*\.dwn_proj' matches none",
        ),
    ],
)
def test_modules_that_no_model_has_are_refused_before_anything_runs(study, changes, message):
    with pytest.raises(ConfigError, match=message):
        open_study([Path(f"config/{study}.yaml")], changes)
    open_study([Path(f"config/{study}.yaml")], changes, look_outside=False)


@pytest.mark.parametrize(
    ("study", "changes"),
    [
        ("smoke", {"training": {"lora": {**LORA, "target_modules": ["q_proj", "down_proj"]}}}),
        ("qwen2.5-7b", {"training": {"parallelism": "data", "lora": {**LORA, "target_modules": ["v_proj"]}}}),
        ("smoke", in_modules("*.down_proj")),
        ("smoke", {"training": {"lora": LORA}, **in_modules("*.down_proj.lora_A.*")}),
    ],
)
def test_modules_of_the_models_are_found(study, changes):
    open_study([Path(f"config/{study}.yaml")], changes)


@pytest.mark.parametrize("training", [True, False])
def test_truncated_weights_are_refused_before_anything_runs(training, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(builtin_folder("tiny"), folder)
    changes = {"models": {"base": {"source": str(folder)}}} if training else {"checkpoints": {"small": str(folder)}}
    study, key = (("smoke", "models.base"), ("checkpoints", "checkpoints.small"))[not training]
    open_study([ROOT / "config" / f"{study}.yaml"], changes)
    weights = folder / "model.safetensors"
    with weights.open("r+b") as file:
        file.truncate(weights.stat().st_size - 1)
    with pytest.raises(ConfigError, match=rf"{study}\.yaml: {key}: model/model\.safetensors: not a valid safetensors"):
        open_study([ROOT / "config" / f"{study}.yaml"], changes)


@pytest.mark.parametrize(
    ("device", "workers", "given", "here", "said"),
    [
        ("cuda", 8, {"devices": 8}, False, None),
        ("cuda", 8, {"devices": 4}, False, "found 8, the profile gives a training run 4 devices"),
        ("cuda", 8, {"gres": "gpu:a100:4", "nodes": 2}, False, None),
        ("npu", 8, {"gres": "npu:910c:4"}, False, "found 8, the profile gives a training run 4 devices"),
        ("cpu", 8, {"devices": 4}, True, None),
        ("cuda", 8, {}, False, None),
        ("cuda", 4, {}, True, None),
        ("auto", 8, {}, True, "found 8, this machine has 4 cuda devices"),
        ("auto", 8, {"gres": "gpu:a100:8"}, False, None),
        ("cuda", 8, {"devices": "many"}, False, None),
    ],
)
def test_every_worker_of_a_training_run_needs_a_device(monkeypatch, device, workers, given, here, said):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        profile_file,
        "devices_to_compute_on",
        lambda requested: ("cpu", ()) if requested == "cpu" else ("cuda", tuple("0123")),
    )
    problem = workers_problem(device, workers, given, here=here)
    assert (problem is None) if said is None else (problem is not None and said in problem)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    assert not here or workers_problem(device, workers, given, here=here) is None


def test_results_go_beside_files_of_a_user_but_not_over_them(tmp_path):
    folder = tmp_path / "proj"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    study = [ROOT / "config" / "smoke.yaml"]
    open_study(study, {"results_dir": str(folder)})
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"README\.md is of no study and would be replaced"):
        open_study(study, {"results_dir": str(folder)})
    # Results whose records were removed, or that were made without any.
    (folder / "runs").mkdir()
    open_study(study, {"results_dir": str(folder)})


ERROR = "{{kind: own, function: '{function}', size: 0.05}}"
MODULE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()

def error(values, normals):
    return values * (1 + 0.05 * normals[0])

def scorer(response, gold_answer):
    return gold_answer in response
"""
FOREIGN = ["sent", "sent_in_a_folder", "python", "installed", "installed_here", "arms", "study"]


def write_study(folder, function=None, scorer="strict", arms="arms.yaml"):
    folder.mkdir(parents=True, exist_ok=True)
    text = (CONFIG / "smoke.yaml").read_text()
    (folder / "study.yaml").write_text(
        yaml.safe_dump(
            yaml.safe_load(text)
            | {"arms": ["mine"], "seeds": [0], "arms_file": arms, "comparisons": []}
            | {"evaluation": {**yaml.safe_load(text)["evaluation"], "primary_scorer": scorer}}
        )
    )
    error = ERROR.format(function=function) if function else "{kind: relative_gaussian, scale: 0.05}"
    arm = f"arms: {{mine: {{description: mine, model: base, operator_noise: {{error: {error}}}}}}}\n"
    (folder / "arms.yaml").write_text(arm)
    return folder / "study.yaml"


def foreign(case, tmp_path, monkeypatch):
    """Return a study with code from elsewhere, and the folders in which its module would leave a trace."""
    here, sent = tmp_path / "here", tmp_path / "sent"
    installed = {"installed": tmp_path / "lib", "installed_here": here / "env" / "site-packages"}.get(case)
    for folder in (here, sent / "code", *([installed] if installed else [])):
        folder.mkdir(parents=True, exist_ok=True)
    module = f"brought_{case}"
    place = {"sent": sent, "sent_in_a_folder": sent / "code"}.get(case, installed or here)
    (place / f"{module}.py").write_text(MODULE)
    if installed:
        monkeypatch.syspath_prepend(installed)
    monkeypatch.chdir(here)
    if case == "python":
        return write_study(here, scorer="ctypes.util:find_library"), place
    if case == "arms":
        write_study(sent, function=f"../here/{module}:error")
        return write_study(here, arms="../sent/arms.yaml"), place
    if case == "study":
        return write_study(sent, scorer=f"{module}:scorer"), place
    name = f"code/{module}" if case == "sent_in_a_folder" else module
    return write_study(here if installed else sent, function=f"{name}:error"), place


@pytest.mark.parametrize("case", FOREIGN)
@pytest.mark.parametrize("command", ["check", "plan", "report", "workflow", "a job"])
def test_code_from_elsewhere_runs_only_if_the_user_says_so(case, command, tmp_path, monkeypatch, command_line):
    study, place = foreign(case, tmp_path, monkeypatch)
    expected = "would run with your rights, and .* is not of the working directory; expected --trust-code "
    if command == "a job":
        assert open_study([study], look_outside=False, trust_code=True)  # the main process has asked
    elif command == "workflow":
        for untrusted in ({}, {"trust_code": "false"}):
            with pytest.raises(ConfigError, match=expected):
                open_study([study], untrusted)
        assert open_study([study], {"trust_code": "true"}).study.arms
    else:
        done = command_line(command, study)
        assert done.returncode == 2
        assert re.search(expected, done.stderr), done.stderr
        assert done.stderr.count("\n") == 1
        assert not (place / "ran").exists()
        assert "would run with your rights" not in command_line(command, study, "--trust-code").stderr


@pytest.mark.parametrize("name", ["beside_{}", "inner/beside_{}"])
def test_code_of_the_working_directory_runs_without_a_flag(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = name.format(tmp_path.name)
    (tmp_path / "studies" / "inner").mkdir(parents=True)
    (tmp_path / "studies" / f"{module}.py").write_text(MODULE)
    study = write_study(tmp_path / "studies", function=f"{module}:error", scorer=f"{module}:scorer")
    assert open_study([study]).study.arms["mine"].operator_noise is not None
    assert (tmp_path / "studies" / module).with_name("ran").exists()


@pytest.mark.parametrize("value", ["maybe", "1", "/sent"])
def test_trust_is_true_or_false_and_no_key_of_a_study(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    study = write_study(tmp_path)
    with pytest.raises(ConfigError, match=r"--config: trust_code: found .*, expected true or false"):
        open_study([study], {"trust_code": value})
    study.write_text(f"trust_code: true\n{study.read_text()}")
    with pytest.raises(ConfigError, match="trust_code: unknown key"):
        open_study([study])


def test_errors_of_arms_noises_and_tasks_from_elsewhere_are_asked_about(tmp_path, monkeypatch, command_line):
    study, place = foreign("sent", tmp_path, monkeypatch)
    task = study.parent / "data.yaml"
    task.write_text("dataset: {source: lm_eval, task: mine, include_path: ../sent}\n")
    noises = study.parent / "noises.yaml"
    noises.write_text(f"far: {{operator_noise: {{error: {ERROR.format(function='../sent/brought_sent:error')}}}}}\n")
    for command in (
        ("measure-noise", "tiny", "--arm", "mine", "--arms", study.parent / "arms.yaml"),
        ("robustness", "tiny", "--noises", noises),
        ("robustness", "tiny", "--data", task),
        ("sensitivity", "tiny", "--data", task),
    ):
        done = command_line(*command)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "would run with your rights" in done.stderr
    assert not (place / "ran").exists()
    trusted = command_line(
        "measure-noise", "tiny", "--arm", "mine", "--arms", study.parent / "arms.yaml", "--trust-code"
    )
    assert trusted.returncode == 0, trusted.stderr
    assert (place / "ran").exists()
