"""The tokenizer of the tiny models: one token per digit and per word of the generator, other text in smaller pieces."""

import re
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from aqnpipe.data import generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|endoftext|>"
# Qwen2's own split (a word with the space before it, one digit, punctuation, white space). Transformers rebuilds the
# tokenizer of any qwen2 model from this split and the merges alone, so AutoTokenizer and vLLM give the same tokens.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MARKER_MERGES = [("#", "#"), ("##", "##")]


def story_words() -> list[str]:
    """Return all words of the generator's texts, sorted."""
    tables = (*generated.SAME_PERSON.values(), *generated.OTHER_PERSON.values(), *generated.WORDED.values())
    templates = [
        *chain.from_iterable(tables),
        *(*generated.OPENINGS, *generated.GROUPS, generated.TOGETHER, *generated.DISTRACTORS),
        *(*generated.QUESTIONS, generated.TOGETHER_QUESTION),
    ]
    fillers = [*generated.NAMES, *generated.OBJECTS, *generated.CONTAINERS, *generated.PRONOUNS]
    texts = [re.sub(r"\{\w+\}", " ", template) for template in templates] + fillers
    return sorted({word for text in texts for word in re.findall(r"[A-Za-z]+", text)})


def build_merges() -> list[tuple[str, str]]:
    """Return the merges, in order, that make each word one token, letter by letter from its start.

    A text starts with a name, so names also exist without a space before them. Their merges come last: otherwise the
    letters of a name would be merged before the space in front of them.
    """
    words = [*(f"Ġ{word}" for word in story_words()), *generated.NAMES]
    letters = ((start, letter) for word in words for start, letter in zip(accumulate(word), word[1:], strict=False))
    return list(dict.fromkeys([*_MARKER_MERGES, *letters]))


def build_vocabulary() -> dict[str, int]:
    """Return token -> id: the special tokens, the 256 bytes, the results of the merges."""
    byte_symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = (left + right for left, right in build_merges())
    tokens = dict.fromkeys([PAD_TOKEN, EOS_TOKEN, *byte_symbols, *merged])
    return {token: token_id for token_id, token in enumerate(tokens)}


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Return the tokenizer; decode(encode(text)) == text for every text.

    There is no beginning-of-text token (Qwen2 has none) and no chat template. Special tokens spelled out in a text are
    tokenized as text.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab=build_vocabulary(), merges=build_merges()))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=2048,
    )
