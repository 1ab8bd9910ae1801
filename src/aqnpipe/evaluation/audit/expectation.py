"""Expected evaluation: questions, prompts, golds and end of responses, read again from the files of the study.

The prompts are put together here a second time, from the text of `PromptFormat` alone, so that an error in
`data.prompts`, `data.examples` or the stage shows as a difference.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import ModelError
from aqnpipe.evaluation.audit.facts import tokens_digest, without_padding
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.noise.audit.random_numbers import derived_key


@dataclass(frozen=True)
class Expectation:
    """An evaluation as its spec and its files define it; `tokenizer` is that of the checkpoint's folder."""

    spec: EvaluationSpec
    question_ids: tuple[str, ...]
    golds: tuple[str, ...]
    prompts: tuple[str, ...]
    tokenizer: Any

    @classmethod
    def of(
        cls, spec: EvaluationSpec, model_dir: Path, test_problems: Path, train_problems: Path | None
    ) -> "Expectation":
        """Read the files of an evaluation.

        Raises ModelError if the tokenizer is not that of the folder, or if its chat template leaves a question out.
        """
        problems = read_table(test_problems, ProblemTable)[: spec.evaluation.num_questions]
        tokenizer = _own_tokenizer(model_dir)
        train = read_table(train_problems, ProblemTable) if train_problems and spec.prompt.num_examples else None
        texts = _Texts(spec.prompt, _examples(spec.prompt, train))
        template = _chat_template(model_dir)
        prompts = [_token_ids(texts, question, spec.prompt, tokenizer, template) for question in problems["question"]]
        return cls(
            spec=spec,
            question_ids=tuple(problems["question_id"]),
            golds=tuple(problems["gold_answer"]),
            prompts=tuple(tokens_digest(without_padding(ids, tokenizer.pad_token_id)) for ids in prompts),
            tokenizer=tokenizer,
        )

    @property
    def end_token(self) -> int:
        """The token that ends a response."""
        return int(self.tokenizer.eos_token_id)

    @cached_property
    def stop_text(self) -> str | None:
        """The text that ends a response; None if the prompt's layout has none."""
        return "Question:" if self.spec.prompt.layout == "question_answer" else None

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the whole text of a response, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


class _Texts:
    """The parts of prompts: `turns` of (question, answer) and the final question, which has no answer."""

    def __init__(self, prompt: PromptFormat, examples: Sequence[tuple[str, str]]) -> None:
        self._prompt, self._examples = prompt, examples

    def turns(self, question: str) -> list[tuple[str, str | None]]:
        """Return the examples of a question, and the question."""
        others = [pair for pair in self._examples if _same(pair[0]) != _same(question)]
        return [*others[: self._prompt.num_examples], (question, None)]

    def plain(self, question: str) -> str:
        """Return a prompt of style plain."""
        prompt = self._prompt
        lines = [prompt.instruction, "\n"] if prompt.instruction else []
        for asked, answer in self.turns(question):
            lines += [f"Question: {asked}\nAnswer:"] if prompt.layout == "question_answer" else [asked, "\n"]
            lines += [] if answer is None else [" ", answer, "\n\n"]
        return "".join(lines)

    def chat(self, question: str) -> list[dict[str, str]]:
        """Return the messages of a prompt of style chat."""
        instruction = self._prompt.instruction
        messages: list[dict[str, str]] = []
        for asked, answer in self.turns(question):
            if self._prompt.layout == "bare":
                content = " ".join(filter(None, (asked, instruction)))
            else:
                first = f"{instruction}\n" if instruction and not messages else ""
                content = f"{first}Question: {asked}\nAnswer:"
            messages.append({"role": "user", "content": content})
            if answer is not None:
                messages.append({"role": "assistant", "content": answer})
        return messages


def _token_ids(texts: _Texts, question: str, prompt: PromptFormat, tokenizer: Any, template: str | None) -> list[int]:
    if prompt.style == "plain":
        return list(tokenizer(texts.plain(question))["input_ids"])
    settings = {"chat_template": template, "add_generation_prompt": True}
    messages = texts.chat(question)
    if question.strip() not in tokenizer.apply_chat_template(messages, tokenize=False, **settings):
        raise ModelError(f"the chat template gives a prompt without its question, {question[:80]!r}")
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **settings))


def _examples(prompt: PromptFormat, train: pl.DataFrame | None) -> list[tuple[str, str]]:
    """Return the first distinct training questions, or drawn ones, and their answers: one more than prompts show."""
    if train is None:
        return []
    order = list(range(len(train)))
    if prompt.example_seed is not None:
        keys = [derived_key(prompt.example_seed, "few_shot_examples", row) for row in order]
        order.sort(key=keys.__getitem__)
    found: dict[str, tuple[str, str]] = {}
    for row in order:
        question, answer = train["question"][row], train["answer"][row]
        if _same(question) not in found:
            found[_same(question)] = (question, answer)
        if len(found) == prompt.num_examples + 1:
            break
    return list(found.values())


def _same(question: str) -> str:
    """Return the form in which two questions count as the same: lower case, single spaces."""
    return " ".join(question.lower().split())


def _own_tokenizer(model_dir: Path) -> Any:
    """Load the tokenizer again; raise ModelError unless its vocabulary is that of the folder's tokenizer.json."""
    tokenizer = load_tokenizer(model_dir)
    path = model_dir / "tokenizer.json"
    if path.is_file():
        vocabulary = json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")
        # Unigram tokenizers list theirs, and have no numbers to compare.
        known = tokenizer.get_vocab() if isinstance(vocabulary, dict) else {}
        wrong = [token for token in known if known[token] != vocabulary.get(token, known[token])]
        wrong += [token for token in vocabulary if token not in known] if known else []
        if wrong:
            raise ModelError(
                f"model {str(model_dir)!r}: token {wrong[0]!r} is {known.get(wrong[0])} in the tokenizer in memory, "
                f"expected {vocabulary[wrong[0]]} as in tokenizer.json: the tokenizer of another model"
            )
    return tokenizer


def _chat_template(model_dir: Path) -> str | None:
    """Return the chat template in the files of a model; None if they name none, or several."""
    own = model_dir / "chat_template.jinja"
    if own.is_file():
        return own.read_text(encoding="utf-8")
    path = model_dir / "tokenizer_config.json"
    stored = json.loads(path.read_text(encoding="utf-8")).get("chat_template") if path.is_file() else None
    return stored if isinstance(stored, str) else None
