"""The jobs of a study that derive sigmas from its diagnoses."""

from pathlib import Path

import pytest
import yaml

from aqnpipe.config.dataset import HubDataset, LmEvalDataset, LocalDataset
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study, load_study_file, load_study_files

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def plan():
    return StudyPlan(load_study_file(Path("config/config.yaml")))


@pytest.fixture
def decide():
    return StudyPlan(load_study_file(Path("config/decide.yaml")))


def test_a_machine_without_faults_gets_the_strategies_of_the_faulty_ones(decide):
    strategies = ["published", "robust_first", "shuffled_layers"]
    assert decide.strategies("base", "target") == strategies
    assert decide.strategies("base", "device") == strategies


def test_a_faulty_machine_gets_only_its_own_strategies():
    plan = StudyPlan(load_study_file(Path("config/dead-zone.yaml")))
    assert plan.strategies("base", "dead_zone") == ["published", "robust_first", "shuffled_layers"]
    smoke = StudyPlan(load_study_file(Path("config/smoke.yaml")))
    assert {machine: smoke.strategies("base", machine) for machine in smoke.study.config.machines} == {
        machine: ["published"] for machine in smoke.study.config.machines
    }


def test_sigmas_by_damage_need_the_parity_of_their_machine_alone():
    plan = StudyPlan(load_study_file(Path("config/measured.yaml")))
    assert plan.strategies("base", "measured") == ["published", "damage_first"]
    assert plan.strategies("base", "device") == ["published"]
    assert plan.sigmas_parity_input("base", "measured", "published") == []
    (path,) = plan.sigmas_parity_input("base", "measured", "damage_first")
    assert path == plan.parity_file("base", "measured")
    assert plan.all_parities() == [("base", "measured", path)]
    assert plan.all_parity_files() == [path]


def test_a_machine_measured_elsewhere_needs_no_job_and_no_counterpart(tmp_path):
    machine = {"counterpart": None, "measured_in": f"{tmp_path}/{{model}}.json"}
    plan = StudyPlan(load_study_files([Path("config/measured.yaml")], {"machines": {"measured": machine}}))
    assert not any(plan.measured_by_kind().values())
    assert plan.all_parities() == [("base", "measured", f"{tmp_path}/base.json")]
    assert plan.training_parity_input("base", "E_measured_1x") == [f"{tmp_path}/base.json"]
    assert plan.sigmas_parity_input("base", "measured", "damage_first") == [f"{tmp_path}/base.json"]


def test_parities_named_as_files_are_among_those_of_the_study(tmp_path):
    there = tmp_path / "there.json"
    there.write_text("{}")
    noise = {"operator_noise": {"error": {"kind": "measured", "from": str(there)}}}
    plan = StudyPlan(load_study_files([Path("config/config.yaml")], {"evaluation": {"noises": {"there": noise}}}))
    assert ("base", str(there), str(there)) in plan.all_parities()
    assert str(there) in plan.all_parity_files()


def test_the_guided_arm_differs_from_uniform_aqn_in_the_sigmas_alone(decide):
    guided, uniform = (decide.study.arms[name] for name in ("guided_robust_first", "E5b"))
    assert guided.aqn.layer_sigmas_strategy == "robust_first"
    assert (
        guided.aqn.model_copy(update={"layer_sigmas_from": None, "layer_sigmas_strategy": "published"}) == uniform.aqn
    )
    assert guided.operator_noise == uniform.operator_noise


def test_an_arm_that_is_added_repeats_no_training_of_others(plan):
    for name, arm in plan.study.arms.items():
        alone = StudyPlan(plan.study.model_copy(update={"arms": {name: arm}}))
        assert alone.training_spec(name, 0) == plan.training_spec(name, 0)


def with_settings(plan, **changes):
    config = plan.study.config.model_copy(update=changes)
    return StudyPlan(plan.study.model_copy(update={"config": config}))


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        (LocalDataset(source="local", path="folder"), ["folder/test.jsonl"]),
        (LocalDataset(source="local", path="folder/test.jsonl"), ["folder/test.jsonl"]),
        (LmEvalDataset(source="lm_eval", task="mine", include_path="tasks"), ["tasks/mine.yaml", "tasks/utils.py"]),
        (LmEvalDataset(source="lm_eval", task="arc_easy"), []),
        (HubDataset(source="hub"), []),
    ],
)
def test_the_users_files_behind_a_split_are_those_that_make_it(plan, monkeypatch, tmp_path, dataset, expected):
    """Not what an editor or Python leaves beside them, which would repeat the study."""
    monkeypatch.chdir(tmp_path)
    for name in ("folder/train.jsonl", "folder/test.jsonl", "tasks/mine.yaml", "tasks/utils.py", "tasks/.mine.swp"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tasks" / "__pycache__").mkdir()
    (tmp_path / "tasks" / "__pycache__" / "utils.pyc").touch()
    assert with_settings(plan, dataset=dataset).dataset_files("test") == expected


def test_a_built_in_model_is_known_by_its_recipe_and_a_folder_by_its_files(plan, monkeypatch, tmp_path):
    assert plan.model_files("base") == []
    assert '"' in plan.model_recipe("base")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    for name in ("config.json", "model.safetensors", ".gitattributes"):
        (tmp_path / "mine" / name).touch()
    base = plan.study.config.models["base"].model_copy(update={"source": "./mine"})
    own = with_settings(plan, models={"base": base})
    assert own.model_files("base") == ["mine/config.json", "mine/model.safetensors"]
    assert own.model_recipe("base") == ""


@pytest.mark.parametrize(
    ("attention", "generation", "expected"),
    [
        ("sdpa", {}, "transformers"),
        ("sdpa", {"rollout_backend": "auto"}, "transformers"),
        ("sdpa", {"backend": "transformers"}, None),
        # Without sdpa `auto` is transformers for every arm.
        ("eager", {}, None),
    ],
)
def test_one_backend_draws_the_rollouts_of_all_arms(attention, generation, expected):
    """vLLM does not compute measured errors; comparisons of arms with different backends would be invalid."""
    content = yaml.safe_load(Path("config/measured.yaml").read_text())
    content |= {"arms_file": "config/arms.yaml", "generation": generation}
    content["models"]["base"]["attention"] = attention
    plan = StudyPlan(load_study(content, "measured.yaml"))
    found = {plan.training_spec(arm, 0)["generation"]["rollout_backend"] for arm in plan.study.arms}
    assert found == {expected}


def smoke(**changes):
    return StudyPlan(load_study_files([Path("config/smoke.yaml")], changes))


def test_jobs_get_the_training_questions_only_where_prompts_have_examples():
    assert smoke().examples_input() == []
    plan = smoke(prompt={"layout": "question_answer", "num_examples": 5})
    assert plan.examples_input() == [f"{plan.results}/data/train.parquet"]


def test_jobs_get_scorer_and_sampling():
    sampling = {"temperature": 0.7, "num_samples": 8}
    plan = smoke(evaluation={"primary_scorer": "harness_strict", "sampling": sampling})
    spec = plan.evaluation_spec(model="base", arm="baseline", seed="0", step="8")
    assert spec["evaluation"]["primary_scorer"] == "harness_strict"
    assert spec["evaluation"]["sampling"] == {"temperature": 0.7, "num_samples": 8, "seed": 0}
