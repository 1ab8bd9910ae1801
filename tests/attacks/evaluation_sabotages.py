"""Sabotage of evaluations: questions, decoding and grading are not those of the study."""

import dataclasses
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import polars as pl
import torch
from hold import replaced, took_effect, with_result
from sabotage import COMPARE, EVALUATE, Apply, Sabotage, of_group

from aqnpipe.data.prompts import Example
from aqnpipe.data.scoring import SCORERS

_PROMPTS = "aqnpipe.evaluation.stage.prompt_token_ids"
_SCORE = "aqnpipe.evaluation.stage.score"
_READ = "aqnpipe.evaluation.stage.read_table"
_SHARDS = "aqnpipe.evaluation.stage.shards_of"
_RUN_LOCAL = "aqnpipe.evaluation.shards.run_shard"
_SAMPLING = "aqnpipe.evaluation.shards.sampling_of"
_JOINED = "aqnpipe.evaluation.shards._joined"
_GENERATE = "aqnpipe.generation.transformers_backend.TransformersBackend.generate"
_GREEDY = "aqnpipe.generation.transformers_backend._most_probable"
_BATCH = "aqnpipe.generation.transformers_backend._Batch"
_FORWARD = f"{_BATCH}._forward"
_LOAD = "aqnpipe.generation.backend_choice.load_model"


def _prompts(change: Callable[[list[list[int]]], list[list[int]]]) -> Apply:
    return with_result(_PROMPTS, change)


def _format(change: Callable[[Any, Any], tuple[Any, Any]]) -> Apply:
    """Prompts in another format: `change(format, examples)`."""

    def make(original: Any) -> Any:
        def ids(questions: Any, prompt_format: Any, tokenizer: Any, examples: Any = ()) -> Any:
            took_effect()
            other, shown = change(prompt_format, examples)
            return original(questions, other, tokenizer, shown)

        return ids

    return replaced((_PROMPTS, make))


def _questions(change: Callable[[list[str]], list[str]]) -> Apply:
    def make(original: Any) -> Any:
        def ids(questions: Any, *args: Any) -> Any:
            took_effect()
            return original(change(list(questions)), *args)

        return ids

    return replaced((_PROMPTS, make))


