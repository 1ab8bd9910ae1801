"""Sabotage of what outlives a step: checkpoints, resume points, adapters, and the copies of several workers."""

import copy
import json
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hold import replaced, took_effect
from optimiser_sabotages import AFTER, TRAIN
from sabotage import COMPARE, EVALUATE, Apply, Sabotage, of_group
from safetensors.torch import load_file, save_file
from torch import distributed

_SAVE = "aqnpipe.training.callbacks.CheckpointCallback.on_step_end"
_DESCRIBE = "aqnpipe.training.policy.describe_model"
_STOPPED = (("train_with_a_stop", "guided", 0),)
_TWO = (("train_in_two_processes", "guided", 0),)
_AFTER_TWO_STEPS = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)


def _written(change: Callable[[Path, int], None]) -> Apply:
    """Files of a checkpoint are changed after they were saved and before their record is made."""

    def make(original: Any) -> Any:
        number = 0

        def describe(folder: Path, *args: Any) -> Any:
            nonlocal number
            number += 1
            took_effect()
            change(folder, number)
            return original(folder, *args)

        return describe

    return replaced((_DESCRIBE, make))


def _weights(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path, int], None]:
    def edit(folder: Path, number: int) -> None:
        for path in folder.glob("*.safetensors"):
            found = load_file(path)
            save_file({name: change(name, value).contiguous() for name, value in found.items()}, path, {"format": "pt"})

    return edit


