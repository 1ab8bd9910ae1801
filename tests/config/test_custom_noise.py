"""Error models and schedules of a user's own in a study: their names, sources and digests, and what is refused."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.arm import Arm
from aqnpipe.config.custom_code import CustomError, source_digest
from aqnpipe.config.evaluation import EvaluationConfig
from aqnpipe.config.generation import why_vllm_cannot_roll_out
from aqnpipe.config.noise import AdaptiveNoise, ModuleNoise, OperatorNoise
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study_file, read_arms
from aqnpipe.config.yaml_file import validated
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
CODE = "def error(values, normals): return values\ndef sigma(step, num_steps, num_epochs): return 0.1\n"


@pytest.fixture
def module(own_module):
    return own_module(CODE)


def error_of(function, **given):
    return validated(CustomError, {"function": function, "size": 0.05, **given}, "arms.yaml")


def own_arm(module, **noise):
    error = error_of(f"{module}:error")
    given = {"module_noise": ModuleNoise(modules="mlp", error=error), **noise}
    return Arm(description="", operator_noise=OperatorNoise(error=error, attention="fused"), **given)


def test_vllm_draws_no_rollouts_with_it_and_no_evaluations():
    assert "operator_noise.error is own in the rollout" in why_vllm_cannot_roll_out(own_arm("a"))
    modules_alone = own_arm("a").model_copy(update={"operator_noise": None})
    assert "module_noise.error is own in the rollout" in why_vllm_cannot_roll_out(modules_alone)
    for key in ("operator_noise", "module_noise"):
        settings = {"error": {"kind": "own", "function": "a:b", "size": 1}}
        noise = {key: settings | ({"modules": "mlp"} if key == "module_noise" else {})}
        assert not EvaluationConfig(noises={"own": noise}, max_response_tokens=1, batch_size=1).fits_vllm


def test_an_error_with_draws_is_evaluated_with_every_noise_seed():
    def passes(draws):
        error = {"kind": "own", "function": "a:b", "size": 1, "draws": draws}
        noises = {"own": {"operator_noise": {"error": error}}}
        given = {"noise_levels": [0.0], "noise_seeds": [0, 1], "max_response_tokens": 1, "batch_size": 1}
        return EvaluationConfig(noises=noises, **given).passes()

    assert passes(1) == [(0.0, 0), (1.0, 0), (1.0, 1)]
    assert passes(0) == [(0.0, 0), (1.0, 0)]


# -- in a study --------------------------------------------------------------------------------------------------------


@pytest.fixture
def study(tmp_path, module):
    """Function (): a study in a folder, with the module beside its files; returns the file."""
    folder = tmp_path / "study"
    folder.mkdir()
    (tmp_path / f"{module}.py").rename(folder / f"{module}.py")
    error = {"kind": "own", "function": f"{module}:error", "size": 0.05}
    arm = {
        "description": "",
        "operator_noise": {"error": error},
        "module_noise": {"modules": "mlp", "error": error},
        "aqn": {"schedule": {"kind": "own", "function": f"{module}:sigma", "sigma_max": 0.1}},
    }
    content = yaml.safe_load((ROOT / "config" / "smoke.yaml").read_text())
    content.update(arms_file="arms.yaml", arms=["baseline", "own"])
    content["evaluation"]["noises"] = {"own": {"operator_noise": {"error": error}}}
    content["comparisons"][0].update(treatment="own")
    (folder / "arms.yaml").write_text(yaml.safe_dump({"arms": {"own": arm, "baseline": {"description": "none"}}}))
    (folder / "study.yaml").write_text(yaml.safe_dump(content))
    return folder / "study.yaml"


def test_modules_are_found_beside_the_files_that_name_them_and_jobs_have_their_digests(study, module):
    plan = StudyPlan(load_study_file(study))
    located = f"{study.parent}/{module}"
    digest = source_digest(f"{located}:error")
    arm = plan.training_spec("own", 0)["arm"]
    noises = plan.evaluation_spec(model="base", arm="own", seed="0", step="8")["evaluation"]["noises"]
    errors = [
        *(arm[key]["error"] for key in ("operator_noise", "module_noise")),
        noises["own"]["operator_noise"]["error"],
    ]
    assert {(error["function"], error["source_sha256"]) for error in errors} == {(f"{located}:error", digest)}
    assert arm["aqn"]["schedule"]["source_sha256"] == digest
    # Another source is another digest, so the jobs are made again.
    (study.parent / f"{module}.py").write_text(CODE + "\n# changed\n")
    assert StudyPlan(load_study_file(study)).training_spec("own", 0)["arm"] != arm


def test_arms_read_by_themselves_are_located_too(study, module):
    noise = read_arms(study.parent / "arms.yaml")["own"].operator_noise
    assert noise.error.function == f"{study.parent}/{module}:error"


def test_a_digest_in_the_study_must_be_that_of_the_source(study):
    noise = AdaptiveNoise(
        schedule=read_arms(study.parent / "arms.yaml")["own"].aqn.schedule.model_copy(
            update={"source_sha256": "0" * 64}
        )
    )
    with pytest.raises(ConfigError, match=r"source_sha256 is 0+, its source has"):
        Arm(description="", aqn=noise).planned()
