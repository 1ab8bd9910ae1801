"""Sabotage of keys: the noise has the right size and law, and random numbers that are not those of its place."""

import random
import time
from typing import Any

from hold import EVALUATION_KEY, TRAINER_KEY, replaced, seeds, state, streams, together, took_effect
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


def _parts(change: Any) -> Any:
    """Keys with the parts that `change(key, stream, pass, counters)` replaces."""

    def derived(original: Any, self: Any, stream: str, passed: int, *counters: int) -> int:
        parts = {
            "seed": self.seed,
            "stream": stream,
            "step": self.step,
            "micro_step": self.micro_step,
            "rank": self.rank,
            "passed": passed,
            "counters": counters,
            **change(self, stream, passed, counters),
        }
        numbers = (parts["step"], parts["micro_step"], parts["rank"], parts["passed"], *parts["counters"])
        return derive_seed(parts["seed"], parts["stream"], *numbers)

    return seeds(derived)


def _of_result(change: Any) -> Any:
    """Keys changed after they were derived."""
    return seeds(lambda original, self, stream, *counters: change(original(stream, *counters)))


def _other_layer(change: Any) -> Any:
    return _parts(lambda key, stream, passed, counters: {"counters": (change(counters[0]), *counters[1:])})


def _of_pass(change: Any) -> Any:
    return _parts(lambda key, stream, passed, counters: {"passed": change(passed)})


def _from_the_end(part: int) -> int:
    last = state().num_layers - 1
    return last - part if part <= last else part


def _sum_of_parts(original: Any, self: Any, stream: str, *counters: int) -> int:
    return int(self.seed + self.step + self.micro_step + sum(max(number, 0) for number in counters) + len(stream))


def _of_this_process(original: Any, self: Any, stream: str, *counters: int) -> int:
    return hash((stream, self, counters)) & (2**63 - 1)


def _of_the_clock(original: Any, self: Any, stream: str, *counters: int) -> int:
    return time.perf_counter_ns()


def _drawn(original: Any, self: Any, stream: str, *counters: int) -> int:
    return random.getrandbits(63)


def _previous_key() -> Any:
    before = [1]

    def derived(original: Any, self: Any, stream: str, *counters: int) -> int:
        before.append(original(stream, *counters))
        return before.pop(0)

    return seeds(derived)


def _first_key_of_each_layer() -> Any:
    """A cache of keys by layer that nobody clears."""
    known: dict[Any, int] = {}

    def derived(original: Any, self: Any, stream: str, passed: int, *counters: int) -> int:
        return known.setdefault((stream, counters), original(stream, passed, *counters))

    return seeds(derived)


def _places_that_never_change() -> Any:
    """The hooks that keep the place up to date are registered on modules that nobody calls."""

    def make(original: Any) -> Any:
        def hooks(self: Any, roots: Any, parts: Any) -> Any:
            took_effect()
            return original(self, roots, {})

        return hooks

    return replaced(("aqnpipe.machine.places.Places.hooks", make))


def _passes_that_never_begin() -> Any:
    """All passes count as one, whose layers are called again and again."""

    def make(original: Any) -> Any:
        def begin(self: Any, local: Any, *, is_pass: bool = True) -> None:
            if local.passes >= 0:
                took_effect()
                return
            original(self, local, is_pass=is_pass)

        return begin

    return replaced(("aqnpipe.machine.places.Places._begin", make))


def _swapped_results(key: int, call: int, stream: int) -> tuple[int, int, int]:
    return key, call, {1: 2, 2: 1}.get(stream, stream)


