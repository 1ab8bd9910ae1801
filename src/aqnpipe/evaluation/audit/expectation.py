"""Expected evaluation: questions, prompts, golds and end of responses, read again from the files of the study."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from aqnpipe.artifacts.files import read_table
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.data.examples import choose_examples
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.evaluation.audit.facts import tokens_digest
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.reference.decoder import without_padding


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
        """Read the files of an evaluation."""
        problems = read_table(test_problems, ProblemTable)[: spec.evaluation.num_questions]
        tokenizer = load_tokenizer(model_dir)
        examples = choose_examples(spec.prompt, train_problems)
        prompts = prompt_token_ids(problems["question"], spec.prompt, tokenizer, examples)
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
