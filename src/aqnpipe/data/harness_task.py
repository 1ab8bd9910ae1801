"""A task of lm-evaluation-harness: its questions, and its own grading of stored answers.

The harness asks a model for one text per question, or for the log-likelihood of every choice. Both are stored as the
response to the question: the text as it is, the choices as JSON `[[choice, log-likelihood, is the greedy one], ...]`.
From that the task's filters and metric grade a response again at any time, without the model.
"""

import json
from collections.abc import Sequence
from typing import Any

import polars as pl

from aqnpipe.config.dataset import LmEvalDataset
from aqnpipe.config.validation_messages import did_you_mean, one_of
from aqnpipe.data.scoring import Graded
from aqnpipe.errors import ConfigError, DataError, first_line

_USUAL_METRICS = ("acc", "exact_match")
_NO_ANSWER = "[invalid]"
"""Result of the harness's filters where they find nothing."""


class HarnessTask:
    """A loaded task. `documents`: its questions in the harness's order, which numbers them.

    `filter_name`: the filter whose results count. `metric_name`: the metric that decides which responses are right.
    """

    def __init__(self, settings: LmEvalDataset, task: Any, documents: list[Any]) -> None:
        self.settings = settings
        self._task = task
        self.documents = documents
        self.is_choice = task.config.output_type == "multiple_choice"
        self.metric_name = _metric_of(task, settings)
        self.filter_name = _filter_of(task, settings)

    @classmethod
    def load(cls, settings: LmEvalDataset) -> "HarnessTask":
        """Load a task; ConfigError if the harness is missing or the settings do not fit, DataError if it fails."""
        manager = task_manager(settings)
        if settings.task not in manager.all_tasks:
            there = f"in {settings.include_path}" if settings.include_path else "of lm-evaluation-harness"
            near = did_you_mean(settings.task, manager.all_tasks)
            raise ConfigError(f"dataset.task: found {settings.task!r}{near}, expected a task {there}")
        try:
            tasks = list(manager.load([settings.task])["tasks"].values())
            documents = list(tasks[0].eval_docs) if len(tasks) == 1 else []
        except (Exception, SystemExit) as error:
            # A task may run code of its own, and reads its questions from anywhere.
            raise DataError(
                f"task {settings.task} cannot be loaded ({type(error).__name__}: {first_line(error)})"
            ) from error
        if len(tasks) != 1:
            raise ConfigError(
                f"dataset.task: found {settings.task}, a group of {len(tasks)} tasks, expected a single task"
            )
        _refuse_unusable(tasks[0], settings)
        return cls(settings, tasks[0], documents)

    def problems(self) -> pl.DataFrame:
        """Return the questions as rows of `ProblemTable`, named by their numbers."""
        golds = [self._gold(document) for document in self.documents]
        return pl.DataFrame(
            {
                "question_id": [question_id(number) for number in range(len(golds))],
                "question": [str(self._task.doc_to_text(document)) for document in self.documents],
                "answer": golds,
                "gold_answer": golds,
            },
            schema=dict.fromkeys(("question_id", "question", "answer", "gold_answer"), pl.String),
        )

    def response_of(self, number: int, responses: Sequence[Any]) -> str:
        """Return the response to store for what the harness got: a text, or (log-likelihood, is greedy) per request."""
        if not self.is_choice:
            return str(responses[0])
        choices = self._task.doc_to_choice(self.documents[number])
        names = [choices[place % len(choices)] for place in range(len(responses))]
        pairs = zip(names, responses, strict=True)
        return json.dumps([[name, float(value), bool(greedy)] for name, (value, greedy) in pairs], ensure_ascii=False)

    def grade(self, number: int, response: str) -> Graded:
        """Grade a stored response to question `number` with the task's filter and metric.

        Raises DataError if the response is not one of this task, or the metric is neither 0 nor 1.
        """
        from lm_eval.api.instance import Instance

        kind = "loglikelihood" if self.is_choice else "generate_until"
        document, given = self.documents[number], self._given(response, number)
        instances = [Instance(kind, document, ("", ""), place, resps=[one]) for place, one in enumerate(given)]
        chosen = next(each for each in self._task._filters if each.name == self.filter_name)
        chosen.apply(instances)
        filtered = [instance.filtered_resps[self.filter_name] for instance in instances]
        found = self._task.process_results(document, filtered).get(self.metric_name)
        if found not in (0, 1):
            raise DataError(
                f"task {self.settings.task}: metric {self.metric_name} is {found!r} for question {number}, expected 0 "
                "or 1: name another one as dataset.metric"
            )
        return Graded(self._answer(document, given, filtered), bool(found))

    def _given(self, response: str, number: int) -> list[Any]:
        if not self.is_choice:
            return [response]
        try:
            return [(float(value), bool(greedy)) for _, value, greedy in json.loads(response)]
        except (ValueError, TypeError) as error:
            raise DataError(
                f"task {self.settings.task}: the response to question {number} has no log-likelihoods of choices"
            ) from error

    def _answer(self, document: Any, given: Sequence[Any], filtered: Sequence[Any]) -> str | None:
        """Return the number of the most likely choice, as the metric counts, or the text that the filter found."""
        if self.is_choice:
            values = self._values(self._task.doc_to_choice(document), [value for value, _ in given])
            return str(values.index(max(values)))
        text = str(filtered[0]).strip()
        return None if text in ("", _NO_ANSWER) else text

    def _values(self, choices: Sequence[str], found: Sequence[float]) -> list[float]:
        """Return by what the metric ranks the choices; found: log-likelihoods with the prompt, and perhaps without."""
        if self.metric_name == "acc_mutual_info":
            return [given - alone for given, alone in zip(found, found[len(choices) :], strict=False)]
        size = {"acc_norm": len, "acc_bytes": lambda text: len(text.encode())}.get(self.metric_name, lambda _: 1)
        return [value / max(size(choice), 1) for choice, value in zip(choices, found, strict=False)]

    def _gold(self, document: Any) -> str:
        gold = self._task.doc_to_target(document)
        return json.dumps(gold, ensure_ascii=False) if isinstance(gold, list) else str(gold)


