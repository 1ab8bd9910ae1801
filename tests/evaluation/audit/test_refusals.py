"""Accidents in the code of an evaluation: each is refused in one line that names its cause, and nothing is written.

Sabotages of tests/attacks are not repeated here.
"""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import aqnpipe.evaluation.stage as stage
from aqnpipe.artifacts.files import read_json, read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import StageFiles
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.stage import prepare_data
from aqnpipe.errors import AqnpipeError
from aqnpipe.evaluation import shards
from aqnpipe.evaluation.shards import ShardRunner, local_shard_runner
from aqnpipe.evaluation.stage import evaluate
from aqnpipe.generation import transformers_backend
from aqnpipe.generation.noisy_passes import TransformersPasses
from aqnpipe.generation.transformers_backend import InPlaceLayer, TransformersBackend
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.noise.receipts.receipt import EvaluationReceipts

NUM_QUESTIONS = 12
TINY = builtin_folder("tiny")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for split in ("train", "test"):
        prepare_data({"source": "generated", "num_train": 6, "num_test": NUM_QUESTIONS + 3}, split, folder / split)
    return folder


@pytest.fixture
def run(data, tmp_path):
    def evaluated(prompt=None, attention="sdpa", open_runner=local_shard_runner, **evaluation):
        settings = {
            "noise_levels": (0.0, 0.1),
            "noise_seeds": (3, 4),
            "max_response_tokens": 40,
            "batch_size": 12,
            "num_questions": NUM_QUESTIONS,
        }
        spec = EvaluationSpec(
            model_role="base", arm_id="a", seed=0, step=1, dtype="float32", attention=attention, prompt=prompt or {},
            evaluation=settings | evaluation,
        )  # fmt: skip
        outputs = StageFiles(tmp_path / "t.parquet", tmp_path / "r.json", tmp_path / "run.json")
        evaluate(spec, TINY, data / "test", outputs, lambda _: None, data / "train", open_runner)
        return outputs

    return evaluated


SAMPLED = {"sampling": {"temperature": 1.0, "num_samples": 2}}
FEW_SHOT = {"layout": "question_answer", "num_examples": 2, "instruction": "Solve it."}


def wrapped(original, change):
    """`original` with its result changed."""
    return lambda *args, **kwargs: change(original(*args, **kwargs))


_generate, _joined, _run_shard, _score = TransformersBackend.generate, shards._joined, shards.run_shard, stage.score
_prompt_token_ids, _sampling_of, _shards_of = stage.prompt_token_ids, shards.sampling_of, shards.shards_of


def shortened(completions):
    return [replace(one, token_ids=one.token_ids[:-1]) for one in completions]


def rolled(items):
    return [*items[1:], items[0]]


def shuffled_questions(found):
    return [
        replace(shard, batches=tuple(replace(one, questions=tuple(rolled(one.questions))) for one in shard.batches))
        for shard in found
    ]


def other_rows_answers(result):
    """Swap the responses of two questions in one noisy pass."""
    samples = [list(sample) for sample in result.samples]
    if result.noise_seed == 4:
        samples[0][0], samples[0][1] = samples[0][1], samples[0][0]
    return replace(result, samples=samples)


def labelled(problems, samples, tokenizer, level, *args):
    return _score(problems, samples, tokenizer, 0.1 - level, *args)


def only_under_noise(self, prompts, sampling, share_prefix=False):
    found = _generate(self, prompts, sampling, share_prefix=share_prefix)
    return found if share_prefix else rolled(found)


def sampled_in_one_pass(spec, noise_seed, sample, batch):
    found = _sampling_of(spec, noise_seed, sample, batch)
    return replace(found, temperature=1.0, seed=7) if noise_seed == 4 else found


def at(**changes):
    return wrapped(_sampling_of, lambda sampling: replace(sampling, **changes))


def same_seed(spec, noise_seed, sample, batch):
    return _sampling_of(spec, noise_seed, 0, batch)


def first_example_missing(questions, prompt_format, tokenizer, examples):
    return _prompt_token_ids(questions, prompt_format, tokenizer, examples[1:])


def without_instruction(questions, prompt_format, tokenizer, examples):
    return _prompt_token_ids(questions, prompt_format.model_copy(update={"instruction": ""}), tokenizer, examples)


_reorder, _keep, _init = (
    InPlaceLayer.reorder_cache,
    transformers_backend._Batch.keep,
    transformers_backend._Batch.__init__,
)


