"""Checkpoints: what a run writes, that a load computes what the trainer computed, and that any other one is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_training import (
    AQN,
    NOISE,
    run,
    teach,
    training_spec,
    write_builtin_inputs,
    write_inputs,
)
from two_workers import logs, run_together

import aqnpipe.models.adapters as adapters
import aqnpipe.training.rollout_backend as rollout_backend
from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.device import Device
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.models.adapters import adapted_modules
from aqnpipe.models.loading import describe_model, load_model, prepare_model
from aqnpipe.models.prepared import (
    ADAPTERS_FILE,
    HEADER_KEY,
    read_adapters_header,
    read_prepared_model,
    write_prepared_model,
)
from aqnpipe.models.verification import refuse_other_weights
from aqnpipe.training.policy import CheckpointWriter

LORA = {"rank": 4, "alpha": 8}
TOKENS = torch.arange(2, 50).view(3, 16)
BFLOAT16 = {"dtype": "bfloat16", "attention": "eager"}


def logits(model):
    """The logits of a forward pass in the model's own number format, without noise."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    with torch.no_grad():
        computed = model(TOKENS, use_cache=False).logits.clone()
    for module in training:
        module.training = True
    return computed


def make_runs(folder, make_model):
    """Train adapters and all weights in bfloat16 with noise and the learning rate of the 7B study, as in a study.

    `logits.pt` has the logits that the trainer's model computed when it wrote each checkpoint.
    """
    results, computed = folder / "results", {}
    (folder / "inputs").mkdir()
    inputs = write_inputs(folder / "inputs", make_model)
    shutil.copytree(inputs.model, results / "models" / "base")
    written = CheckpointWriter.write

    def spied(self, model, folder, name):
        computed["whole" if self.spec.training.lora is None else "adapted", folder.name] = logits(model)
        written(self, model, folder, name)

    with pytest.MonkeyPatch.context() as patched:
        teach(patched)
        patched.setattr(CheckpointWriter, "write", spied)
        for name, lora in (("adapted", LORA), ("whole", None)):
            spec = training_spec(NOISE, AQN, dtype="bfloat16", lora=lora, learning_rate=1e-6)
            run(spec, inputs, results / "runs" / name)
    torch.save(computed, folder / "logits.pt")


@pytest.fixture(scope="module")
def made(made_once, make_model):
    """The two runs in a results folder, and the logits of the trainer's model at each checkpoint."""
    folder = made_once("bfloat16 runs", lambda folder: make_runs(folder, make_model))
    return folder / "results", torch.load(folder / "logits.pt")


@pytest.fixture
def results(made, tmp_path):
    """A copy of the runs that may be changed."""
    shutil.copytree(made[0], tmp_path / "results")
    return tmp_path / "results"


def described_again(folder):
    """Make the digests in the record those of the files, as a consistent mistake would; the probe stays."""
    stored = read_prepared_model(folder)
    record = describe_model(folder, stored.source)
    write_prepared_model(folder, record.model_copy(update={"probe": stored.probe, "merge_loss": stored.merge_loss}))


@pytest.mark.parametrize("name", ["adapted", "whole"])
@pytest.mark.parametrize("step", [1, 2])
def test_a_checkpoint_computes_what_the_trainer_computed(made, name, step):
    results, computed = made
    folder = results / "runs" / name / "checkpoints" / f"step{step}"
    model = load_model(folder, **BFLOAT16)
    refuse_other_weights(model, folder, "bfloat16")
    trainers = computed[name, f"step{step}"]
    # The trainer of all weights holds them in float32, and computes in bfloat16 within autocast only.
    tolerance = 0.0 if name == "adapted" else 0.02 * float(trainers.abs().max())
    torch.testing.assert_close(logits(model).float(), trainers.float(), rtol=0, atol=tolerance)


def test_adapters_are_stored_without_their_base(made):
    results, _ = made
    adapted, whole = (results / "runs" / name / "checkpoints" / "step2" for name in ("adapted", "whole"))
    assert {path.name for path in adapted.iterdir()} == {
        path.name.replace("model.safetensors", ADAPTERS_FILE) for path in whole.iterdir()
    }
    assert read_adapters_header(adapted).base_weights_sha256 == sha256_of_file(
        results / "models" / "base" / "model.safetensors"
    )
    assert (adapted / "config.json").read_bytes() == (results / "models" / "base" / "config.json").read_bytes()
    assert read_prepared_model(adapted).weights_sha256 == sha256_of_file(adapted / ADAPTERS_FILE)