def _adapted(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Apply:
    """Adapters in memory are changed while a checkpoint is saved."""

    def make(original: Any) -> Any:
        def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            lora = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
            before = {name: weight.detach().clone() for name, weight in lora.items()}
            took_effect()
            with torch.no_grad():
                for name, weight in lora.items():
                    weight.copy_(change(name, before[name]))
            original(self, args, state, control, **kwargs)
            with torch.no_grad():
                for name, weight in lora.items():
                    weight.copy_(before[name])

        return on_step_end

    return replaced((_SAVE, make))


def _of_the_step_before() -> Apply:
    """The checkpoint is taken from a copy of the policy that was made one step earlier."""

    def make(original: Any) -> Any:
        before: list[Any] = []

        def on_step_end(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model = kwargs["model"]
            old, now = (before[-1] if before else None), copy.deepcopy(model.state_dict())
            if old is not None:
                took_effect()
                model.load_state_dict(old)
            original(self, args, state, control, **kwargs)
            model.load_state_dict(now)
            before.append(now)

        return on_step_end

    return replaced((_SAVE, make))


def _first_kept() -> Callable[[Path, int], None]:
    first: dict[str, bytes] = {}

    def edit(folder: Path, number: int) -> None:
        for path in folder.glob("*.safetensors"):
            if number == 1:
                first[path.name] = path.read_bytes()
            else:
                path.write_bytes(first[path.name])

    return edit


def _config(**values: Any) -> Callable[[Path, int], None]:
    def edit(folder: Path, number: int) -> None:
        path = folder / "config.json"
        content = json.loads(path.read_text())
        for name, value in values.items():
            if name == "rope_theta" and "rope_parameters" in content:
                content["rope_parameters"]["rope_theta"] = value
            else:
                content[name] = value
        path.write_text(json.dumps(content))

    return edit


def _tokenizer_changed(folder: Path, number: int) -> None:
    """Two digits change places in the vocabulary."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(content))


def _resumed(change: Callable[[Any], None]) -> Apply:
    """`change(trainer)` after everything was restored from a resume point."""

    def make(original: Any) -> Any:
        def load(self: Any, checkpoint: Any) -> None:
            original(self, checkpoint)
            if checkpoint is not None:
                took_effect()
                change(self)

        return load

    return replaced(("aqnpipe.training.trainer.NoisyGRPOTrainer._load_optimizer_and_scheduler", make))


def _no_moments(trainer: Any) -> None:
    trainer.optimizer.optimizer.state.clear()


def _schedule_from_the_start(trainer: Any) -> None:
    # The next step has the restored rate; what follows it is the rate of the first step.
    trainer.lr_scheduler.last_epoch = -1
    trainer.lr_scheduler._step_count = 0


def _weights_not_restored(original: Any) -> Any:
    def load(model: Any, *restored: Any) -> None:
        first = [weight.detach().clone() for weight in model.parameters()]
        original(model, *restored)
        with torch.no_grad():
            for weight, value in zip(model.parameters(), first, strict=True):
                weight.copy_(value)
        took_effect()

    return load


def _order_from_the_start(original: Any) -> Any:
    def make(self: Any, dataset: Any = None) -> Any:
        sampler = original(self, dataset)
        started: list[int] = []

        def steps_done() -> int:
            # The state of the run is restored after the sampler was made.
            started.append(self.state.global_step)
            took_effect()
            return self.state.global_step - started[0]

        sampler._steps_done = steps_done
        return sampler

    return make


def _in_the_second(change: Callable[[], Any]) -> Apply:
    """A change in the second of two workers."""

    @contextmanager
    def apply(_: Any) -> Any:
        from aqnpipe.training import run

        whole = run._build_trainer

        def build(*args: Any, **kwargs: Any) -> Any:
            trainer = whole(*args, **kwargs)
            if distributed.get_rank() == 1:
                took_effect()
                change_trainer(trainer)
            return trainer

        change_trainer: Any = change
        with mock.patch.object(run, "_build_trainer", build):
            yield

    return apply


def _other_weights(trainer: Any) -> None:
    """A matrix changes in the first step: before, the workers are given the same weights."""
    whole, done = trainer.training_step, []

    def training_step(*args: Any, **kwargs: Any) -> Any:
        if not done:
            done.append(True)
            with torch.no_grad():
                next(iter(trainer.model.parameters())).mul_(1.01)
        return whole(*args, **kwargs)

    trainer.training_step = training_step


def _unsynchronised(trainer: Any) -> None:
    """Gradients of this worker are not those of all."""
    whole = trainer._clip_grad_norm

    def clip(model: Any) -> Any:
        for weight in model.parameters():
            if weight.grad is not None:
                weight.grad.mul_(0.5)
        return whole(model)

    trainer._clip_grad_norm = clip


def _slower(trainer: Any) -> None:
    trainer.args.learning_rate = trainer.args.learning_rate / 2


def _reference_adapted(original: Any) -> Any:
    @contextmanager
    def off(model: Any) -> Any:
        took_effect()
        yield

    return off


def _inserted(change: Callable[[Any], None]) -> Apply:
    """Adapters are inserted otherwise."""

    def make(original: Any) -> Any:
        def add(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            took_effect()
            for module in model.modules():
                if hasattr(module, "lora_A"):
                    change(module)

        return add

    return replaced(("aqnpipe.training.policy.add_adapters", make))


def _scaled_twice(module: Any) -> None:
    module.scaling["default"] *= 2


def _no_dropout_in_training(module: Any) -> None:
    module.lora_dropout["default"] = torch.nn.Dropout(0.2)


def _a_frozen(module: Any) -> None:
    module.lora_A["default"].weight.requires_grad_(False)


def training(name: str, what: str, apply: Any, cause: str = "", jobs: Any = TRAIN) -> Sabotage:
    """A sabotage of a training run, or of one that was stopped and resumed."""
    return Sabotage(name, what, apply, jobs, AFTER, cause=cause, variant="trained")


def adapting(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of a run that trains adapters."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TWO_STEPS, cause=cause, variant="adapters")


def by_two(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of a run of two workers."""
    return Sabotage(name, what, apply, _TWO, (), cause=cause)


_SAVED = r"checkpoint|weights|in memory|logits|saved"

SABOTAGES = (
    *of_group(
        "trainer: checkpoints",
        _SAVED,
        (
            training("checkpoint of the step before", "saved before the update", _of_the_step_before()),
            training(
                "checkpoint of the first time", "the second has the weights of the first", _written(_first_kept())
            ),
            training("checkpoint scaled", "all weights are 0.1 % larger", _written(_weights(lambda n, w: w * 1.001))),
            training(
                "checkpoint in bfloat16",
                "weights are rounded on the way to the file",
                _written(_weights(lambda n, w: w.bfloat16().to(w))),
            ),
            training(
                "checkpoint with one layer of zeros",
                "a matrix was not saved",
                _written(_weights(lambda n, w: w * 0 if "layers.3.mlp.up" in n else w)),
            ),
            training(
                "checkpoint with two layers swapped",
                "matrices of the same shape",
                _written(_weights(lambda n, w: w.flip(0) if "layers.1.self_attn.k_proj.weight" in n else w)),
            ),
            training(
                "checkpoint with another rope",
                "theta in its config",
                _written(_config(rope_theta=12345.0)),
                rf"{_SAVED}|config|rope",
            ),
            training(
                "checkpoint with another epsilon",
                "of the norms, in its config",
                _written(_config(rms_norm_eps=1e-2)),
                rf"{_SAVED}|config|eps",
            ),
            training(
                "checkpoint with another tokenizer",
                "two digits change places",
                _written(_tokenizer_changed),
                rf"{_SAVED}|tokeni[sz]er",
            ),
            training(
                "resumed without moments",
                "the optimiser starts anew",
                _resumed(_no_moments),
                r"optimi[sz]er|update|resum|moment",
                _STOPPED,
            ),
            training(
                "resumed with the schedule at its start",
                "warm-up again",
                _resumed(_schedule_from_the_start),
                r"learning.rate|schedule|resum",
                _STOPPED,
            ),
            training(
                "resumed with the first weights",
                "the trained weights are not restored",
                replaced(("aqnpipe.training.trainer.load_tensors", _weights_not_restored)),
                r"weights|resum|matrices|norm",
                _STOPPED,
            ),
            training(
                "resumed with the first prompts",
                "the order starts anew",
                replaced(("aqnpipe.training.trainer.NoisyGRPOTrainer._get_train_sampler", _order_from_the_start)),
                r"prompt|question|order|resum",
                _STOPPED,
            ),
        ),
    ),
    *of_group(
        "trainer: workers",
        r"worker",
        (
            by_two(
                "workers with other weights",
                "a matrix of the second is 1 % larger",
                _in_the_second(_other_weights),
                r"worker|matrices are not those of the last optimi[sz]er step",
            ),
            by_two("gradients not synchronised", "the second halves its own", _in_the_second(_unsynchronised)),
            by_two(
                "workers with other rates",
                "the second learns at half of the rate",
                _in_the_second(_slower),
                r"worker|learning.rate",
            ),
        ),
    ),
    *of_group(
        "adapters",
        r"adapter|lora",
        (
            adapting(
                "adapters not saved",
                "the checkpoint has those of the start",
                _adapted(lambda n, w: w * 0 if "lora_B" in n else w),
                rf"{_SAVED}|adapter|update",
            ),
            adapting(
                "adapters saved twice as large",
                "alpha counts twice",
                _adapted(lambda n, w: w * 2 if "lora_B" in n else w),
                rf"{_SAVED}|adapter|alpha",
            ),
            adapting(
                "adapters saved in bfloat16",
                "they are rounded",
                _adapted(lambda n, w: w.bfloat16().float()),
                rf"{_SAVED}|adapter",
            ),
            adapting(
                "one adapter not saved",
                "that of one matrix is 0 in the checkpoint",
                _adapted(lambda n, w: w * 0 if "layers.2.mlp.down_proj.lora_B" in n else w),
                rf"{_SAVED}|adapter",
            ),
            adapting(
                "adapters of the step before", "saved before the update", _of_the_step_before(), rf"{_SAVED}|adapter"
            ),
            adapting(
                "reference with adapters",
                "the reference is the policy",
                replaced(("aqnpipe.training.trainer.adapters_off", _reference_adapted)),
                r"reference|adapter|KL",
            ),
            adapting(
                "adapters scaled twice",
                "alpha is 16 in place of 8 while training",
                _inserted(_scaled_twice),
                r"adapter|alpha|scal|logits",
            ),
            adapting(
                "dropout in adapters",
                "20 % in place of 0",
                _inserted(_no_dropout_in_training),
                r"dropout|adapter|log.?prob",
            ),
            adapting(
                "half of each adapter frozen",
                "A is not trained",
                _inserted(_a_frozen),
                r"adapter|parameter|frozen|optimi[sz]er|trained|changed",
            ),
        ),
    ),
)