SABOTAGES = of_group(
    "keys",
    r"(draw|key|recomputed|random number|noised value|same noise)",
    (
        training(
            "step not in the key", "every step draws the same noise", _trainer_key(lambda key: key._replace(step=0))
        ),
        training(
            "step off by one", "every step has the key of the next", _trainer_key(lambda k: k._replace(step=k.step + 1))
        ),
        training(
            "key starts again in each epoch",
            "the second epoch repeats the noise of the first",
            _trainer_key(lambda key: key._replace(step=key.step % 1)),
        ),
        training(
            "seed not in the key", "every run draws the noise of seed 7", _trainer_key(lambda k: k._replace(seed=7))
        ),
        training(
            "arm in the seed",
            "arms draw other noise under the same seed",
            _trainer_key(lambda k: k._replace(seed=k.seed + 77)),
        ),
        training(
            "rank in place of the micro-step",
            "the fields of the key are mixed up",
            _trainer_key(lambda k: k._replace(rank=k.micro_step + 1)),
        ),
        accumulating(
            "micro-step not in the key",
            "all micro-batches of a step draw the same noise",
            _trainer_key(lambda key: key._replace(micro_step=0)),
        ),
        accumulating(
            "step and micro-step swapped",
            "micro-batch 1 of step 0 has the noise of micro-batch 0 of step 1",
            _trainer_key(lambda key: key._replace(step=key.micro_step, micro_step=key.step)),
        ),
        training(
            "phase not in the key", "all phases share their keys", _parts(lambda k, stream, p, c: {"stream": "noise"})
        ),
        training(
            "the rollout's key in the reference",
            "the reference repeats noise of the rollout",
            _parts(lambda k, stream, p, c: {"stream": "rollout" if stream == "reference" else stream}),
        ),
        training("layer not in the key", "all layers draw the same noise", _other_layer(lambda layer: 0)),
        training(
            "two layers share a key",
            "layer 1 repeats the noise of layer 0",
            _other_layer(lambda layer: 0 if layer == 1 else layer),
        ),
        training(
            "layers counted from the end",
            "the first layer has the key of the last",
            _other_layer(_from_the_end),
        ),
        training("layers counted from one", "every layer has the key of the next", _other_layer(lambda n: n + 1)),
        training("forward not in the key", "every token gets the same noise", _of_pass(lambda passed: 0)),
        training(
            "forwards counted in pairs",
            "two tokens in a row get the same noise",
            _of_pass(lambda passed: passed // 2),
        ),
        training(
            "forward and layer swapped",
            "layer 1 of forward 0 has the noise of layer 0 of forward 1",
            _parts(lambda key, n, passed, c: {"passed": c[0], "counters": (passed, *c[1:])}),
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
        training("results swapped", "the gradients of one operator have each other's noise", streams(_swapped_results)),
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
        training("places that never change", "no layer is ever entered", _places_that_never_change()),
        training("passes that never begin", "the counter of passes stays at 0", _passes_that_never_begin()),
        evaluating(
            "noise seed not in the key",
            "both noise seeds draw the same noise",
            _evaluation_key(lambda key: key._replace(seed=0)),
        ),
        evaluating(
            "batch not in the key",
            "every batch draws the same noise",
            _evaluation_key(lambda key: key._replace(step=0)),
            variant="checkpointed",
        ),
        evaluating(
            "arm in the evaluation's key",
            "models are evaluated with different noise",
            _evaluation_key(lambda key: key._replace(seed=key.seed + 1000)),
        ),
        evaluating(
            "forward not in the evaluation's key",
            "every token of a response gets the same noise",
            _of_pass(lambda passed: 0),
        ),
        evaluating(
            "layer not in the evaluation's key", "all layers draw the same noise", _other_layer(lambda layer: 0)
        ),
        evaluating(
            "phase of the rollout in the evaluation's key",
            "the name of the phase is wrong",
            _parts(lambda k, stream, p, c: {"stream": "rollout"}),
        ),
        Sabotage(
            "rank not in the key",
            "both workers draw the same noise",
            together(_trainer_key(lambda key: key._replace(rank=0))),
            (("train_in_two_processes", "guided", 0),),
            (),
        ),
    ),
)
