import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import EOS_TOKEN, PAD_TOKEN, build_tokenizer, story_words
from transformers import AutoTokenizer

from aqnpipe.data.generated import Difficulty, take_problems
from aqnpipe.models.loading import load_tokenizer

TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    return folder


@given(st.text() | st.text(alphabet="Tom has 12.\n#<|>0xpad é"))
def test_any_text_round_trips(text):
    ids = TOKENIZER(text).input_ids
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_and_byte_names_in_a_text_are_text():
    text = f"{PAD_TOKEN} {EOS_TOKEN} <0x41> e\u0301 \u00e9 \r\n\t\x00 漢字 😀"
    ids = TOKENIZER(text).input_ids
    assert not {TOKENIZER.pad_token_id, TOKENIZER.eos_token_id} & set(ids)
    assert TOKENIZER.decode(ids) == text


def test_story_text_is_whole_words_and_single_digits():
    tokens = TOKENIZER.convert_ids_to_tokens(TOKENIZER("Mia has 12 eggs.\n12/3=4\n#### 4").input_ids)
    assert tokens == [
        *("Mia", "Ġhas", "Ġ", "1", "2", "Ġeggs", ".", "Ċ"),
        *("1", "2", "/", "3", "=", "4", "Ċ", "####", "Ġ", "4"),
    ]


def test_every_story_word_is_one_token():
    assert all(len(TOKENIZER(f" {word}").input_ids) == 1 for word in story_words())
    assert len(story_words()) > 60


def test_lengths_are_those_that_the_tiny_models_were_planned_for():
    problems = take_problems(0, "train", Difficulty(), 400)
    prompts = [len(TOKENIZER(problem.question + "\n").input_ids) for problem in problems]
    answers = [len(TOKENIZER(problem.answer).input_ids) + 1 for problem in problems]
    assert 30 < sum(prompts) / 400 < 40
    assert 17 < sum(answers) / 400 < 21
    assert max(answers) <= 30


def test_loaded_tokenizer_is_the_saved_one(saved):
    loaded = load_tokenizer(saved)
    text = "Zoe's e\u0301 #### 12"
    assert loaded(text).input_ids == TOKENIZER(text).input_ids
    assert loaded.decode(loaded(text).input_ids) == text
    assert (loaded.padding_side, loaded.pad_token, loaded.eos_token) == ("left", PAD_TOKEN, EOS_TOKEN)
    batch = loaded(["Tom has", "Tom"], padding=True).input_ids
    assert batch[1][0] == loaded.pad_token_id


def test_auto_tokenizer_agrees_on_plain_text(saved):
    """AutoTokenizer, as used by vLLM, opens any qwen2 tokenizer with its own class from vocabulary and merges."""
    auto = AutoTokenizer.from_pretrained(saved, local_files_only=True)
    texts = [problem.question + "\n" + problem.answer for problem in take_problems(1, "test", Difficulty(), 100)]
    texts.append("Natalia sold 48/2 = <<48/2=24>>24 clips; she'd earn $1,250.50 (20%).\n#### 72")
    for text in texts:
        assert auto(text).input_ids == TOKENIZER(text).input_ids
