"""Memory of a training device, compared with hand calculations for Qwen2.5's published shapes."""

from pathlib import Path

import pytest
import yaml
from typed import typed

from aqnpipe.cli.memory_estimate import declared_megabytes, evaluation_memory, memory_per_device, training_memory
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
SMALL, LARGE = 1_543_714_304, 7_615_616_512


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def plan(name, generation=None, **training):
    study = yaml.safe_load(Path(f"config/{name}.yaml").read_text())
    by_rows = {"tokens_per_micro_batch": None} if "micro_batch_size" in training else {}
    study["training"].update(by_rows | training)
    study.update(generation=generation or {"backend": "transformers"}, arms_file="config/arms.yaml")
    return StudyPlan(load_study(study, f"config/{name}.yaml"))


def found(name, role, **training):
    return memory_per_device(plan(name, **training), role, 80e9, 150)


def test_data_parallelism_has_everything_on_every_device():
    """Weights, gradients, two moments and the buckets of DDP, 4 bytes each; the reference in float32."""
    memory = found("qwen2.5-1.5b", "base", micro_batch_size=4)
    assert memory.trained == pytest.approx(SMALL * 4 * 5, rel=1e-3)
    assert memory.reference == pytest.approx(SMALL * 4, rel=1e-3)
    # 4 rows of 1,025 logits over 151,936 tokens: four copies in float32, two in bfloat16.
    logits = 4 * 1025 * 151936 * (4 * 4 + 2 * 2)
    # 28 layers keep 4 rows x 1,174 tokens x 1,536 channels in float32.
    kept = 28 * 4 * 1174 * 1536 * 4
    assert logits + kept < memory.passes < logits + kept + 1.5e9
    # 80 sequences of 1,174 tokens: keys and values of 2 heads x 128 in 28 layers.
    assert found("qwen2.5-1.5b", "base").generating == pytest.approx(80 * 1174 * 28 * 2 * 2 * 128 * 2)
    assert memory.engine == 0


def test_a_micro_batch_by_tokens_takes_what_its_longest_sequences_take():
    by_tokens = found("qwen2.5-1.5b", "base", tokens_per_micro_batch=4 * 1174)
    assert by_tokens == found("qwen2.5-1.5b", "base", micro_batch_size=4)


def test_shares_divide_what_is_always_there_and_gather_all_weights_for_rollouts():
    memory = found("qwen2.5-7b", "large", lora=None, parallelism="fsdp")
    assert memory.trained == pytest.approx(LARGE * 4 * 4 / 8, rel=1e-3)
    assert memory.reference == pytest.approx(LARGE * 4 / 8, rel=1e-3)
    assert memory.generating > LARGE * 4 * 7 / 8
    # Validation: keys and values of 1,319 / 8 sequences of 662 tokens, 4 heads x 128, in 28 layers.
    cache = 165 * 662 * 28 * 2 * 4 * 128 * 2
    assert memory.validating == pytest.approx(LARGE * 4 * 7 / 8 + cache, rel=1e-3)
    assert memory.total == pytest.approx(LARGE * 4 * (5 + 7) / 8 + cache + 2.5e9, rel=1e-3)
    assert found("qwen2.5-7b", "large", lora=None, parallelism="data").total > 180e9


def test_weights_go_to_an_engine_one_by_one():
    """The largest is the embedding, in bfloat16: rounded, gathered, copied, and in a buffer; else half of it."""
    engine = {"backend": "vllm", "rollout_gpu_memory_utilization": 0.25}
    embedding = 152064 * 3584
    shared = memory_per_device(plan("qwen2.5-7b", engine), "large", 80e9, 150)
    assert shared.generating == pytest.approx(embedding * 2 * 4)
    assert shared.engine == 20e9
    # Validations are by transformers, with all weights gathered beside the engine.
    assert shared.validating > LARGE * 4 * 7 / 8
    assert shared.total == pytest.approx(found("qwen2.5-7b", "large").total + 20e9)
    adapted = plan("qwen2.5-7b", engine, lora={"rank": 64, "alpha": 64}, parallelism="data")
    assert memory_per_device(adapted, "large", 80e9, 150).generating == pytest.approx(embedding * 2 * 2)


def test_an_engine_that_cannot_hold_the_weights_is_refused():
    """Weights in bfloat16, and keys and values of 662 tokens; vLLM itself would end only after its start."""
    lora = {"lora": {"rank": 64, "alpha": 64}, "parallelism": "data"}
    fits = plan("qwen2.5-7b", {"backend": "vllm", "rollout_gpu_memory_utilization": 0.2}, **lora)
    memory = memory_per_device(fits, "large", 80e9, 150)
    assert memory.engine_needs == pytest.approx(LARGE * 2 + 662 * 28 * 2 * 4 * 128 * 2, rel=1e-3)
    assert memory.engine == 16e9
    assert training_memory(fits, "an A100 80 GB", 80, 150)
    study = plan("qwen2.5-7b", {"backend": "vllm", "rollout_gpu_memory_utilization": 0.15}, **lora)
    expected = r"rollout_gpu_memory_utilization: vLLM gets 12 GB of 80, .* take 15\.3 GB; expected at least 0\.2$"
    with pytest.raises(ConfigError, match=expected):
        training_memory(study, "an A100 80 GB", 80, 150)


