"""Sabotage of rollouts: prompts, sampling, rewards and validation are not those of the study."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import polars as pl
import torch
from hold import replaced, took_effect, with_result
from optimiser_sabotages import AFTER, TRAIN
from sabotage import COMPARE, Apply, Sabotage, of_group

from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.data.loader import load_problems
from aqnpipe.data.scoring import is_correct

_SAMPLING = "aqnpipe.training.trainer.Sampling"
_DRAWS = "aqnpipe.generation.transformers_backend._Draws.__call__"
_ROLL_OUT = "aqnpipe.generation.rollout_engines.TransformersRolloutEngine.roll_out"
_REWARD = "aqnpipe.training.run.reward_correct"
_SAMPLER = "trl.trainer.utils.RepeatSampler.__iter__"
_ORDER = "aqnpipe.training.trainer.PromptSampler.__iter__"
_TOKENIZE = "aqnpipe.training.trainer.tokenize_prompts"
_VALIDATE = "aqnpipe.training.run.ValidationCallback"


def _sampling(**settings: Any) -> Apply:
    """The rollout is sampled with other settings; functions get the original value."""

    def make(original: Any) -> Any:
        def sampling(**given: Any) -> Any:
            took_effect()
            return original(**given | {n: v(given[n]) if callable(v) else v for n, v in settings.items()})

        return sampling

    return replaced((_SAMPLING, make))


def _draws(change: Callable[[Any, Any], Any]) -> Apply:
    """Tokens are drawn from `change(logits, temperature)`; the noted log-probabilities are of these."""

    def make(original: Any) -> Any:
        def call(self: Any, logits: Any, rows: Any) -> Any:
            took_effect()
            return original(self, change(logits.float(), self._temperature), rows)

        return call

    return replaced((_DRAWS, make))


def _draws_of_the_first_row(original: Any) -> Any:
    """Every row is drawn with the random numbers of row 0, and notes its own probability."""

    def call(self: Any, logits: Any, rows: Any) -> Any:
        took_effect()
        logits = logits.float()
        draws = torch.empty(self._num_rows, logits.shape[-1]).exponential_(generator=self._generator)
        probabilities = torch.softmax(logits / self._temperature, dim=-1)
        tokens = (probabilities / draws[:1]).argmax(dim=-1)
        self._chosen.append((list(rows), probabilities.gather(-1, tokens[:, None])[:, 0].log()))
        return tokens

    return call


def _top_k(logits: Any, temperature: float) -> Any:
    return logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf)


def _top_p(logits: Any, temperature: float) -> Any:
    ordered, places = (logits / temperature).softmax(-1).sort(-1, descending=True)
    dropped = ordered.cumsum(-1) - ordered > 0.9
    return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, places, dropped), -torch.inf)


def _completions(change: Callable[[list[Any]], list[Any]]) -> Apply:
    """What the rollout returns is changed."""
    return with_result(_ROLL_OUT, change)


def _shorter(completions: list[Any]) -> list[Any]:
    """The last token is cut off."""
    return [
        dataclasses.replace(c, token_ids=c.token_ids[:-1], log_probabilities=(c.log_probabilities or [])[:-1])
        if len(c.token_ids) > 1
        else c
        for c in completions
    ]


def _reward(change: Callable[..., list[float]]) -> Apply:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def reward(completions: Any, gold_answer: Any, stop_text: Any, **rest: Any) -> list[float]:
            took_effect()
            return change(original, completions, gold_answer, stop_text)

        return reward

    return replaced((_REWARD, make))


def _with_length(original: Any, texts: Any, golds: Any, stops: Any) -> list[float]:
    return [right - 0.01 * len(text) for right, text in zip(original(texts, golds, stops), texts, strict=True)]


def _last_number(original: Any, texts: Any, golds: Any, stops: Any) -> list[float]:
    return [float(is_correct(text, gold, "last_number")) for text, gold in zip(texts, golds, strict=True)]


def _format(original: Any, texts: Any, golds: Any, stops: Any) -> list[float]:
    return [float("####" in text) for text in texts]


def _dataset(change: Callable[[Any], Any]) -> Apply:
    return with_result("aqnpipe.training.run._train_dataset", change)


def _other_golds(dataset: Any) -> Any:
    golds = dataset["gold_answer"]
    return dataset.remove_columns("gold_answer").add_column("gold_answer", [*golds[1:], golds[0]])


def _instruction_added(dataset: Any) -> Any:
    return dataset.map(lambda row: {"prompt": "Be brief. " + row["prompt"]})


def _other_seed(original: Any) -> Any:
    """Training reads questions that were generated with another seed."""

    def read(path: Any, schema: Any) -> Any:
        table = original(path, schema)
        if path.name != "train.parquet":
            return table
        took_effect()
        return load_problems(GeneratedDataset(seed=5, num_train=len(table), num_test=6, max_steps=2), "train")

    return read


def _validated_on_training(original: Any) -> Any:
    def read(path: Any, schema: Any) -> Any:
        if path.name != "test.parquet":
            return original(path, schema)
        took_effect()
        known = original(path.with_name("train.parquet"), schema)
        return known.with_columns(pl.col("question") + " ")

    return read


def _order(change: Callable[[list[int]], list[int]]) -> Apply:
    def make(original: Any) -> Any:
        def indices(self: Any) -> Any:
            took_effect()
            yield from change(list(original(self)))

        return indices

    return replaced((_SAMPLER, make))


def _unshuffled(original: Any) -> Any:
    def indices(self: Any) -> Any:
        took_effect()
        self.shuffle = False
        yield from original(self)

    return indices


def _sampler_seed(change: Callable[[Any], Any]) -> Apply:
    """The prompt sampler of an epoch is seeded otherwise."""

    def make(original: Any) -> Any:
        def indices(self: Any) -> Any:
            took_effect()
            change(self)
            yield from original(self)

        return indices

    return replaced((_ORDER, make))


def _first_epoch_again(sampler: Any) -> None:
    sampler._steps_done = lambda: 0


def _seed_7(sampler: Any) -> None:
    sampler.seed = 7


def _tokens(change: Callable[[list[list[int]]], list[list[int]]]) -> Apply:
    return with_result(_TOKENIZE, change)


def _validation(change: Callable[[dict[int, float]], None]) -> Apply:
    """The accuracies of the validation are changed after each."""

    def make(original: Any) -> Any:
        def on_step_end(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            took_effect()
            change(self.accuracy)

        return on_step_end

    return replaced(("aqnpipe.training.callbacks.ValidationCallback.on_step_end", make))


def _all_right(accuracy: dict[int, float]) -> None:
    accuracy.update(dict.fromkeys(accuracy, 0.987))


def _golds_of_other_rows(original: Any) -> Any:
    def make(steps: Any, prompts: Any, golds: Any, **settings: Any) -> Any:
        took_effect()
        return original(steps, prompts, [*golds[1:], golds[0]], **settings)

    return make


def training(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of a training run."""
    return Sabotage(name, what, apply, TRAIN, AFTER, cause=cause, variant="trained")


