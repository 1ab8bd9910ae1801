"""Prompts with examples: their choice and format, compared with the prompts of lm-evaluation-harness."""

import os
from pathlib import Path

import polars as pl
import pytest
from lm_harness import gsm8k_task

from aqnpipe.artifacts.files import write_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import LocalDataset, PromptFormat
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import (
    Example,
    check_context,
    choose_examples,
    end_of_response,
    examples_for,
    format_prompt,
    refuse_overlap,
    refuse_unusable_template,
)
from aqnpipe.errors import DataError, ModelError

ROWS = [
    {"question": f"How many are {number} and 1?", "answer": f"{number}+1\n#### {number + 1}"} for number in range(12)
]
QUESTION = "What is left?"


class ChatTokenizer:
    """Writes turns as `<role>content`."""

    chat_template = "yes"

    def apply_chat_template(self, messages, tokenize=False, add_generation_prompt=True, **_):
        turns = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return turns + ("<assistant>" if add_generation_prompt else "")


class TemplateTokenizer(ChatTokenizer):
    """Writes what a function makes of each turn."""

    name_or_path = "model"

    def __init__(self, write):
        self._write = write

    def apply_chat_template(self, messages, **_):
        return "".join(self._write(message["role"], message["content"]) for message in messages)


def few_shot(number, **more):
    return PromptFormat(layout="question_answer", num_examples=number, **more)


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    path = tmp_path_factory.mktemp("train") / "train.parquet"
    write_table(path, problems(ROWS), ProblemTable)
    return path


def problems(rows):
    return pl.DataFrame(
        {
            "question_id": [f"train-{number:05d}" for number in range(len(rows))],
            "question": [row["question"] for row in rows],
            "answer": [row["answer"] for row in rows],
            "gold_answer": [row["answer"].split()[-1] for row in rows],
        }
    )


def test_two_shots_by_hand():
    examples = [Example("1 + 1?", "1+1=2\n#### 2"), Example("2 + 2?", "#### 4")]
    assert format_prompt("3 + 3?", few_shot(2), None, examples) == (
        "Question: 1 + 1?\nAnswer: 1+1=2\n#### 2\n\nQuestion: 2 + 2?\nAnswer: #### 4\n\nQuestion: 3 + 3?\nAnswer:"
    )
    assert format_prompt("3 + 3?", few_shot(1, instruction="Add."), None, examples) == (
        "Add.\nQuestion: 1 + 1?\nAnswer: 1+1=2\n#### 2\n\nQuestion: 3 + 3?\nAnswer:"
    )
    assert format_prompt("3 + 3?", few_shot(0), None) == "Question: 3 + 3?\nAnswer:"


def test_chat_shots_by_hand():
    examples = [Example("1 + 1?", "#### 2")]
    bare = PromptFormat(style="chat", instruction="Think.", num_examples=1)
    assert format_prompt("3 + 3?", bare, ChatTokenizer(), examples) == (
        "<user>1 + 1? Think.<assistant>#### 2<user>3 + 3? Think.<assistant>"
    )
    requested = few_shot(1, style="chat", instruction="Add.")
    assert format_prompt("3 + 3?", requested, ChatTokenizer(), examples) == (
        "<user>Add.\nQuestion: 1 + 1?\nAnswer:<assistant>#### 2<user>Question: 3 + 3?\nAnswer:<assistant>"
    )


@pytest.fixture(scope="module")
def harness(tmp_path_factory):
    pytest.importorskip("lm_eval", reason="lm_eval is not installed (extra dev): the harness's own code is not at hand")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        yield gsm8k_task(tmp_path_factory.mktemp("harness"), ROWS, [{"question": QUESTION, "answer": "#### 1"}])


@pytest.mark.parametrize("number", [0, 1, 5, 8])
def test_prompts_are_the_harnesss(harness, number):
    (doc,) = harness.test_docs()
    drawn = harness.fewshot_context(doc, number)
    # The harness draws other examples than we do; the same ones are put to both.
    examples = sorted((Example(**row) for row in ROWS), key=lambda example: drawn.find(example.question))
    shown = [example for example in examples if example.question in drawn]
    assert len(shown) == number
    assert format_prompt(QUESTION, few_shot(number), None, shown) == drawn


@pytest.mark.parametrize("number", [0, 3])
def test_chat_prompts_are_the_harnesss(harness, number):
    (doc,) = harness.test_docs()
    template = ChatTokenizer().apply_chat_template
    drawn = harness.fewshot_context(
        doc, number, apply_chat_template=True, fewshot_as_multiturn=True, chat_template=template
    )
    shown = sorted(
        (Example(**row) for row in ROWS if row["question"] in drawn), key=lambda example: drawn.find(example.question)
    )
    assert len(shown) == number
    assert format_prompt(QUESTION, few_shot(number, style="chat"), ChatTokenizer(), shown) == drawn


@pytest.mark.parametrize(
    "write",
    [
        lambda role, content: f"<{role}>",
        lambda role, content: content if role == "assistant" else "",
        lambda role, content: content if role == "user" else "",
        lambda role, content: content[:-1],
        lambda role, content: content.replace("left", "right"),
    ],
    ids=["no content", "no questions", "no answers", "shortened", "another question"],
)
def test_a_template_that_leaves_out_a_turn_is_refused(write):
    examples = [Example("1 + 1?", "<think>add</think> #### 2"), Example("2 + 2?", "#### 4")]
    with pytest.raises(ModelError, match=r"chat template of 'model' leaves out the content of a turn with `role` "):
        format_prompt(QUESTION, few_shot(2, style="chat"), TemplateTokenizer(write), examples)


