"""A micro-batch that is computed twice changes nothing; a device that errs stops the run before the optimiser."""

import pytest
import torch
from erring_kernels import erring
from safetensors import safe_open
from safetensors.torch import load_file
from tiny_training import AQN, NOISE, run, training_spec
from torch import nn
from two_workers import logs, run_together

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.artifacts.training_facts import fact_problems
from aqnpipe.config.run import TrainingSpec
from aqnpipe.errors import VerificationError
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.seeding import derive_seed
from aqnpipe.training.trainer import NoisyGRPOTrainer
from aqnpipe.training.verification import digest

pytestmark = pytest.mark.usefixtures("rewards_that_teach")

LORA = {"rank": 2, "alpha": 4, "dropout": 0.1}
HIDDEN = {**AQN, "targets": "hidden_states", "actor_forward": True}
CACHED = {"type": "saturation", "layer": 1, "magnitude": 0.3, "threshold": "cached"}
RIGHT = {
    "plain": {},
    "noise and AQN": {"operator_noise": {**NOISE, "operators": "all"}, "aqn": AQN},
    "AQN on hidden states": {"operator_noise": NOISE, "aqn": HIDDEN},
    "checkpointing": {"operator_noise": NOISE, "gradient_checkpointing": True},
    "adapters with dropout": {"operator_noise": NOISE, "lora": LORA},
    "bfloat16": {"operator_noise": NOISE, "dtype": "bfloat16"},
    "float16": {"operator_noise": NOISE, "dtype": "float16"},
    "tokens": {"operator_noise": NOISE, "micro_batch_size": None, "tokens_per_micro_batch": 40},
    "mini-batches": {"steps_per_rollout": 2},
    "cached faults": {"faults": (CACHED,)},
}


def spec_of(*, faults=(), **settings) -> TrainingSpec:
    spec = training_spec(**settings)
    return TrainingSpec.model_validate({**spec.model_dump(), "faults": faults})


def files_of(folder):
    found = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return sha256_of_files({name: path for name, path in found.items() if name not in ("run.json", "receipt.json")})


def drawn_micro_batch(step, number=2):
    return derive_seed(0, "verified micro-batch", step) % number


@pytest.mark.parametrize("settings", RIGHT.values(), ids=RIGHT)
def test_a_verified_run_has_the_bytes_of_one_that_is_not(inputs, tmp_path, settings):
    plain = run(spec_of(**settings), inputs, tmp_path / "plain")
    verified = run(spec_of(**settings, verify={"every": 1}), inputs, tmp_path / "verified")
    assert files_of(plain) == files_of(verified)
    receipts = [read_json(folder / "receipt.json", Receipt) for folder in (plain, verified)]
    # The study asks for other algorithms in the verified micro-batch, which a CPU does not have.
    assert len({receipt.model_dump_json(exclude={"required"}) for receipt in receipts}) == 1
    assert [receipt.problems() for receipt in receipts] == [[], []]
    records = [read_json(folder / "run.json", RunRecord) for folder in (plain, verified)]
    assert [record.training.verified_steps for record in records] == [(), (1, 2)]


@pytest.mark.parametrize(("every", "steps"), [(1, (1, 2, 3)), (2, (2, 3)), (100, (3,))])
def test_every_nth_step_and_the_last_are_verified(inputs, tmp_path, every, steps):
    folder = run(training_spec(num_steps=3, checkpoint_every=3, verify={"every": every}), inputs, tmp_path / "run")
    assert read_json(folder / "run.json", RunRecord).training.verified_steps == steps


def test_a_run_without_the_steps_that_should_be_verified_is_found(inputs, tmp_path):
    spec = training_spec(verify={"every": 1})
    facts = read_json(run(spec, inputs, tmp_path / "run") / "run.json", RunRecord).training
    assert fact_problems(facts, spec) == []
    (problem,) = fact_problems(facts.model_copy(update={"verified_steps": (2,)}), spec)
    assert problem == "verified steps: found [2], the study asks for [1, 2]"


class Once:
    """Whether this call errs: the first one in one micro-batch of one step, in its rehearsal or after it."""

    def __init__(self, monkeypatch, step, micro_batch, *, rehearsal=False):
        self._wanted, self._left, self._here = (step, micro_batch, rehearsal), 1, None
        original = NoisyGRPOTrainer._learned_from

        def learned_from(trainer, model, batch, micro_step):
            self._here = (trainer.state.global_step + 1, micro_step, trainer.audit._is_rehearsal)
            try:
                return original(trainer, model, batch, micro_step)
            finally:
                self._here = None

        monkeypatch.setattr(NoisyGRPOTrainer, "_learned_from", learned_from)

    def __call__(self):
        is_now = self._here == self._wanted and self._left > 0
        self._left -= is_now
        return is_now


@pytest.fixture
def updates(monkeypatch):
    """Counts the optimiser's steps."""
    made = []
    original = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda self, *args, **kwargs: made.append(self) or original(self, *args, **kwargs)
    )
    return made