def no_reorder(self, beam_idx):
    self._show(len(beam_idx), self.keys.shape[2])


def no_reorder_in_one_layer(self, beam_idx):
    (no_reorder if self._number == 1 else _reorder)(self, beam_idx)


def rows_not_reordered(self, active):
    rows = list(self.rows)
    index = _keep(self, active)
    self.rows = rows[: len(active)]
    return index


def mask_of_ones(self, *args):
    _init(self, *args)
    self._bias.zero_()


def one_prefix(self, tokens):
    for buffer in self._buffers:
        buffer[1:, :, : tokens - 1] = buffer[:1, :, 1:tokens]


CASES = {
    "questions shuffled against prompts": (
        (stage, "shards_of", wrapped(_shards_of, shuffled_questions)),
        r"for question test-\d+ the model read the prompt of question test-\d+",
    ),
    "responses in another order under noise": (
        (TransformersBackend, "generate", only_under_noise),
        r"level 0\.1.*is not the one",
    ),
    "responses of two rows swapped": (
        (shards, "_joined", wrapped(_joined, other_rows_answers)),
        "noise seed 4: question test-.* is not the one",
    ),
    "sampled in one pass": (
        (shards, "sampling_of", sampled_in_one_pass),
        "noise seed 4: .*is not the most probable one; the study decodes greedily",
    ),
    "rows labelled with another level": ((stage, "score", labelled), "labelled with another noise level"),
}


def refused(run, tmp_path, cause, **settings):
    with pytest.raises(AqnpipeError, match=cause) as error:
        run(**settings)
    assert "\n" not in str(error.value)
    assert not [path for path in tmp_path.iterdir() if path.suffix in (".json", ".parquet")]


@pytest.mark.parametrize("name", CASES)
def test_an_accident_is_refused(run, tmp_path, monkeypatch, name):
    target, cause = CASES[name]
    monkeypatch.setattr(*target)
    refused(run, tmp_path, cause)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        (
            "temperature",
            at(temperature=0.7),
            r"sampled at temperature 0\.[\d. to]*; the study samples at temperature 1",
        ),
        ("greedy", at(temperature=None), "decoded greedily; the study samples at temperature 1"),
        ("the same draws for all samples", same_seed, "another sample: of another seed, .*; the study samples"),
    ],
)
def test_other_draws_are_refused(run, tmp_path, monkeypatch, name, value, cause):
    monkeypatch.setattr(shards, "sampling_of", value)
    refused(run, tmp_path, cause, **SAMPLED)


@pytest.mark.parametrize("value", [first_example_missing, without_instruction])
def test_other_prompts_are_refused(run, tmp_path, monkeypatch, value):
    monkeypatch.setattr(stage, "prompt_token_ids", value)
    refused(run, tmp_path, "the model read another prompt than its text", prompt=FEW_SHOT, max_response_tokens=8)


def test_a_response_behind_the_stop_text_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr("aqnpipe.config.dataset.PromptFormat.stop_text", property(lambda self: None))
    # The words of the tiny model: it writes "####" often, "Question:" never.
    monkeypatch.setattr("aqnpipe.evaluation.audit.Judge.stop_text", "#### ")
    refused(run, tmp_path, "goes on behind the stop text '#### '")


@pytest.mark.parametrize(
    ("target", "value", "cause"),
    [
        (
            (InPlaceLayer, "reorder_cache"),
            no_reorder,
            "with the cached keys of another row, when rows had left the batch",
        ),
        (
            (InPlaceLayer, "reorder_cache"),
            no_reorder_in_one_layer,
            "another logit|cached keys of another|is not the one",
        ),
        ((transformers_backend._Batch, "keep"), rows_not_reordered, "tokens is not the one"),
    ],
)
def test_a_decoder_that_mixes_rows_up_is_refused(run, tmp_path, monkeypatch, target, value, cause):
    monkeypatch.setattr(*target, value)
    refused(run, tmp_path, cause, noise_levels=(0.0,))


@pytest.mark.parametrize(
    ("target", "value", "cause"),
    [
        ((transformers_backend._Batch, "__init__"), mask_of_ones, "trial without noise, row .* another logit"),
        ((InPlaceLayer, "reorder_cache"), no_reorder, "trial without noise, row .* cached keys of another row"),
    ],
)
def test_a_wrong_decoder_is_refused_without_a_clean_pass(run, tmp_path, monkeypatch, target, value, cause):
    monkeypatch.setattr(*target, value)
    refused(run, tmp_path, cause, noise_levels=(0.1,))