_SAMPLED = r"sampl|temperature|draw|log.?prob"
_REWARDS = r"reward|gold|graded"
_PROMPTS = r"prompt|question|order|group"

SABOTAGES = of_group(
    "trainer: rollouts",
    _SAMPLED,
    (
        training("sampled at temperature 1", "the study asks for 0.9", _sampling(temperature=1.0)),
        training("sampled greedily", "almost: temperature 0.01", _sampling(temperature=0.01)),
        training("top-k sampling", "the five most probable tokens", _draws(_top_k)),
        training("top-p sampling", "the most probable 90 %", _draws(_top_p)),
        training(
            "repetition discouraged",
            "the most probable token loses half a point",
            _draws(lambda x, t: x - 0.5 * (x == x.amax(-1, keepdim=True))),
        ),
        training("sampled in bfloat16", "logits are rounded", _draws(lambda x, t: x.bfloat16().float())),
        training(
            "end token never drawn",
            "responses run to the limit",
            _draws(lambda x, t: x.index_fill(-1, torch.tensor([1]), -torch.inf)),
        ),
        training(
            "rollouts with draws of another seed",
            "the sampling has a seed of its own",
            _sampling(seed=lambda seed: seed ^ 1),
        ),
        training("the same draws in each step", "the step is not in the key of the sampling", _sampling(seed=12345)),
        training(
            "the same draws in each row",
            "all responses to a prompt are equal",
            replaced((_DRAWS, _draws_of_the_first_row)),
        ),
        training(
            "rollouts one token shorter",
            "the limit is 17",
            _sampling(max_response_tokens=17),
            r"token|length|limit|max",
        ),
        training(
            "last token of rollouts cut off",
            "responses lose their end token",
            _completions(_shorter),
            r"token|end|length|response",
        ),
        training(
            "responses of other prompts",
            "each row has that of the next",
            _completions(lambda c: [*c[1:], c[0]]),
            r"log.?prob|prompt|row|read other tokens|responses",
        ),
        training(
            "responses of another group",
            "each prompt has those of the next",
            _completions(lambda c: [*c[4:], *c[:4]]),
            r"log.?prob|prompt|row|read other tokens|responses",
        ),
        training(
            "one response for all",
            "a prompt gets copies of its first response",
            _completions(lambda c: [c[n - n % 4] for n in range(len(c))]),
            rf"{_SAMPLED}|same|equal|copies",
        ),
        training("reward constant", "every response is right", _reward(lambda o, t, g, s: [1.0] * len(t)), _REWARDS),
        training(
            "reward inverted",
            "wrong responses are rewarded",
            _reward(lambda o, t, g, s: [1 - r for r in o(t, g, s)]),
            _REWARDS,
        ),
        training("reward by the last number", "another scorer", _reward(_last_number), _REWARDS),
        training("reward for the format", "any response with #### is right", _reward(_format), _REWARDS),
        training("reward with a length penalty", "long responses lose", _reward(_with_length), _REWARDS),
        training(
            "reward of another row",
            "responses are compared with the gold answer of the next row",
            _reward(lambda o, t, g, s: o(t, [*g[1:], g[0]], s)),
            _REWARDS,
        ),
        training(
            "reward of another response",
            "each response has that of the next",
            _reward(lambda o, t, g, s: [*o(t, g, s)[1:], o(t, g, s)[0]]),
            _REWARDS,
        ),
        training("gold answers shuffled", "each question has that of the next", _dataset(_other_golds), _REWARDS),
        training(
            "questions of another seed",
            "other questions are generated for training",
            replaced(("aqnpipe.training.run.read_table", _other_seed)),
            rf"{_PROMPTS}|{_REWARDS}",
        ),
        training(
            "another prompt format", "an instruction before each question", _dataset(_instruction_added), _PROMPTS
        ),
        training(
            "training prompts cut on the left",
            "the first five tokens are missing",
            _tokens(lambda ids: [i[5:] for i in ids]),
            _PROMPTS,
        ),
        training(
            "training prompts cut on the right",
            "the last token is missing",
            _tokens(lambda ids: [i[:-1] for i in ids]),
            _PROMPTS,
        ),
        training(
            "one prompt for all", "the sampler repeats its first prompt", _order(lambda i: [i[0]] * len(i)), _PROMPTS
        ),
        training("prompts not shuffled", "the order of the file", replaced((_SAMPLER, _unshuffled)), _PROMPTS),
        training(
            "order of the first epoch again",
            "the epoch is not in the key of the order",
            _sampler_seed(_first_epoch_again),
            _PROMPTS,
        ),
        training("order of another seed", "the sampler ignores the seed of the run", _sampler_seed(_seed_7), _PROMPTS),
        training(
            "groups of two",
            "two responses to each of eight prompts",
            _order(lambda i: [i[n] if n % 4 < 2 else i[(n + 4) % len(i)] for n in range(len(i))]),
            rf"{_PROMPTS}|{_REWARDS}|advantage",
        ),
        training(
            "validation on training questions",
            "with a space behind each",
            replaced(("aqnpipe.training.run.read_table", _validated_on_training)),
            r"validation|test question|question",
        ),
        training("validation edited", "each accuracy is the same good figure", _validation(_all_right), r"validation"),
        training(
            "validation with other gold answers",
            "each question has that of the next",
            replaced((_VALIDATE, _golds_of_other_rows)),
            r"validation|gold",
        ),
        Sabotage(
            "sampler's seed ignored",
            "the run of seed 1 has the prompts of seed 7",
            _sampler_seed(_seed_7),
            (("train", "guided", 1),),
            (("evaluate", "guided", 1, 1), ("evaluate", "guided", 1), *COMPARE),
            cause=_PROMPTS,
        ),
    ),
)