def question_id(number: int) -> str:
    """Return the id of a question by its number in the harness's order."""
    return f"test-{number:05d}"


def task_manager(settings: LmEvalDataset) -> Any:
    """Return the harness's list of tasks: its own, or those in the folder of the settings.

    Raises ConfigError if the harness is not installed.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            "dataset.source lm_eval: lm-evaluation-harness is not installed: pip install 'aqnpipe[lm-eval]'"
        ) from error
    own = settings.include_path
    return TaskManager(include_path=own, include_defaults=own is None)


def _refuse_unusable(task: Any, settings: LmEvalDataset) -> None:
    kind = task.config.output_type
    if kind not in ("multiple_choice", "generate_until"):
        raise ConfigError(
            f"dataset.task: {settings.task} has output_type {kind}, expected multiple_choice or generate_until"
        )
    if (task.config.repeats or 1) > 1:
        raise ConfigError(
            f"dataset.task: {settings.task} asks every question {task.config.repeats} times, expected once"
        )
    if settings.num_fewshot and task.config.num_fewshot == 0:
        raise ConfigError(f"dataset.num_fewshot: found {settings.num_fewshot}, {settings.task} allows no examples")


def _metric_of(task: Any, settings: LmEvalDataset) -> str:
    metrics = list(task._metric_fn_list)
    found = settings.metric or next((name for name in _USUAL_METRICS if name in metrics), None)
    if found is None or (metrics and found not in metrics):
        raise ConfigError(
            f"dataset.metric: found {found or 'none'}, expected one of those of task {settings.task} that is 0 or 1 "
            f"for each question: {', '.join(metrics) or 'it names none'}"
        )
    return found


def _filter_of(task: Any, settings: LmEvalDataset) -> str:
    filters = [each.name for each in task._filters]
    found = settings.filter or filters[0]
    if expected := one_of(found, filters):
        raise ConfigError(f"dataset.filter: found {found!r}, expected {expected}, which task {settings.task} has")
    return str(found)