def test_what_another_process_hides_is_recorded_and_its_responses_are_still_judged(run, monkeypatch):
    def opened(*args):
        with local_shard_runner(*args) as runner:
            yield ShardRunner(
                {"backend": "vllm"}, lambda found: (replace(result, facts=()) for result in runner.run(found))
            )

    receipts = read_json(run(open_runner=contextmanager(opened)).receipt, EvaluationReceipts)
    assert "prompts as the model reads them" in receipts.facts.unchecked
    assert receipts.problems() == []
    monkeypatch.setattr(TransformersBackend, "generate", wrapped(_generate, shortened))
    with pytest.raises(AqnpipeError, match="was cut after"):
        run(open_runner=contextmanager(opened))


def test_a_prefix_of_other_tokens_is_refused(run, tmp_path, monkeypatch):
    # Rounding, which differs between processors, decides whether a token or only its logit is another one first.
    monkeypatch.setattr(InPlaceLayer, "repeat_first_row", one_prefix)
    refused(
        run,
        tmp_path,
        "another logit|is not the most probable one",
        prompt=FEW_SHOT,
        noise_levels=(0.0,),
        max_response_tokens=8,
    )


def test_draws_of_noise_that_ignore_the_seed_are_refused(run, tmp_path, monkeypatch):
    from aqnpipe.machine import machine

    derive = machine.derive_seed
    monkeypatch.setattr(machine, "derive_seed", lambda seed, *rest: derive(0, *rest))
    refused(run, tmp_path, "recomputed values are not the requested ones|noise seeds 3 and 4 gave the same noise")


def test_the_questions_must_be_the_first_ones(run, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "read_table", lambda *args: read_table(*args)[1:])
    refused(run, tmp_path, "the model read the prompt of question|another prompt")


def test_golds_of_another_table_are_refused(run, tmp_path, monkeypatch):
    def other_golds(path, schema):
        table = read_table(path, schema)
        return table.with_columns(gold_answer=pl.Series(rolled(table["gold_answer"].to_list())))

    monkeypatch.setattr(stage, "read_table", other_golds)
    refused(run, tmp_path, "stored grade is not that of its response and gold answer")


def test_another_checkpoint_is_refused(run, tmp_path, monkeypatch):
    from aqnpipe.evaluation import shards

    opened = shards.open_generator
    other = builtin_folder("tiny-comparison")
    monkeypatch.setattr(
        shards, "open_generator", lambda generation, folder, *a, **k: opened(generation, other, *a, **k)
    )
    refused(run, tmp_path, "in memory is not the weight of the checkpoint")


def test_an_unobserved_backend_of_transformers_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "run_shard", lambda *args: replace(_run_shard(*args), facts=()))
    monkeypatch.setattr("aqnpipe.evaluation.shards.run_shard", shards.run_shard)
    refused(run, tmp_path, "0 of 1 batches were observed")


def test_another_tokenizer_is_refused(run, tmp_path, monkeypatch):
    def swapped(folder):
        tokenizer = load_tokenizer(folder)
        tokenizer.eos_token, tokenizer.pad_token = tokenizer.pad_token, tokenizer.eos_token
        return tokenizer

    monkeypatch.setattr("aqnpipe.evaluation.shards.load_tokenizer", swapped)
    refused(run, tmp_path, "the tokenizer of another model")


def test_the_pass_of_another_generator_is_refused(run, tmp_path, monkeypatch):
    """The keys of the noise are shifted by one batch in the generator itself."""
    whole = TransformersPasses.generate
    monkeypatch.setattr(
        TransformersPasses, "generate", lambda self, p, s, key: whole(self, p, s, key._replace(step=key.step + 1))
    )
    refused(
        run, tmp_path, "keyed by noise seed 3, step 1, expected noise seed 3, step 0|the key of its noise is used twice"
    )


def test_a_most_probable_token_that_is_not(run, tmp_path, monkeypatch):
    monkeypatch.setattr(transformers_backend, "_most_probable", lambda logits, rows: logits.topk(2).indices[:, 1])
    refused(run, tmp_path, "token 1 is not the most probable one; the study decodes greedily", noise_levels=(0.0,))


def test_the_table_of_problems_is_the_one_of_the_study(data):
    assert len(read_table(data / "test", ProblemTable)) == NUM_QUESTIONS + 3