def _problems(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Apply:
    return with_result(_READ, change)


def _rows(change: Callable[[pl.DataFrame], pl.DataFrame]) -> Apply:
    """Rows of a pass are changed after they were graded."""
    return with_result(_SCORE, change)


def _scored(change: Callable[..., tuple[Any, ...]]) -> Apply:
    """`change(problems, samples, tokenizer)` before the responses are graded."""

    def make(original: Any) -> Any:
        def score(problems: Any, samples: Any, tokenizer: Any, *rest: Any) -> Any:
            took_effect()
            return original(problems, change(samples), tokenizer, *rest)

        return score

    return replaced((_SCORE, make))


def _with_prompt(original: Any) -> Any:
    """The scorer gets prompt and response as one text."""

    def score(problems: Any, samples: Any, tokenizer: Any, *rest: Any) -> Any:
        took_effect()
        table = original(problems, samples, tokenizer, *rest)
        texts = pl.concat([problems["question"]] * len(samples)) + "\n" + table["response"]
        return table.with_columns(texts.alias("response"))

    return score


def _sampled(**settings: Any) -> Apply:
    def change(sampling: Any) -> Any:
        given = {name: value(sampling) if callable(value) else value for name, value in settings.items()}
        return dataclasses.replace(sampling, **given)

    return with_result(_SAMPLING, change)


def _same_draws(original: Any) -> Any:
    def sampling_of(spec: Any, noise_seed: int, sample: int, batch: int) -> Any:
        took_effect()
        return original(spec, noise_seed, 0, batch)

    return sampling_of


def _greedy(change: Callable[[Any], Any]) -> Apply:
    """The most probable token of changed logits."""

    def make(original: Any) -> Any:
        def choose(logits: Any, rows: Any) -> Any:
            took_effect()
            return original(change(logits.clone()), rows)

        return choose

    return replaced((_GREEDY, make))


def _second_at_first() -> Apply:
    """The first token of every response is the second best."""

    def make(original: Any) -> Any:
        def decode(model: Any, prompts: Any, choose: Any, **settings: Any) -> Any:
            number = 0

            def second(logits: Any, rows: Any) -> Any:
                nonlocal number
                number += 1
                if number > 1:
                    return choose(logits, rows)
                took_effect()
                return logits.topk(2).indices[:, 1]

            return original(model, prompts, second, **settings)

        return decode

    return replaced(("aqnpipe.generation.transformers_backend.decode", make))


def _penalty() -> Apply:
    """Tokens that a response has already lose half a point."""

    def make(original: Any) -> Any:
        def decode(model: Any, prompts: Any, choose: Any, **settings: Any) -> Any:
            seen: dict[int, set[int]] = {}

            def other(logits: Any, rows: Any) -> Any:
                took_effect()
                logits = logits.clone()
                for place, row in enumerate(rows):
                    logits[place, sorted(seen.setdefault(row, set()))] -= 3
                tokens = choose(logits, rows)
                for row, token in zip(rows, tokens.tolist(), strict=True):
                    seen[row].add(token)
                return tokens

            return original(model, prompts, other, **settings)

        return decode

    return replaced(("aqnpipe.generation.transformers_backend.decode", make))


def _decoded(**settings: Any) -> Apply:
    """`decode` gets other settings: functions of the original value, or values."""

    def make(original: Any) -> Any:
        def decode(*args: Any, **given: Any) -> Any:
            took_effect()
            changed = {name: value(given[name]) if callable(value) else value for name, value in settings.items()}
            return original(*args, **given | changed)

        return decode

    return replaced(("aqnpipe.generation.transformers_backend.decode", make))


def _generated(change: Callable[[list[Any]], list[Any]]) -> Apply:
    return with_result(_GENERATE, change)


def _cut(completions: list[Any]) -> list[Any]:
    return [dataclasses.replace(c, token_ids=c.token_ids[:-1] or c.token_ids) for c in completions]


def _remembered() -> Apply:
    """A cache of responses by prompt, which does not know the noise."""

    def make(original: Any) -> Any:
        known: dict[Any, Any] = {}

        def generate(self: Any, prompts: Any, sampling: Any, **settings: Any) -> Any:
            found = original(self, prompts, sampling, **settings)
            took_effect()
            return [known.setdefault(tuple(prompt), answer) for prompt, answer in zip(prompts, found, strict=True)]

        return generate

    return replaced((_GENERATE, make))


def _padding_seen(original: Any) -> Any:
    def __init__(self: Any, *args: Any) -> None:  # noqa: N807
        original(self, *args)
        took_effect()
        self._bias.zero_()

    return __init__


def _positions_shifted(original: Any) -> Any:
    def __init__(self: Any, *args: Any) -> None:  # noqa: N807
        original(self, *args)
        took_effect()
        self._positions = self._positions + 1

    return __init__


def _not_reordered(original: Any) -> Any:
    """Keys and values keep their rows when rows leave the batch."""

    def reorder(self: Any, rows: Any) -> None:
        took_effect()
        original(self, torch.arange(len(rows)))

    return reorder


def _bias_not_reordered(original: Any) -> Any:
    def keep(self: Any, active: list[int]) -> Any:
        visible, positions, bias = self._visible, self._positions, self._bias
        index = original(self, active)
        took_effect()
        self._visible, self._positions, self._bias = (values[: len(active)] for values in (visible, positions, bias))
        return index

    return keep


def _rounded_cache(original: Any) -> Any:
    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        took_effect()
        return original(self, keys.bfloat16().float(), values.bfloat16().float(), *args, **kwargs)

    return update


def _stale_cache(original: Any) -> Any:
    """The first token of each prompt keeps the keys of an earlier batch."""

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[2] > 1 and self._first_row == 0:
            took_effect()
            keys = keys.clone()
            keys[:, :, 2] = keys[:, :, 1]
        return original(self, keys, values, *args, **kwargs)

    return update


def _wrong_place(original: Any) -> Any:
    """The logits after the last token but one of the prompt."""

    def forward(self: Any, first: int, lengths: Any, ids: Any, keep: Any, *rest: Any) -> Any:
        if not isinstance(keep, torch.Tensor):
            return original(self, first, lengths, ids, keep, *rest)
        took_effect()
        return original(self, first, lengths, ids, keep - 1, *rest)

    return forward


def _first_token_lost(original: Any) -> Any:
    def forward(self: Any, first: int, lengths: Any, ids: Any, *rest: Any) -> Any:
        if ids.shape[1] > 1:
            took_effect()
            ids = ids.clone()
            ids[:, 0] = ids[:, 1]
        return original(self, first, lengths, ids, *rest)

    return forward


def _autocast(original: Any) -> Any:
    def forward(self: Any, *args: Any) -> Any:
        took_effect()
        with torch.autocast("cpu", torch.bfloat16):
            return original(self, *args).float()

    return forward


def _model(change: Callable[[Any], None]) -> Apply:
    def loaded(model: Any) -> Any:
        change(model)
        return model

    return with_result(_LOAD, loaded)


def _other_rope(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(0.9)


def _other_epsilon(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 1e-2


def _other_scaling(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "scaling"):
            module.scaling = 1.0 / 32


def _other_checkpoint(original: Any) -> Any:
    def load(folder: Any, **settings: Any) -> Any:
        took_effect()
        return original(folder.with_name("step1"), **settings)

    return load


def _tokenizer(original: Any) -> Any:
    """The vocabulary of another model: two digits have each other's ids."""

    def load(folder: Any) -> Any:
        import json

        from tokenizers import Tokenizer

        took_effect()
        tokenizer = original(folder)
        content = json.loads(tokenizer.backend_tokenizer.to_str())
        vocabulary = content["model"]["vocab"]
        vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
        tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
        return tokenizer

    return load


def _shards(change: Callable[[list[Any]], list[Any]]) -> Apply:
    return with_result(_SHARDS, change)


def _one_seed(shards: list[Any]) -> list[Any]:
    return [dataclasses.replace(shard, noise_seed=0) for shard in shards]


def _ran(change: Callable[..., Any]) -> Apply:
    """`change(original, generator, spec, shard)` in place of running a shard."""

    def make(original: Any) -> Any:
        def run(generator: Any, spec: Any, shard: Any) -> Any:
            took_effect()
            return change(original, generator, spec, shard)

        return run

    return replaced((_RUN_LOCAL, make))


def _always_first_seed(original: Any, generator: Any, spec: Any, shard: Any) -> Any:
    return original(generator, spec, dataclasses.replace(shard, noise_seed=0))


def _completions_of_the_first_seed() -> Apply:
    """The second noise seed gets the responses of the first, and measurements of its own."""
    known: dict[Any, Any] = {}

    def run(original: Any, generator: Any, spec: Any, shard: Any) -> Any:
        result = original(generator, spec, shard)
        if shard.noise_level == 0:
            return result
        key = tuple(batch.step for batch in shard.batches)
        if shard.noise_seed == 0:
            known[key] = result.completions
            return result
        return dataclasses.replace(result, completions=known[key])

    return _ran(run)


def _completions_of_the_clean_pass() -> Apply:
    known: dict[Any, Any] = {}

    def run(original: Any, generator: Any, spec: Any, shard: Any) -> Any:
        result = original(generator, spec, shard)
        key = tuple(batch.step for batch in shard.batches)
        return dataclasses.replace(result, completions=known.setdefault(key, result.completions))

    return _ran(run)


def _swapped_batches(original: Any) -> Any:
    """Results of batches are joined in another order."""

    def joined(spec: Any, shards: Any, results: Any) -> Any:
        sizes = [len(result.completions[0]) for result in results]
        if len(results) < 2 or sizes[0] != sizes[-1]:
            results = [dataclasses.replace(r, completions=tuple(c[::-1] for c in r.completions)) for r in results]
        else:
            results = [results[-1], *results[1:-1], results[0]]
        took_effect()
        return original(spec, shards, results)

    return joined


def _exchanged_levels(original: Any) -> Any:
    """Responses at the two levels are stored under each other's."""

    def passes(*args: Any) -> Any:
        took_effect()
        found = list(original(*args))
        clean = next(result for result in found if result.noise_level == 0)
        noised = next(result for result in found if result.noise_level > 0)
        for result in found:
            if result is clean:
                yield dataclasses.replace(result, samples=noised.samples)
            elif result is noised:
                yield dataclasses.replace(result, samples=clean.samples)
            else:
                yield result

    return passes


@contextmanager
def _stop_ignored(study: Any) -> Any:
    """The stop text neither ends the generation nor the response."""
    with replaced(
        ("aqnpipe.generation.transformers_backend.StopText.is_complete", lambda original: lambda self, ids: False),
        ("aqnpipe.evaluation.stage.end_of_response", lambda original: lambda text, stop: (took_effect(), text)[1]),
    )(study):
        yield


def _example_lost(prompt_format: Any, examples: Any) -> tuple[Any, Any]:
    return prompt_format.model_copy(update={"num_examples": 0}), ()


def _example_changed(prompt_format: Any, examples: Any) -> tuple[Any, Any]:
    return prompt_format, tuple(Example(example.question, "#### 7") for example in examples)


def evaluating(name: str, what: str, apply: Any, cause: str = "", variant: str = "attacked") -> Sabotage:
    """A sabotage of an evaluation."""
    return Sabotage(name, what, apply, EVALUATE, COMPARE, cause=cause, variant=variant)


def asking(name: str, what: str, apply: Any, cause: str = "") -> Sabotage:
    """A sabotage of an evaluation with few-shot prompts and sampled responses."""
    return evaluating(name, what, apply, cause, "asked")


_ASKED = r"prompt|question|token ids"
_ANSWERED = r"decoded|response|token|generate"
_GOLD = r"gold|question|grade"
_SEEDS = r"seed|same"
_MODEL = r"logits|decoded|token|weights|model"

SABOTAGES = of_group(
    "evaluation",
    _ANSWERED,
    (
        evaluating(
            "prompts of other questions",
            "each question gets the prompt of the next",
            _prompts(lambda p: [*p[1:], p[0]]),
            _ASKED,
        ),
        evaluating(
            "one question asked twice",
            "the second gets the prompt of the first",
            _prompts(lambda p: [p[0], p[0], *p[2:]]),
            _ASKED,
        ),
        evaluating(
            "prompts cut on the left",
            "the first five tokens are missing",
            _prompts(lambda p: [i[5:] for i in p]),
            _ASKED,
        ),
        evaluating(
            "prompts cut on the right", "the last token is missing", _prompts(lambda p: [i[:-1] for i in p]), _ASKED
        ),
        evaluating(
            "prompts padded with visible tokens",
            "to one length, on the left",
            _prompts(lambda p: [[0] * (max(map(len, p)) - len(i)) + i for i in p]),
            _ASKED,
        ),
        evaluating(
            "prompts in lower case",
            "the questions are normalised",
            _questions(lambda q: [text.lower() for text in q]),
            _ASKED,
        ),
        evaluating(
            "prompts without line end",
            "the newline after a question is missing",
            _questions(lambda q: [text.rstrip(".?") for text in q]),
            _ASKED,
        ),
        evaluating(
            "another layout",
            "Question and Answer around each question",
            _format(lambda f, e: (f.model_copy(update={"layout": "question_answer"}), e)),
            _ASKED,
        ),
        asking(
            "instruction lost",
            "the prompt has none",
            _format(lambda f, e: (f.model_copy(update={"instruction": ""}), e)),
            _ASKED,
        ),
        asking("example lost", "the prompt has none", _format(_example_lost), _ASKED),
        asking("example with another answer", "the worked answer is another", _format(_example_changed), _ASKED),
        evaluating(
            "first token of prompts lost",
            "the forward reads the second twice",
            replaced((_FORWARD, _first_token_lost)),
            rf"{_ASKED}|{_ANSWERED}",
        ),
        evaluating(
            "other questions than the first",
            "the table is reversed and renamed",
            _problems(
                lambda t: t.with_columns(
                    t["question"].reverse().alias("question"), t["gold_answer"].reverse().alias("gold_answer")
                )
            ),
            _ASKED,
        ),
        evaluating(
            "gold answers of another table",
            "each question has that of the next",
            _problems(lambda t: t.with_columns(pl.col("gold_answer").shift(1).fill_null("3"))),
            _GOLD,
        ),
        evaluating(
            "responses of other questions",
            "each question gets the response to the next",
            _scored(lambda samples: [[*s[1:], s[0]] for s in samples]),
        ),
        evaluating(
            "responses in another order", "rows of a batch are joined in reverse", replaced((_JOINED, _swapped_batches))
        ),
        evaluating(
            "levels exchanged",
            "the clean responses are stored under 10 %",
            replaced(("aqnpipe.evaluation.stage.assembled_passes", _exchanged_levels)),
            rf"{_ANSWERED}|level",
        ),
        evaluating(
            "clean responses at all levels",
            "noised passes are measured and not stored",
            _completions_of_the_clean_pass(),
            rf"{_ANSWERED}|level|same|equal",
        ),
        evaluating(
            "responses remembered",
            "a cache by prompt answers for later passes",
            _remembered(),
            rf"{_ANSWERED}|same|equal",
        ),
        evaluating(
            "one noise seed twice",
            "the second noise seed runs as the first",
            _ran(_always_first_seed),
            rf"{_SEEDS}|key|draw",
        ),
        evaluating(
            "responses of the first noise seed", "stored for the second too", _completions_of_the_first_seed(), _SEEDS
        ),
        evaluating(
            "shards with one noise seed", "the list of shards has seed 0 alone", _shards(_one_seed), rf"{_SEEDS}|pass"
        ),
        evaluating("sampled in place of greedy", "at temperature 0.7", _sampled(temperature=0.7, seed=5)),
        evaluating("second best first token", "of every response", _second_at_first()),
        evaluating(
            "half of the vocabulary",
            "tokens from 200 on are never chosen",
            _greedy(lambda x: x.index_fill(-1, torch.arange(100, x.shape[-1]), -torch.inf) if x.shape[-1] > 100 else x),
        ),
        evaluating("repetition penalty", "tokens of the response lose three points", _penalty()),
        evaluating(
            "logits of the wrong place", "those before the last token of the prompt", replaced((_FORWARD, _wrong_place))
        ),
        evaluating(
            "end token ignored",
            "responses run to the limit",
            _decoded(is_finished=lambda original: lambda ids: False),
            rf"{_ANSWERED}|end",
        ),
        evaluating(
            "responses one token shorter", "the limit is 23", _decoded(limit=lambda n: n - 1), rf"{_ANSWERED}|limit"
        ),
        evaluating("responses of eight tokens", "the limit is 8", _decoded(limit=8), rf"{_ANSWERED}|limit"),
        evaluating("last token cut off", "of every response", _generated(_cut)),
        evaluating(
            "padding seen",
            "the mask of prompts shows their padding",
            replaced((f"{_BATCH}.__init__", _padding_seen)),
            rf"{_ANSWERED}|padding|mask",
        ),
        evaluating(
            "positions shifted",
            "each token is one place later",
            replaced((f"{_BATCH}.__init__", _positions_shifted)),
            rf"{_ANSWERED}|position",
        ),
        evaluating(
            "cache not reordered",
            "rows that move read the keys of others",
            replaced(("aqnpipe.generation.transformers_backend.InPlaceLayer.reorder_cache", _not_reordered)),
            rf"{_ANSWERED}|cache",
        ),
        evaluating(
            "mask not reordered",
            "rows that move have the mask of others",
            replaced((f"{_BATCH}.keep", _bias_not_reordered)),
            rf"{_ANSWERED}|mask",
        ),
        evaluating(
            "cache in bfloat16",
            "keys and values are rounded",
            replaced(("aqnpipe.generation.transformers_backend.InPlaceLayer.update", _rounded_cache)),
            rf"{_MODEL}|cache",
        ),
        evaluating(
            "stale cache",
            "one place of each prompt has the keys of another",
            replaced(("aqnpipe.generation.transformers_backend.InPlaceLayer.update", _stale_cache)),
            rf"{_MODEL}|cache",
        ),
        evaluating(
            "computed in bfloat16",
            "by autocast, with weights in float32",
            replaced((_FORWARD, _autocast)),
            rf"{_MODEL}|dtype|bfloat16",
        ),
        evaluating("another rope", "frequencies are a tenth lower", _model(_other_rope), _MODEL),
        evaluating("another epsilon", "of the norms", _model(_other_epsilon), _MODEL),
        evaluating("another scale of attention", "scores are divided by the width", _model(_other_scaling), _MODEL),
        evaluating(
            "checkpoint of step 1", "loaded under the name of step 2", replaced((_LOAD, _other_checkpoint)), _MODEL
        ),
        evaluating(
            "tokenizer of another model",
            "two digits have each other's ids",
            replaced(("aqnpipe.evaluation.stage.load_tokenizer", _tokenizer)),
            r"tokeni[sz]er|prompt|token",
        ),
        evaluating(
            "graded with the prompt",
            "the stored response begins with the question",
            replaced((_SCORE, _with_prompt)),
            rf"{_ANSWERED}|grade",
        ),
        evaluating(
            "responses stripped",
            "the text after #### alone is stored",
            _rows(lambda t: t.with_columns(pl.col("response").str.replace(r"(?s)^.*####", "####"))),
            rf"{_ANSWERED}|grade",
        ),
        evaluating(
            "question ids shifted",
            "rows have the ids of their neighbours",
            _rows(
                lambda t: t.with_columns(
                    question_id=pl.concat([t["question_id"].tail(1), t["question_id"].head(len(t) - 1)])
                )
            ),
            rf"{_ANSWERED}|{_GOLD}",
        ),
        evaluating(
            "lengths edited",
            "responses count as ended",
            _rows(lambda t: t.with_columns(finish_reason=pl.lit("stop"), response_tokens=pl.lit(5))),
        ),
        evaluating(
            "one scorer for all",
            "the strict grade is stored in every column",
            _rows(lambda t: t.with_columns(**{f"correct_{s}": pl.col("correct_last_number") for s in SCORERS})),
            r"grade|scorer",
        ),
        asking(
            "greedy in place of sampled",
            "the most probable token",
            _sampled(temperature=None, log_probabilities=False),
            rf"{_ANSWERED}|sampl|draw",
        ),
        asking(
            "sampled at another temperature",
            "1.2 in place of 0.8",
            _sampled(temperature=1.2),
            rf"{_ANSWERED}|temperature|draw",
        ),
        asking(
            "one sample twice",
            "both samples have the same draws",
            replaced((_SAMPLING, _same_draws)),
            r"sample|draw|same|token",
        ),
        asking(
            "draws of another seed",
            "the sampling has a seed of its own",
            _sampled(seed=lambda s: s.seed ^ 1),
            rf"{_ANSWERED}|seed|draw",
        ),
        asking("stop text ignored", "responses continue with another question", _stop_ignored, rf"{_ANSWERED}|stop"),
        asking(
            "samples exchanged",
            "the first sample is stored as the second",
            _scored(lambda samples: samples[::-1]),
            rf"{_ANSWERED}|sample",
        ),
    ),
)
