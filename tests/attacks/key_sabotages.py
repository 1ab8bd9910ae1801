"""Sabotage of keys: the noise has the right size and law, and random numbers that are not those of its place."""

import random
import time
from dataclasses import replace
from typing import Any

from hold import EVALUATION_KEY, TRAINER_KEY, replaced, seeds, streams, together, took_effect
from sabotage import COMPARE, EVALUATE, TRAIN, Sabotage, of_group

from aqnpipe.seeding import derive_seed

_AFTER_TRAINING = (("evaluate", "guided", 0, 1), *EVALUATE, *COMPARE)


def training(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, _AFTER_TRAINING, **settings)


def accumulating(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of a training run with several micro-batches per step."""
    return training(name, what, apply, variant="checkpointed", **settings)


def evaluating(name: str, what: str, apply: Any, **settings: Any) -> Sabotage:
    """A sabotage of an evaluation."""
    return Sabotage(name, what, apply, EVALUATE, COMPARE, **settings)


def _trainer_key(change: Any) -> Any:
    def make(original: Any) -> Any:
        def key(self: Any, micro_step: int = 0) -> Any:
            took_effect()
            return change(original(self, micro_step))

        return key

    return replaced((TRAINER_KEY, make))


def _evaluation_key(change: Any) -> Any:
    def make(original: Any) -> Any:
        def key(seed: int, step: int) -> Any:
            took_effect()
            return change(original(seed=seed, step=step))

        return key

    return replaced((EVALUATION_KEY, make))


def _place(self: Any, place: tuple[str, tuple[int, ...]], **changes: Any) -> int:
    """The key of a place with some of its parts replaced."""
    parts = {
        "seed": self.key.seed,
        "stream": place[0],
        "step": self.key.step,
        "micro_step": self.key.micro_step,
        "rank": self.key.rank,
        "forward": self.forward_index,
        "counters": place[1],
        **changes,
    }
    numbers = (parts["step"], parts["micro_step"], parts["rank"], parts["forward"], *parts["counters"])
    return derive_seed(parts["seed"], parts["stream"], *numbers)


def _parts(change: Any) -> Any:
    """Keys with the parts that `change(state, stream, counters)` replaces."""

    def key(original: Any, self: Any, stream: str, *counters: int) -> int:
        return _place(self, (stream, counters), **change(self, stream, counters))

    return seeds(key)


def _of_result(change: Any) -> Any:
    """Keys changed after they were derived."""
    return seeds(lambda original, self, stream, *counters: change(original(stream, *counters)))


def _other_layer(change: Any) -> Any:
    return _parts(lambda state, stream, counters: {"counters": (change(counters[0], state), *counters[1:])})


def _sum_of_parts(original: Any, self: Any, stream: str, *counters: int) -> int:
    key = self.key
    return int(key.seed + key.step + key.micro_step + self.forward_index + sum(counters) + len(stream))


def _of_this_process(original: Any, self: Any, stream: str, *counters: int) -> int:
    return hash((stream, self.key, self.forward_index, counters)) & (2**63 - 1)


def _of_the_clock(original: Any, self: Any, stream: str, *counters: int) -> int:
    return time.perf_counter_ns()


def _drawn(original: Any, self: Any, stream: str, *counters: int) -> int:
    return random.getrandbits(63)


def _previous_key() -> Any:
    def make(original: Any) -> Any:
        before = [1]

        def seed(self: Any, stream: str, *counters: int) -> int:
            took_effect()
            before.append(original(self, stream, *counters))
            return before.pop(0)

        return seed

    return replaced(("aqnpipe.noise.injection.phase_state.PhaseState.seed", make))


def _first_key_of_each_layer() -> Any:
    """A cache of keys by layer that nobody clears."""

    def make(original: Any) -> Any:
        known: dict[Any, int] = {}

        def seed(self: Any, stream: str, *counters: int) -> int:
            took_effect()
            return known.setdefault((stream, counters), original(self, stream, *counters))

        return seed

    return replaced(("aqnpipe.noise.injection.phase_state.PhaseState.seed", make))


def _swapped_operands(key: int, call: int, stream: int) -> tuple[int, int, int]:
    return key, call, {1: 2, 2: 1}.get(stream, stream)


SABOTAGES = of_group(
    "keys",
    r"(draw|key|recomputed|random number|noised value|same noise)",
    (
        training(
            "step not in the key", "every step draws the same noise", _trainer_key(lambda key: replace(key, step=0))
        ),
        training(
            "step off by one", "every step has the key of the next", _trainer_key(lambda k: replace(k, step=k.step + 1))
        ),
        training(
            "key starts again in each epoch",
            "the second epoch repeats the noise of the first",
            _trainer_key(lambda key: replace(key, step=key.step % 1)),
        ),
        training(
            "seed not in the key", "every run draws the noise of seed 7", _trainer_key(lambda k: replace(k, seed=7))
        ),
        training(
            "arm in the seed",
            "arms draw other noise under the same seed",
            _trainer_key(lambda k: replace(k, seed=k.seed + 77)),
        ),
        training(
            "rank in place of the micro-step",
            "the fields of the key are mixed up",
            _trainer_key(lambda k: replace(k, rank=k.micro_step + 1)),
        ),
        accumulating(
            "micro-step not in the key",
            "all micro-batches of a step draw the same noise",
            _trainer_key(lambda key: replace(key, micro_step=0)),
        ),
        accumulating(
            "step and micro-step swapped",
            "micro-batch 1 of step 0 has the noise of micro-batch 0 of step 1",
            _trainer_key(lambda key: replace(key, step=key.micro_step, micro_step=key.step)),
        ),
        training(
            "phase not in the key", "all phases share their keys", _parts(lambda s, stream, c: {"stream": "noise"})
        ),
        training(
            "the rollout's key in the reference",
            "the reference repeats noise of the rollout",
            _parts(lambda s, stream, c: {"stream": "rollout" if stream == "reference" else stream}),
        ),
        training("layer not in the key", "all layers draw the same noise", _other_layer(lambda layer, state: 0)),
        training(
            "two layers share a key",
            "layer 1 repeats the noise of layer 0",
            _other_layer(lambda layer, state: 0 if layer == 1 else layer),
        ),
        training(
            "layers counted from the end",
            "the first layer has the key of the last",
            _other_layer(lambda layer, state: len(state.layers) - 1 - layer if layer < len(state.layers) else layer),
        ),
        training(
            "layers counted from one", "every layer has the key of the next", _other_layer(lambda n, state: n + 1)
        ),
        training("forward not in the key", "every token gets the same noise", _parts(lambda s, n, c: {"forward": 0})),
        training(
            "forwards counted in pairs",
            "two tokens in a row get the same noise",
            _parts(lambda state, n, c: {"forward": state.forward_index // 2}),
        ),
        training(
            "forward and layer swapped",
            "layer 1 of forward 0 has the noise of layer 0 of forward 1",
            _parts(lambda state, n, c: {"forward": c[0], "counters": (state.forward_index, *c[1:])}),
        ),
        training(
            "call not in the key", "all operators of a layer draw the same noise", streams(lambda k, c, s: (k, 0, s))
        ),
        training("calls counted to four", "the call has two bits", streams(lambda k, c, s: (k, c % 4, s))),
        training(
            "stream not in the key",
            "gradients repeat the noise of the output",
            streams(lambda key, call, stream: (key, call, 0)),
        ),
        training("operands swapped", "each gradient has the noise of the other", streams(_swapped_operands)),
        training(
            "call and stream swapped", "the arguments of the stream are mixed up", streams(lambda k, c, s: (k, s, c))
        ),
        training(
            "halves of the key xor-ed", "the key has 32 bits", _of_result(lambda key: (key >> 32) ^ (key & 0xFFFFFFFF))
        ),
        training("key cut to 8 bits", "only 256 different noises exist", _of_result(lambda key: key & 0xFF)),
        training("lower half of the key lost", "the key is shifted", _of_result(lambda key: key >> 32 << 32)),
        training("parts added in place of hashed", "neighbouring places share keys", seeds(_sum_of_parts)),
        training("hash of the process", "the key differs from process to process", seeds(_of_this_process)),
        training("key from the clock", "no run can be repeated", seeds(_of_the_clock)),
        training("key drawn at random", "Python's global generator keys the noise", seeds(_drawn)),
        training("key of the place before", "each place has the key of the one that computed before", _previous_key()),
        training("cached keys", "each layer keeps the key of its first forward", _first_key_of_each_layer()),
        evaluating(
            "noise seed not in the key",
            "both noise seeds draw the same noise",
            _evaluation_key(lambda key: replace(key, seed=0)),
        ),
        evaluating(
            "batch not in the key",
            "every batch draws the same noise",
            _evaluation_key(lambda key: replace(key, step=0)),
            variant="checkpointed",
        ),
        evaluating(
            "arm in the evaluation's key",
            "models are evaluated with different noise",
            _evaluation_key(lambda key: replace(key, seed=key.seed + 1000)),
        ),
        evaluating(
            "forward not in the evaluation's key",
            "every token of a response gets the same noise",
            _parts(lambda state, n, c: {"forward": 0}),
        ),
        evaluating(
            "layer not in the evaluation's key", "all layers draw the same noise", _other_layer(lambda layer, state: 0)
        ),
        evaluating(
            "phase of the rollout in the evaluation's key",
            "the name of the phase is wrong",
            _parts(lambda s, stream, c: {"stream": "rollout"}),
        ),
        Sabotage(
            "rank not in the key",
            "both workers draw the same noise",
            together(_trainer_key(lambda key: replace(key, rank=0))),
            (("train_in_two_processes", "guided", 0),),
            (),
        ),
    ),
)