@pytest.mark.parametrize("rehearsal", [False, True], ids=["training", "rehearsal"])
@pytest.mark.parametrize(
    ("operator", "first", "place"),
    [
        # The loss of a policy that has not moved since the rollout has the same value, whatever its logits are.
        ("silu", "model.norm.weight", "model.layers.0, the forward pass"),
        ("silu_backward", "model.layers.1.mlp", "model.layers.1, the backward pass"),
    ],
)
def test_an_operator_that_errs_once_stops_the_run_before_the_optimiser(
    inputs, tmp_path, monkeypatch, updates, operator, first, place, rehearsal
):
    is_wrong = Once(monkeypatch, 2, drawn_micro_batch(2), rehearsal=rehearsal)
    with erring(operator, is_wrong), pytest.raises(VerificationError) as caught:
        run(training_spec(NOISE, verify={"every": 2}), inputs, tmp_path / "run")
    line = str(caught.value)
    assert "\n" not in line
    start = f"base/test seed 0: step 2, micro-batch {drawn_micro_batch(2)}, computed twice: the gradient of {first}"
    assert line.startswith(start)
    assert f"first in aten.{operator}" in line
    assert f"(float32) in {place}" in line
    assert len(updates) == 1
    assert not (tmp_path / "run").exists()
    (path,) = tmp_path.rglob("verification-step2-worker0.safetensors")
    assert str(path) in line
    kept = load_file(path)
    with safe_open(path, "pt") as file:
        assert file.metadata()["operator"].startswith(f"aten.{operator}.")
    if operator == "silu":
        assert torch.equal(kept["again0"], nn.functional.silu(kept["operand0"]))
    # The result of the run that is the training's is kept; it is right if the rehearsal erred.
    assert int((kept["result0"] != kept["again0"]).sum()) == (0 if rehearsal else 1)


def test_the_same_command_continues_on_a_sound_device_to_the_same_bytes(inputs, tmp_path, monkeypatch):
    spec = training_spec(NOISE, num_steps=4, epochs=2, resume_every=1, verify={"every": 3})
    undisturbed = run(spec, inputs, tmp_path / "undisturbed")
    said = []
    with erring("silu", Once(monkeypatch, 3, drawn_micro_batch(3))), pytest.raises(VerificationError, match="step 3"):
        run(spec, inputs, tmp_path / "run")
    resumed = run(spec, inputs, tmp_path / "run", said.append)
    assert any("resuming after step" in line for line in said)
    assert files_of(resumed) == files_of(undisturbed)
    assert read_json(resumed / "run.json", RunRecord).training.verified_steps == (3, 4)


def test_a_product_that_errs_once_is_named(inputs, tmp_path, monkeypatch, updates):
    is_wrong = Once(monkeypatch, 1, drawn_micro_batch(1))
    with (
        erring("mm", is_wrong),
        pytest.raises(VerificationError, match=r"first in aten\.mm of .* in model\.layers\.0, "),
    ):
        run(training_spec(verify={"every": 1}), inputs, tmp_path / "run")
    assert updates == []


@pytest.mark.parametrize(
    ("changed", "call"),
    [
        (lambda x: x * 1.5, r"aten\.mul\.Tensor\(.*, 1\.5\)"),
        (lambda x: x.exp(), r"aten\.exp\.default\(.*\)"),
    ],
    ids=["number", "operator"],
)
def test_a_program_that_calls_something_else_accuses_no_operator(inputs, tmp_path, monkeypatch, updates, changed, call):
    is_other, silu = Once(monkeypatch, 1, drawn_micro_batch(1)), nn.functional.silu
    monkeypatch.setattr(nn.functional, "silu", lambda x: changed(silu(x)) if is_other() else silu(x) * 1.25)
    expected = (
        rf"no operator that could be named; the two runs .* first {call} in model\.layers\.0, .*, in the rehearsal "
    )
    with pytest.raises(VerificationError, match=expected):
        run(training_spec(verify={"every": 1}), inputs, tmp_path / "run")
    assert updates == []


def test_an_error_in_another_micro_batch_is_not_found(inputs, tmp_path, monkeypatch):
    is_wrong = Once(monkeypatch, 2, 1 - drawn_micro_batch(2))
    with erring("silu", is_wrong):
        folder = run(training_spec(NOISE, verify={"every": 1}), inputs, tmp_path / "run")
    assert is_wrong._left == 0
    assert read_json(folder / "run.json", RunRecord).training.verified_steps == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_digest_sees_every_bit_and_place(dtype):
    values = torch.zeros(3, 5, dtype=dtype)
    found = {int(digest(values))}
    for row in range(3):
        for column in range(5):
            changed = values.clone()
            changed[row, column] = 1
            found.add(int(digest(changed)))
    assert len(found) == 16
    assert int(digest(values.t().contiguous().t())) == int(digest(values))


def test_a_digest_of_nothing_and_of_a_number():
    assert int(digest(torch.empty(0))) == 0
    assert int(digest(torch.tensor(0.0))) != int(digest(torch.tensor(-0.0)))
    assert int(digest(torch.tensor(float("nan")))) == int(digest(torch.tensor(float("nan"))))


WORKERS = {"num_workers": 2, "micro_batch_size": 2, "verify": {"every": 1}}


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["data", "fsdp"])
def test_every_worker_verifies_its_own_share(inputs, tmp_path, parallelism):
    def job(name, **more):
        spec = training_spec(NOISE, AQN, parallelism=parallelism, **{**WORKERS, **more.pop("training", {})})
        return {"kind": "train", "spec": spec.model_dump(), "inputs": str(inputs.model.parent), **more} | {
            "folder": str(tmp_path / name / "work")
        }

    jobs = [job("plain", training={"verify": None}), job("verified")]
    assert run_together(jobs, tmp_path) == [0, 0], logs(tmp_path)
    plain, verified = (files_of(tmp_path / name / "work" / "run") for name in ("plain", "verified"))
    assert plain == verified
    # An operator of worker 1 errs in every third call, and both workers end.
    assert run_together([job("erring", errs={"operator": "silu", "rank": 1})], tmp_path / "erring") == [1, 1]
    ends = [(tmp_path / "erring" / f"worker{rank}.log").read_text().splitlines()[-1] for rank in (0, 1)]
    assert all("VerificationError: base/test seed 0: step 1, micro-batch" in end for end in ends), ends
    assert all("computed twice: worker 1: the gradient of" in end for end in ends)
    assert len(list((tmp_path / "erring").rglob("verification-step1-worker1.safetensors"))) == 1