def test_the_run_records_what_merging_would_lose(made):
    results, _ = made
    losses = read_json(results / "runs" / "adapted" / "run.json", RunRecord).merge_losses
    assert losses.keys() == {"step1", "step2"}
    assert all(0.3 < loss <= 1.5 for loss in losses.values())
    assert read_json(results / "runs" / "whole" / "run.json", RunRecord).merge_losses == {}


def rewritten(folder, change, **settings):
    """Write the adapters of `folder` again, changed, with another header, and describe the folder again."""
    header = read_adapters_header(folder).model_copy(update=settings)
    tensors = {name: change(tensor) for name, tensor in load_file(folder / ADAPTERS_FILE).items()}
    save_file(tensors, folder / ADAPTERS_FILE, metadata={HEADER_KEY: header.model_dump_json()})
    described_again(folder)


def _other_alpha(results, folder):
    rewritten(folder, lambda tensor: tensor, alpha=4.0)


def _of_the_step_before(results, folder):
    shutil.copy(folder.with_name("step1") / ADAPTERS_FILE, folder / ADAPTERS_FILE)
    described_again(folder)


def _rounded(results, folder):
    rewritten(folder, lambda tensor: tensor.bfloat16().float())


def _other_base(results, folder):
    base = results / "models" / "base"
    weights = load_file(base / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"] *= 1.01
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    described_again(base)
    rewritten(folder, lambda tensor: tensor, base_weights_sha256=sha256_of_file(base / "model.safetensors"))


def _other_rope(results, folder):
    for place in (results / "models" / "base", folder):
        config = json.loads((place / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] *= 2
        (place / "config.json").write_text(json.dumps(config))
        described_again(place)


def _base_with_another_digest(results, folder):
    base = results / "models" / "base"
    weights = load_file(base / "model.safetensors")
    save_file(weights, base / "model.safetensors", metadata={"written": "again"})
    described_again(base)


def _no_base(results, folder):
    shutil.rmtree(results / "models")


def _flipped_bit_in_the_base(results, folder):
    path = results / "models" / "base" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_other_alpha, r"adapters scaled: those of \w+ have 0.5 times the effect that they had in training"),
        (_of_the_step_before, "have another effect than in training: of another step, run or base"),
        (_rounded, "have another effect than in training"),
        (_other_base, "another effect than in training: of another step, run or base"),
        (_other_rope, "have another effect than in training"),
        (_base_with_another_digest, r"adapters only, trained on 'made/up' with weights .* and no prepared model with"),
        (_no_base, "no folder models above it contains one"),
        (_flipped_bit_in_the_base, "its weights files changed after they were written"),
    ],
)
def test_adapters_that_are_not_the_trainers_are_refused(results, change, problem):
    folder = results / "runs" / "adapted" / "checkpoints" / "step2"
    change(results, folder)
    with pytest.raises(ModelError, match=problem) as refused:
        load_model(folder, **BFLOAT16)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_adapters_that_a_loader_does_not_apply_are_refused(made, monkeypatch):
    folder = made[0] / "runs" / "adapted" / "checkpoints" / "step2"
    monkeypatch.setattr(adapters, "load_adapters", lambda model, folder: None)
    with pytest.raises(ModelError, match=r"adapters not applied to down_proj \(switched off, removed or merged"):
        load_model(folder, **BFLOAT16)


def test_adapters_merged_or_switched_off_after_loading_are_refused(made):
    folder = made[0] / "runs" / "adapted" / "checkpoints" / "step2"
    model = load_model(folder, **BFLOAT16)
    for module in adapted_modules(model).values():
        module.enable_adapters(False)
    with pytest.raises(ModelError, match="adapters not applied to down_proj"):
        refuse_other_weights(model, folder, "bfloat16")
    model = load_model(folder, **BFLOAT16)
    for module in adapted_modules(model).values():
        module.merge()
    with pytest.raises(ModelError, match=r"not applied|in memory is not the weight of this checkpoint"):
        refuse_other_weights(model, folder, "bfloat16")


def _scaled_weights(results, folder):
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.o_proj.weight"] *= 1.01
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    described_again(folder)


