"""The cost estimate of a study, compared with hand calculations for a model of 100 parameters."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file
from typed import typed

from aqnpipe.cli.check import announcement, costs_of
from aqnpipe.cli.cost_estimate import A100, CPU_CORE, Assumptions, Rates, default_rates, estimate_study
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study, load_study_file
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
RATES = Rates(device="test", tflops=1e-9, training_utilization=0.5, generation_utilization=0.1)
GIVEN = Assumptions(prompt_tokens=10, response_tokens=5, parameters={"base": 100}, rates=RATES)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.fixture
def config():
    return yaml.safe_load(Path("config/smoke.yaml").read_text()) | {"arms_file": "config/arms.yaml"}


def plan_of(config) -> StudyPlan:
    return StudyPlan(load_study(config, "study.yaml"))


def costs(config, given=GIVEN):
    return estimate_study(plan_of(config), given).hours_by_phase


def test_every_phase_by_hand(config):
    found = costs(config)
    # 1e-9 TFLOP/s are 1,000 operations a second; half of them in training passes, a tenth in generation.
    training, generation = 500 * 3600, 100 * 3600
    # Two runs of 8 steps of 4 prompts x 4 rollouts, each 15 tokens long: 3,840 tokens, 2 x 100 operations each.
    # Validation of 10 questions after steps 4 and 8; five evaluations of 40 questions at two levels.
    assert found == pytest.approx(
        {
            "rollout": 200 * 3840 / generation,
            "reference": 200 * 3840 / training,
            "actor_forward": 200 * 3840 / training,
            "backward": 2 * 200 * 3840 / training,
            "validation": 200 * 2 * 2 * 10 * 15 / generation,
            "evaluation": 200 * 5 * 2 * 40 * 15 / generation,
        }
    )


def test_a_folder_whose_family_has_other_sizes_is_counted_from_its_weights(config, tmp_path):
    """A GPT-2 has no intermediate_size. Nine parameters: 2 x 9 operations per token."""
    (tmp_path / "config.json").write_text(json.dumps({"n_layer": 4, "n_embd": 3, "n_head": 1}))
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    config["models"]["base"]["source"] = str(tmp_path)
    found = costs(config, Assumptions(prompt_tokens=10, response_tokens=5, rates=RATES))
    assert found["reference"] == pytest.approx(2 * 9 * 3840 / 500 / 3600)


def test_decode_steps_of_transformers_take_the_host_by_hand(config):
    """Two runs, one noisy, of 8 rollouts with 24 decode steps each; a model whose shape is not known has 28 layers."""
    slow = RATES.model_copy(update={"host_seconds": 10.0, "noisy_host_seconds": 100.0})
    found = costs(config, GIVEN.model_copy(update={"rates": slow}))
    assert found["rollout"] == pytest.approx(8 * 24 * 28 * (10 + 100) / 3600)
    assert found["validation"] == pytest.approx(2 * 2 * 24 * 28 * 10 / 3600)
    # Five evaluations of one batch of 40 questions, clean and at 10 % noise.
    assert found["evaluation"] == pytest.approx(5 * 24 * 28 * (10 + 100) / 3600)
    # Training passes are not started token by token.
    assert found["reference"] == costs(config)["reference"]
    # The operations take longer than starting them.
    fast = GIVEN.model_copy(update={"rates": RATES.model_copy(update={"host_seconds": 1e-6})})
    assert costs(config, fast)["rollout"] == costs(config)["rollout"]
    config["arms"] = ["baseline"]
    del config["comparisons"]
    config["models"]["base"]["attention"] = "sdpa"
    config["generation"] = {"backend": "vllm"}
    found = costs(config, GIVEN.model_copy(update={"rates": slow}))
    assert found["evaluation"] == costs(config)["evaluation"]


def test_totals_and_disk_by_hand(config):
    estimate = estimate_study(plan_of(config), GIVEN)
    # Two checkpoints of each of two runs in float32; three resume points with weights and two moments.
    assert estimate.checkpoint_gigabytes == pytest.approx(2 * 2 * 100 * 4 / 1e9)
    assert estimate.run_gigabytes == pytest.approx(3 * 3 * 100 * 4 / 1e9)
    started = GIVEN.model_copy(update={"rates": RATES.model_copy(update={"seconds_per_job": 36.0})})
    extra = estimate_study(plan_of(config), started).device_hours - estimate.device_hours
    assert extra == pytest.approx((2 + 5) * 0.01)


def test_resume_points_are_named_with_how_often_they_are_written_and_how_long_they_take(config):
    def named():
        return [part for part in estimate_study(plan_of(config), GIVEN).not_counted if part.startswith("resume")]

    assert named() == ["resume points (at most 3% of a run's time; 1.2e-06 s each at 1 GB/s per worker)"]
    config["training"]["resume_every"] = 2
    assert named() == ["resume points (every 2 steps; 1.2e-06 s each at 1 GB/s per worker)"]
    config["training"]["lora"] = {"rank": 4, "alpha": 8}
    assert named() == []


def test_settings_that_cost_or_save_passes(config):
    plain = costs(config)["backward"]
    config["training"]["gradient_checkpointing"] = True
    assert costs(config)["backward"] == pytest.approx(1.5 * plain)
    config["training"]["lora"] = {"rank": 4, "alpha": 8}
    assert costs(config)["backward"] == plain
    adapted = estimate_study(plan_of(config), GIVEN)
    assert adapted.run_gigabytes == 0
    # The size of this model is given, its shape is not.
    assert adapted.checkpoint_gigabytes == 0
    config["training"].update(kl_coefficient=0.0, steps_per_rollout=2)
    found = costs(config)
    assert "reference" not in found
    assert found["old_policy"] == found["actor_forward"]


def test_what_is_not_given_is_counted_or_said_to_be_assumed(config):
    estimate = estimate_study(plan_of(config), Assumptions())
    assert estimate.rates == CPU_CORE
    assert re.fullmatch(r"prompts of \d\d tokens, responses at their limit \(--response-tokens\)", estimate.assumed)
    # The smallest model has 1,102,208 weights, in float32.
    assert estimate.model_gigabytes == pytest.approx(1_102_208 * 4 / 1e9)
    assert estimate.num_devices == len(os.sched_getaffinity(0))
    real = estimate_study(StudyPlan(load_study_file(Path("config/qwen2.5-7b.yaml"))), Assumptions())
    # Four arms and three seeds with two checkpoints of 7,616 million weights in float32.
    assert real.checkpoint_gigabytes == pytest.approx(4 * 3 * 2 * 30.46, rel=1e-3)
    assert real.rates == A100
    assert real.assumed.startswith("prompts of 150 tokens (--prompt-tokens), ")
    assert real.num_devices == 8


def test_disk_of_checkpoints_that_are_removed(config):
    config["training"]["checkpoint_every"], config["seeds"] = 1, [0, 1]
    kept = estimate_study(plan_of(config), GIVEN)
    config["keep"] = "last"
    plan = plan_of(config)
    num_steps, num_runs = len(plan.checkpoint_steps), len(plan.runs())
    last = estimate_study(plan, GIVEN)
    assert num_steps > 1
    assert last.checkpoint_gigabytes == pytest.approx(kept.checkpoint_gigabytes / num_steps)
    removed = kept.checkpoint_gigabytes / num_runs * (num_steps - 1) / num_steps
    assert last.run_gigabytes - kept.run_gigabytes == pytest.approx(removed)
    # Where seeds are added, nothing is removed before the last look.
    config["seeds"] = {"start": 2, "step": 2, "max": 4}
    added = estimate_study(plan_of(config), GIVEN)
    assert (added.checkpoint_gigabytes, added.run_gigabytes) == (kept.checkpoint_gigabytes, kept.run_gigabytes)


def test_samples_and_examples_cost_what_they_add(config):
    plain = costs(config)
    config["evaluation"]["sampling"] = {"temperature": 1.0, "num_samples": 4}
    assert costs(config)["evaluation"] == pytest.approx(4 * plain["evaluation"])
    assert costs(config)["rollout"] == plain["rollout"]
    config["dataset"] = {"source": "hub", "num_train": 32, "num_test": 10}
    config["prompt"] = {"layout": "question_answer", "num_examples": 5}
    source = estimate_study(plan_of(config), GIVEN.model_copy(update={"prompt_tokens": None})).assumed
    assert source.startswith("prompts of 1050 tokens (--prompt-tokens), ")


def test_generated_prompts_are_as_long_as_the_tokenizer_makes_them(config):
    from tiny_tokenizer import build_tokenizer

    from aqnpipe.data.loader import load_problems

    plan = plan_of(config)
    tokenizer = build_tokenizer()
    questions = load_problems(plan.study.config.dataset, "train")["question"]
    lengths = [len(tokenizer(question).input_ids) for question in questions]
    rates = RATES.model_copy(update={"generation_utilization": 1.0})
    given = Assumptions(response_tokens=5, parameters={"base": 100}, rates=rates)
    # 1,000 operations a second, 200 per token.
    tokens = estimate_study(plan, given).hours_by_phase["rollout"] * 3600 * 1000 / 200
    # The tokenizer also has a token for the space before a number, at most three numbers in a question of this study.
    counted = tokens / (2 * 8 * 16) - 5
    assert counted == pytest.approx(sum(lengths) / len(lengths), rel=0.2)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c["models"]["base"].update(source="some/model"), r"size of some/model .* --parameters base=N"),
        (lambda c: c.update(dataset={"source": "hub", "num_train": 16}), r"set dataset\.num_test"),
        (lambda c: c.update(device="npu"), r"--tflops PEAK"),
    ],
)
def test_what_has_to_be_stated_is_asked_for(config, edit, message):
    edit(config)
    plan = plan_of(config)
    with pytest.raises(ConfigError, match=message):
        estimate_study(plan, Assumptions())
    assert re.search(message, announcement(plan))


def test_rates_follow_the_device(config):
    assert default_rates(plan_of(config)) == CPU_CORE
    assert default_rates(plan_of({**config, "device": "cuda"})) == A100


def test_large_studies_are_announced_and_small_ones_not(config):
    assert announcement(plan_of(config)) is None
    line = announcement(StudyPlan(load_study_file(Path("config/qwen2.5-1.5b.yaml"))))
    assert re.match(r"estimated cost: [\d,.]+ A100 hours and [\d,.]+ GB of disk", line)


@pytest.mark.parametrize("study", ["smoke", "dead-zone", "qwen2.5-7b"])
def test_jobs_are_those_that_snakemake_plans(python, study):
    study_file = f"config/{study}.yaml"
    options = ("--dry-run", "--forceall", "--quiet", "rules", "--configfile", study_file)
    table = python.snakemake(ROOT, *options).stdout.split("Job stats:")[1]
    planned = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)}
    assert StudyPlan(load_study_file(Path(study_file))).jobs() == {
        name: count for name, count in planned.items() if name not in ("all", "total")
    }


def test_the_command_says_what_the_estimate_is_from_and_takes_other_rates(command_line):
    text = command_line("check", "config/qwen2.5-7b.yaml").stdout
    for part in ("jobs: ", "train 12", "at 35% and generation at 5% of 312 TFLOP/s"):
        assert part in text
    hours = float(re.search(r"^device hours: ([\d.]+) of A100; assumed: ", text, re.MULTILINE)[1])
    assert float(re.search(r"^time: ([\d.]+) h on 8 A100s", text, re.MULTILINE)[1]) == pytest.approx(
        hours / 8, rel=0.01
    )
    lines = [line.split(":")[0] for line in text.splitlines()]
    assert [lines.count(name) for name in ("time", "device hours", "disk", "memory of a device")] == [1, 1, 1, 1]
    options = ("--tflops", "624", "--response-tokens", "128", "--training-utilization", "0.5")
    text = command_line("check", "config/qwen2.5-7b.yaml", *options).stdout
    assert "training at 50% and generation at 5% of 624 TFLOP/s" in text
    assert "responses of 128 tokens" in text
    # By hand: 12 bytes of each of 7.6 billion weights, written by 8 workers at 1 GB/s.
    assert "resume points (at most 3% of a run's time; 11 s each at 1 GB/s per worker)" in text
    # Its rollouts are by vLLM; those of the smoke study are not.
    assert "weight syncs" in text
    assert "weight syncs" not in command_line("check", "config/smoke.yaml").stdout


def test_a_study_that_adds_seeds_has_the_cost_with_all_of_them_too():
    """Two seeds before the first interim analysis, at most ten: five times the runs, whose checkpoints stay."""
    plan = StudyPlan(load_study_file(Path("config/decide.yaml")))
    start, whole = costs_of(plan, Assumptions())
    assert whole == estimate_study(StudyPlan(plan.study.with_seeds(10)), Assumptions())
    assert whole.checkpoint_gigabytes == pytest.approx(5 * start.checkpoint_gigabytes)
    shown = typed("check", "config/decide.yaml").stdout
    assert f", at most {whole.device_hours:,.3g} if all seeds are added" in shown
    assert costs_of(StudyPlan(load_study_file(Path("config/config.yaml"))), Assumptions())[1] is None


def test_the_table_of_running_md_is_what_check_computes():
    """Runs, device hours, clock hours on 8 devices, checkpoints, working files; memory of a device by `check`."""
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", Path("RUNNING.md").read_text(), re.MULTILINE)
    assert len(rows) == 4
    for name, cells in rows:
        plan = StudyPlan(load_study_file(Path(f"config/{name}.yaml")))
        estimate = estimate_study(plan, Assumptions())
        shown = typed("check", f"config/{name}.yaml").stdout
        assert cells.split(" | ") == [
            f"{len(plan.runs())} x {plan.num_steps}",
            f"{estimate.device_hours:.0f}",
            f"{estimate.device_hours / 8:.0f} h",
            f"{estimate.checkpoint_gigabytes:.0f} GB",
            f"{estimate.run_gigabytes:.0f} GB",
            f"{re.search(r'training .+? (.+) GB of 80', shown)[1]} GB",
        ]


def test_very_many_arms_are_named_on_one_short_line(tmp_path):
    arms = {f"arm{number:04}": {"description": "clean"} for number in range(1000)}
    (tmp_path / "arms.yaml").write_text(yaml.safe_dump({"arms": arms}))
    study = yaml.safe_load(Path("config/smoke.yaml").read_text()) | {"arms": list(arms), "arms_file": "arms.yaml"}
    del study["comparisons"]
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    line = typed("check", f"{tmp_path}/study.yaml").stdout.splitlines()[0]
    assert "1000 runs (arm0000, arm0001, " in line
    assert "arm0019 and 980 more; seeds 0)" in line
    assert "arm0020" not in line


def test_a_wrong_size_is_one_line(command_line):
    result = command_line("check", "config/smoke.yaml", "--parameters", "large=3e9")
    assert result.returncode == 2
    assert result.stderr == "ERROR: --parameters 'large=3e9': unknown key 'large', expected base\n"