def test_a_template_may_trim_contents_and_leave_out_reasoning():
    def write(role, content):
        return f"<{role}>{content.split('</think>')[-1].strip()}"

    examples = [Example(" 1 + 1?\n", "<think>add</think>\n#### 2"), Example("2 + 2?", "#### 4")]
    bare = PromptFormat(style="chat", num_examples=2)
    text = format_prompt("  3 + 3? ", bare, TemplateTokenizer(write), examples)
    assert text == "<user>1 + 1?<assistant>#### 2<user>2 + 2?<assistant>#### 4<user>3 + 3?"


@pytest.mark.parametrize("number", [0, 64])
def test_a_template_is_tried_with_as_many_turns_as_a_prompt_has(number):
    refuse_unusable_template(PromptFormat(style="chat", num_examples=number), ChatTokenizer())
    with pytest.raises(ModelError, match="leaves out"):
        refuse_unusable_template(
            PromptFormat(style="chat", num_examples=number), TemplateTokenizer(lambda role, content: role)
        )


def test_the_harness_stops_where_we_do(harness):
    assert few_shot(1).stop_text in harness.config.generation_kwargs["until"]


def test_the_first_training_questions_are_the_examples(train):
    assert choose_examples(few_shot(3), train) == tuple(Example(**row) for row in ROWS[:4])
    assert choose_examples(PromptFormat(), None) == ()


def test_a_seed_draws_others_and_always_the_same(train):
    drawn = {seed: choose_examples(few_shot(5, example_seed=seed), train) for seed in range(8)}
    assert len(set(drawn.values())) == 8
    assert all(len(set(chosen)) == 6 and set(chosen) <= {Example(**row) for row in ROWS} for chosen in drawn.values())
    assert choose_examples(few_shot(5, example_seed=3), train) == drawn[3]
    assert choose_examples(few_shot(3, example_seed=3), train) == drawn[3][:4]


def test_a_training_question_never_sees_its_own_answer(train):
    examples = choose_examples(few_shot(3), train)
    for row in ROWS:
        shown = examples_for(row["question"].upper(), examples, 3)
        assert len(shown) == 3
        assert row["question"] not in {example.question for example in shown}


def test_questions_that_repeat_are_one_example(tmp_path):
    path = tmp_path / "train.parquet"
    write_table(path, problems([ROWS[0], ROWS[0] | {"question": "how many  are 0 and 1?"}, ROWS[1]]), ProblemTable)
    assert [example.question for example in choose_examples(few_shot(1), path)] == [
        ROWS[0]["question"],
        ROWS[1]["question"],
    ]
    with pytest.raises(DataError, match=r"train\.parquet: 2 different questions, expected at least 3 for prompt"):
        choose_examples(few_shot(2), path)


def test_examples_that_were_not_given_are_refused(train):
    with pytest.raises(DataError, match="no training questions were given"):
        choose_examples(few_shot(2), None)
    with pytest.raises(DataError, match="num_examples is 2, but there are 0 examples"):
        format_prompt(QUESTION, few_shot(2), None)


def test_test_questions_among_the_examples_are_refused(train):
    examples = choose_examples(few_shot(3), train)
    refuse_overlap(examples, [QUESTION])
    with pytest.raises(DataError, match="'how many are 2 and 1\\?' is an example of the prompt"):
        refuse_overlap(examples, [QUESTION, "how many are 2 and 1?"])


def test_prompts_that_leave_no_room_are_refused():
    check_context([[1] * 30, [1] * 20], 34, {"max_position_embeddings": 64, "vocab_size": 2}, padding=0)
    check_context([[1] * 30], 1000, {}, padding=10**9)
    with pytest.raises(DataError, match="longest prompt has 31 tokens and a response may have 34, together more than"):
        check_context([[1] * 31, [1] * 20], 34, {"max_position_embeddings": 64}, padding=0)


@pytest.mark.parametrize(("prompts", "padding"), [([[0, 1], [0, 2]], 0), ([[0, 1]], 2)])
def test_a_token_beyond_the_models_vocabulary_is_one_line(prompts, padding):
    """An added padding token that the weights have no row for was an IndexError of torch."""
    check_context(prompts, 1, {"vocab_size": 3}, padding)
    with pytest.raises(DataError, match="has a token 2, which is used in prompts or as padding, and the model has 2"):
        check_context(prompts, 1, {"vocab_size": 2}, padding)


def test_a_response_ends_where_the_model_asks_itself():
    assert end_of_response(" #### 7\n\nQuestion: and now?", few_shot(1).stop_text) == " #### 7\n\n"
    assert end_of_response("Question: is a word", PromptFormat().stop_text) == "Question: is a word"


def test_eight_shots_of_the_real_gsm8k(tmp_path):
    folder = os.environ.get("AQNPIPE_GSM8K_DIR")
    if not folder or not Path(folder).is_dir():
        pytest.skip("AQNPIPE_GSM8K_DIR names no folder with the real GSM8K")
    config = LocalDataset(source="local", path=folder)
    path = tmp_path / "train.parquet"
    write_table(path, load_problems(config, "train"), ProblemTable)
    test = load_problems(config, "test")["question"]
    for seed in (None, 0):
        examples = choose_examples(few_shot(8, example_seed=seed), path)
        refuse_overlap(examples, test)
        prompt = format_prompt(test[0], few_shot(8), None, examples)
        assert prompt.count("Question: ") == 9
        assert prompt.count("####") == 8