def test_an_engine_that_takes_too_much_is_named_with_its_setting():
    """The 7B study needs 55 GB without vLLM: 80 GB leave it 0.3, which holds the weights."""
    study = plan("qwen2.5-7b", {"backend": "vllm", "rollout_gpu_memory_utilization": 0.35})
    rest = memory_per_device(study, "large", 80e9, 150).total - 0.35 * 80e9
    share = int((1 - rest / 80e9) * 100) / 100
    assert 0.25 <= share < 0.35
    with pytest.raises(ConfigError, match=r"vLLM 28 GB, less with a smaller generation\.rollout_gpu_memory"):
        training_memory(study, "an A100 80 GB", 80, 150)
    fits = plan("qwen2.5-7b", {"backend": "vllm", "rollout_gpu_memory_utilization": share})
    assert training_memory(fits, "an A100 80 GB", 80, 150)


def test_adapters_have_gradients_of_their_own_and_no_reference():
    memory = found("qwen2.5-7b", "large", lora={"rank": 64, "alpha": 64}, parallelism="data")
    # 161.5 million adapter weights in float32, four values each.
    assert memory.trained == pytest.approx(LARGE * 2 + 161.5e6 * 16, rel=1e-3)
    assert memory.reference == 0


def test_a_model_that_cannot_fit_is_refused_with_what_would_help():
    study = plan("qwen2.5-7b", lora=None, parallelism="data")
    with pytest.raises(ConfigError, match=r"models\.large: training needs about 192 GB on each device, an A100 80 GB"):
        training_memory(study, "an A100 80 GB", 80, 150)
    with pytest.raises(ConfigError, match=r"less with training\.parallelism: fsdp with more training\.num_workers"):
        training_memory(study, "an A100 80 GB", 80, 150)
    assert training_memory(study, "a device", 200, 150)[0].startswith("training large 192 GB of 200")


@pytest.mark.parametrize(
    ("options", "fits"),
    [((), True), (("--memory", "40"), False), (("--memory", "192"), True), (("--prompt-tokens", "60000"), False)],
)
def test_the_command_refuses_a_study_that_cannot_fit(options, fits):
    done = typed("check", "config/qwen2.5-1.5b.yaml", *options)
    assert (done.exit_code == 0) is fits
    assert isinstance(done.exception, ConfigError) is not fits


def test_examples_in_the_prompt_count(tmp_path):
    study = yaml.safe_load(Path("config/qwen2.5-1.5b.yaml").read_text())
    study.update(arms_file=str(ROOT / "config" / "arms.yaml"), prompt=study["prompt"] | {"num_examples": 8})
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    shown = typed("check", str(tmp_path / "study.yaml")).stdout
    # 8 examples of 180 tokens beside a prompt of 150.
    assert "GB of 64; assumed: prompts of 1590 tokens (--prompt-tokens)" in shown


def test_a_model_of_unknown_shape_is_named():
    study = plan("qwen2.5-1.5b")
    models = {"base": study.study.config.models["base"].model_copy(update={"source": "owner/unknown"})}
    config = study.study.config.model_copy(update={"models": models})
    (line,) = training_memory(StudyPlan(study.study.model_copy(update={"config": config})), "a device", 80, 150)
    assert "training base not estimated, its shape is unknown" in line


def test_a_study_on_a_cpu_has_no_line_on_memory():
    assert "memory of" not in typed("check", "config/smoke.yaml").stdout


def test_the_parts_of_what_does_not_fit_are_named_with_what_lessens_them():
    """Without an engine vLLM has no part."""
    with pytest.raises(ConfigError) as refused:
        training_memory(plan("qwen2.5-1.5b", micro_batch_size=20), "a device", 80, 150)
    said = str(refused.value)
    assert "trained weights, gradients, moments 30.9 GB, less with training.parallelism: fsdp" in said
    assert "less with training.gradient_checkpointing, fewer training.micro_batch_size" in said
    assert "less with fewer training.validation_questions" in said
    assert "vLLM" not in said
    assert training_memory(plan("qwen2.5-1.5b", micro_batch_size=4), "a device", 80, 150)