def _weights_of_the_start(results, folder):
    start = load_file(results / "models" / "base" / "model.safetensors")
    noisy = {name: tensor * (1 + 1e-3 * torch.randn(tensor.shape)) for name, tensor in start.items()}
    save_file(noisy, folder / "model.safetensors", metadata={"format": "pt"})
    described_again(folder)


@pytest.mark.parametrize("change", [_scaled_weights, _weights_of_the_start, _other_rope])
def test_whole_weights_that_compute_something_else_are_refused(results, change):
    folder = results / "runs" / "whole" / "checkpoints" / "step2"
    load_model(folder, **BFLOAT16)
    change(results, folder)
    with pytest.raises(ModelError, match="it does not compute what the trainer's model computed: logits of fixed"):
        load_model(folder, **BFLOAT16)


def test_adapters_are_no_model_to_prepare_or_to_train(made, tmp_path):
    from aqnpipe.config.model import ModelConfig
    from aqnpipe.training.policy import load_policy

    folder = made[0] / "runs" / "adapted" / "checkpoints" / "step2"
    with pytest.raises(ModelError, match="holds only the adapters of another model, expected a whole model"):
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "prepared")
    with pytest.raises(ModelError, match="a checkpoint of adapters, expected a whole model to train"):
        load_policy(training_spec(lora=LORA), folder)


def test_a_run_for_vllm_ends_at_the_checkpoint_that_would_lose_its_update(inputs, tmp_path, monkeypatch):
    teach(monkeypatch)
    monkeypatch.setattr("aqnpipe.training.run.merges_adapters", lambda spec: True)
    spec = training_spec(NOISE, AQN, dtype="bfloat16", lora=LORA, learning_rate=1e-6, num_steps=1)
    with pytest.raises(ReceiptError, match=r"vLLM needs the adapters merged, and in bfloat16 weights \d+% of their"):
        run(spec, inputs, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    exact = training_spec(NOISE, AQN, dtype="float32", lora=LORA, learning_rate=1e-3, num_steps=1)
    losses = read_json(run(exact, inputs, tmp_path / "exact") / "run.json", RunRecord).merge_losses
    assert 0 < losses["step1"] < 0.05


@pytest.mark.parametrize(
    ("lora", "generation", "installed", "expected"),
    [
        (LORA, {}, True, True),
        (LORA, {"backend": "transformers"}, True, False),
        (LORA, {"rollout_backend": "transformers"}, True, True),
        (LORA, {}, False, False),
        (None, {}, True, False),
    ],
)
def test_adapters_are_merged_where_vllm_rolls_out_or_evaluates(monkeypatch, lora, generation, installed, expected):
    monkeypatch.setattr(rollout_backend, "resolve_device", lambda _: Device("cuda", 1, ("some GPU",)))
    monkeypatch.setattr("aqnpipe.generation.backend_choice.is_vllm_installed", lambda: installed)
    data = training_spec(lora=lora).model_dump() | {"attention": "sdpa", "generation": generation}
    assert rollout_backend.merges_adapters(training_spec(lora=lora).model_validate(data)) == expected


@pytest.mark.slow
def test_a_checkpoint_between_steps_of_two_workers_changes_nothing(tmp_path):
    """The probe computes on the first worker alone, with other copies of the weights: the workers stay in step."""
    inputs = write_builtin_inputs(tmp_path)
    shutil.copytree(inputs.model, tmp_path / "models" / "base")
    settings = {"dtype": "bfloat16", "lora": LORA, "learning_rate": 1e-4, "micro_batch_size": 2, "num_steps": 3}
    spec = training_spec(NOISE, num_workers=2, **settings)

    def job(every):
        training = spec.training.model_copy(update={"checkpoint_every": every, "max_response_tokens": 24})
        changed = spec.model_copy(update={"training": training}).model_dump(mode="json")
        folder = str(tmp_path / f"every{every}")
        return {"kind": "train", "folder": folder, "inputs": str(tmp_path), "spec": changed, "teach": False}

    assert run_together([job(1), job(3)], tmp_path / "workers") == [0, 0], logs(tmp_path / "workers")
    written = [tmp_path / f"every{every}" / "run" / "checkpoints" / "step3" for every in (1, 3)]
    for folder in written:
        load_model(folder, **BFLOAT16)
    first, second = (sha256_of_file(folder / ADAPTERS_FILE) for folder in written)
    assert first == second