def test_a_model_of_unknown_shape_needs_its_weights_gradients_and_moments():
    """5 values of 4 bytes for each of 72.7 billion parameters on 8 devices are 182 GB; of 3 billion they are 7.5 GB."""
    sources = {"source": "owner/unknown", "dtype": "bfloat16", "attention": "sdpa"}
    study = with_models(plan("qwen2.5-1.5b", parallelism="fsdp"), {"base": sources})
    with pytest.raises(ConfigError, match=r"models\.base: training needs more than 182 GB .* expected less .training"):
        training_memory(study, "a device", 80, 150, {"base": 72.7e9})
    (line,) = training_memory(study, "a device", 80, 150, {"base": 3e9})
    assert line.endswith("its shape is unknown, more than 8 GB of 80")
    # Data parallelism: weights, gradients, both moments, the buckets and the reference, 24 bytes for each parameter.
    shared = with_models(plan("qwen2.5-1.5b"), {"base": sources})
    assert training_memory(shared, "a device", 80, 150, {"base": 3.3e9})[0].endswith("more than 80 GB of 80")
    with pytest.raises(ConfigError, match="needs more than 82 GB"):
        training_memory(shared, "a device", 80, 150, {"base": 3.4e9})
    adapted = with_models(plan("qwen2.5-1.5b", lora={"rank": 8, "alpha": 8}), {"base": sources})
    assert training_memory(adapted, "a device", 80, 150, {"base": 3e9})[0].endswith("more than 6 GB of 80")


def with_models(study, models):
    config = study.study.config
    models = {role: config.models[role].model_copy(update=given) for role, given in models.items()}
    return StudyPlan(study.study.model_copy(update={"config": config.model_copy(update={"models": models})}))


def test_an_evaluation_whose_weights_do_not_fit_is_refused():
    """7.6 billion weights in bfloat16 are 15.2 GB; the context of torch takes 2.5."""
    by_transformers = plan("qwen2.5-7b")
    assert evaluation_memory(by_transformers, "a device", 80, 150) == ["evaluating large 17.7 GB of 80"]
    assert evaluation_memory(by_transformers, "a device", 18, 150)
    with pytest.raises(
        ConfigError, match=r"evaluation of large: its weights take 17\.7 GB on each device, a device has 16"
    ):
        evaluation_memory(by_transformers, "a device", 16, 150)
    on_vllm = plan("qwen2.5-7b", {"backend": "vllm", "gpu_memory_utilization": 0.1})
    with pytest.raises(
        ConfigError, match=r"vLLM gets 8 GB of 80; expected generation\.gpu_memory_utilization: 0\.2 or"
    ):
        evaluation_memory(on_vllm, "a device", 80, 150)
    shared = plan("qwen2.5-7b", {"backend": "vllm", "gpu_memory_utilization": 0.1, "tensor_parallel": 2})
    assert evaluation_memory(shared, "a device", 80, 150)[0].startswith("evaluating large 7.6")


def test_given_checkpoints_that_no_device_can_hold_are_refused():
    command = ["check", "config/formats-qwen2.5.yaml"]
    assert "memory of a device: evaluating " in typed(*command).stdout
    refused = typed(*command, "--memory", "10")
    assert isinstance(refused.exception, ConfigError)
    assert "evaluation of" in str(refused.exception)


def on_cpu(results, **training):
    study = yaml.safe_load(Path("config/smoke.yaml").read_text())
    study["training"].update(training)
    study.update(device="cpu", arms_file="config/arms.yaml", results_dir=str(results))
    return StudyPlan(load_study(study, "config/smoke.yaml"))


def record(results, rule, *peaks):
    folder = Path(results) / "benchmarks" / rule
    folder.mkdir(parents=True, exist_ok=True)
    for number, peak in enumerate(peaks):
        (folder / f"{number}.tsv").write_text(f"s\tmax_rss\tcpu_time\n12.00\t{peak}\t34.00\n")


def test_a_rule_declares_the_largest_recorded_peak_and_a_quarter_more(tmp_path):
    plan = on_cpu(tmp_path)
    record(tmp_path, "train", 1000.0, 1200.0, 900.0)
    assert declared_megabytes(plan, "train") == 1500
    record(tmp_path, "evaluate", 800.0)
    assert declared_megabytes(plan, "evaluate") == 1000
    assert declared_megabytes(plan, "train") == 1500


def test_costs_that_a_killed_job_left_do_not_count(tmp_path):
    plan = on_cpu(tmp_path)
    estimated = declared_megabytes(plan, "train")
    record(tmp_path, "train", "")
    (tmp_path / "benchmarks" / "train" / "cut.tsv").write_bytes(b"s\tmax_r\xff")
    assert declared_megabytes(plan, "train") == estimated


def test_before_the_first_job_a_rule_declares_an_estimate_that_grows_with_workers_and_models(tmp_path):
    """FSDP on the tiny study peaked at 4,737 MB, one worker at 1,194 MB."""
    one, two = on_cpu(tmp_path), on_cpu(tmp_path, num_workers=2, parallelism="fsdp", micro_batch_size=8)
    assert declared_megabytes(one, "train") > 1.25 * 1194
    assert declared_megabytes(two, "train") > 1.25 * 4737
    assert declared_megabytes(two, "evaluate") == declared_megabytes(one, "evaluate") == 3131
    on_devices = declared_megabytes(plan("qwen2.5-1.5b"), "train")
    assert on_devices == pytest.approx(1.25 * 8 * (2500 + 2 * SMALL * 2 / 1e6), rel=1e-3)
