"""Check the lineage of a study, from its questions to its numbers: every evaluation must be what the study requested.

For every evaluated checkpoint: its settings are those of the study; table and receipt are the ones that were written
with its record; questions, weights and, for a trained model, the whole run behind it match the records of the earlier
stages; no two seeds have the same weights; and every stored response, graded again, has the stored grade. Any mismatch
makes the comparisons of that evaluation invalid. Identity, receipts and passes of an evaluation by itself are checked
in `comparison.evaluations`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import polars as pl

from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import read_json, read_table, read_unchecked_table
from aqnpipe.artifacts.measured_errors import spec_with_figures
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.runs import RunRecord, first_difference, read_removed, record_problems
from aqnpipe.artifacts.training_facts import recorded_fact_problems
from aqnpipe.config.dataset import LmEvalDataset
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.data.graders import Grader, columns_of, graders_of, pairs
from aqnpipe.data.harness_task import HarnessTask, question_id
from aqnpipe.models.loading import is_untrained, sha256_of_digests
from aqnpipe.models.prepared import PREPARED_MODEL_FILE, read_prepared_model
from aqnpipe.noise.receipts.receipt import EvaluationReceipts, Receipt
from aqnpipe.noise.schedule import with_custom_sigmas

Checkpoint = tuple[str, str, int, int]
"""(model role, arm, seed, step), step 0 for the pretrained model."""


def lineage_problems(plan: StudyPlan) -> dict[Checkpoint, tuple[str, ...]]:
    """Return the lineage problems of every evaluation of the study; none for one that has no record.

    Raises DataError or ModelError where a file is damaged.
    """
    lineage = _Lineage(plan)
    found = {checkpoint: lineage.problems(checkpoint) for checkpoint in plan.evaluations()}
    for duplicates in lineage.equal_weights():
        model, arm, *_ = duplicates[0]
        has_learned = lineage.has_learned(duplicates[0])
        for checkpoint in duplicates:
            others = ", ".join(str(other[2]) for other in duplicates if other != checkpoint)
            if not has_learned:
                found[checkpoint].append(
                    f"arm {arm}: nothing was learned: the weights after step {checkpoint[3]} are those of the prepared "
                    f"model {model} (a learning rate of 0, or no reward that differs within a group?)"
                )
            elif others:
                found[checkpoint].append(
                    f"arm {arm}: seed {checkpoint[2]} has the weights of seed {others} too: a seed was used twice"
                )
    return {checkpoint: tuple(problems) for checkpoint, problems in found.items()}


class _Lineage:
    """The files of one study; what several evaluations share is checked once."""

    def __init__(self, plan: StudyPlan) -> None:
        self._plan = plan
        self._results = Path(plan.results)
        self._runs: dict[tuple[str, str, int], tuple[list[str], Mapping[str, str]]] = {}
        self._weights: dict[Checkpoint, str] = {}

    @cached_property
    def _golds(self) -> dict[str, str]:
        problems = read_table(self._data("test"), ProblemTable)
        limit = self._plan.study.config.evaluation.num_questions
        requested = problems if limit is None else problems.head(limit)
        return dict(zip(requested["question_id"], requested["gold_answer"], strict=True))

    @cached_property
    def _graders(self) -> dict[str, Grader]:
        settings = self._plan.evaluation_settings
        return graders_of(settings.primary_scorer, settings.scorer_sha256)

    def _data(self, split: str) -> Path:
        return self._results / "data" / f"{split}.parquet"

    def problems(self, checkpoint: Checkpoint) -> list[str]:
        """Return the lineage problems of one evaluation."""
        model, arm, seed, step = checkpoint
        files = evaluation_files(self._results, *checkpoint, self._plan.machine)
        if not files.exist:
            return []
        record = read_json(files.record, RunRecord)
        self._weights[checkpoint] = record.inputs_sha256.get("weights", "")
        inputs = {"test_problems": self._data("test")}
        if self._plan.examples_input():
            inputs["train_problems"] = self._data("train")
        spec = self._plan.evaluation_spec(model=model, arm=arm, seed=str(seed), step=str(step))
        requested = spec_with_figures(EvaluationSpec.model_validate(spec)).model_dump(mode="json")
        return [
            *record_problems(record, outputs={"table": files.table, "receipt": files.receipt}, inputs=inputs),
            *_setting_problems(record, requested),
            *_receipt_problems(read_json(files.receipt, EvaluationReceipts), requested),
            *self._weights_problems(checkpoint),
            *self._answer_problems(files.table),
        ]

    def equal_weights(self) -> list[list[Checkpoint]]:
        """Return the trained checkpoints of one arm and step that have the same weights, or those of the model."""
        same: dict[tuple[str, str, int, str], list[Checkpoint]] = defaultdict(list)
        for checkpoint, digest in self._weights.items():
            model, arm, _, step = checkpoint
            same[model, arm, step, digest].append(checkpoint)
        return [
            checkpoints
            for (model, arm, _, digest), checkpoints in same.items()
            if self._plan.prepared_model(model, arm) is None
            and (len(checkpoints) > 1 or digest == self._prepared_weights(model))
        ]

    def has_learned(self, checkpoint: Checkpoint) -> bool:
        """Return whether a trained checkpoint has other weights than the model before training."""
        model, arm, seed, step = checkpoint
        if self._weights[checkpoint] == self._prepared_weights(model):
            return False
        folder = self._results / "runs" / model / arm / f"seed{seed}" / "checkpoints" / f"step{step}"
        try:
            untrained = is_untrained(folder, self._results / "models" / model)
        except FileNotFoundError:
            untrained = False
        # Asked afterwards: the record is written before weights are removed, which may happen meanwhile.
        removed = read_removed(folder)
        return not (untrained if removed is None else removed.untrained)

    def _prepared_weights(self, model: str) -> str | None:
        folder = self._results / "models" / model
        return read_prepared_model(folder).weights_sha256 if (folder / PREPARED_MODEL_FILE).is_file() else None

    def _weights_problems(self, checkpoint: Checkpoint) -> list[str]:
        model, arm, seed, step = checkpoint
        problems: list[str] = []
        prepared = self._plan.prepared_model(model, arm)
        if prepared is not None:
            folder = self._results / "models" / prepared
            if not (folder / PREPARED_MODEL_FILE).is_file():
                return [f"there is no record of the prepared model {prepared}"]
            written, what = read_prepared_model(folder).weights_sha256, f"the prepared model {prepared}"
        else:
            problems, outputs = self._run(model, arm, seed)
            prefix, what = f"checkpoints/step{step}/", f"the checkpoint that training wrote after step {step}"
            written = sha256_of_digests(
                {
                    name.removeprefix(prefix): digest
                    for name, digest in outputs.items()
                    if name.startswith(prefix) and name.endswith(".safetensors")
                }
            )
        evaluated = self._weights[checkpoint]
        return problems if evaluated == written else [*problems, f"the weights evaluated are not those of {what}"]

    def _run(self, model: str, arm: str, seed: int) -> tuple[list[str], Mapping[str, str]]:
        """Return the problems of a training run, and the digests of its outputs."""
        key = (model, arm, seed)
        if key not in self._runs:
            self._runs[key] = self._check_run(*key)
        return self._runs[key]

    def _check_run(self, model: str, arm: str, seed: int) -> tuple[list[str], Mapping[str, str]]:
        base = self._results / "runs" / model / arm / f"seed{seed}"
        if not (base / "run.json").is_file():
            return ["there is no record of the training run"], {}
        record = read_json(base / "run.json", RunRecord)
        outputs = {name: base / name for name in ("metrics.parquet", "receipt.json")}
        inputs = {
            "train_problems": self._data("train"),
            "test_problems": self._data("test"),
            "model": self._results / "models" / model / PREPARED_MODEL_FILE,
        }
        inputs.update(zip(("sigmas",), map(Path, self._plan.sigmas_input(model, arm)), strict=False))
        identity: dict[str, str | int] = {"model": model, "arm": arm, "seed": seed, "num_steps": self._plan.num_steps}
        problems = record_problems(record, identity=identity, outputs=outputs, inputs=inputs)
        planned = with_custom_sigmas(TrainingSpec.model_validate(self._plan.training_spec(arm, seed)))
        settings = spec_with_figures(planned)
        spec = settings.model_dump(mode="json")
        problems += _setting_problems(record, spec)
        if not problems:
            problems += recorded_fact_problems(record.training, spec, record.outputs_sha256)
        if outputs["receipt.json"].is_file():
            receipt = read_json(outputs["receipt.json"], Receipt)
            if not receipt.has_noise_of(settings.arm) or receipt.aqn != settings.arm.aqn:
                problems.append("the receipt is of other noise than the arm asks for")
            problems += [f"receipt invalid: {problem}" for problem in receipt.problems()]
        return [f"training: {problem}" for problem in problems], record.outputs_sha256

    def _answer_problems(self, path: Path) -> list[str]:
        """Return the problems of an evaluation table: missing, unrequested, repeated and wrongly graded responses."""
        rows = read_unchecked_table(path)
        scorers = {**self._graders, **({} if self._task is None else {"task": None})}
        needed = {"question_id", "response", *columns_of(scorers)}
        if not self._data("test").is_file() or not needed <= {*rows.columns}:
            return []  # Other checks refuse the evaluation for this.
        config = self._plan.study.config.evaluation
        requested = {
            (question, float(level), noise_seed, sample)
            for question in self._golds
            for level, noise_seed in config.passes()
            for sample in range(config.num_samples)
        }
        found = list(rows.select("question_id", "noise_level", "noise_seed", "sample").iter_rows())
        problems = []
        if missing := len(requested.difference(found)):
            problems.append(f"{missing} of {len(requested)} responses that the study requests are not in the table")
        if extra := len(set(found).difference(requested)) + len(found) - len(set(found)):
            problems.append(f"{extra} responses in the table were not requested, or occur twice")
        of_task = 0 if self._task is None else self._wrongly_scored_by(self._task, rows)
        if wrong := self._wrongly_scored(rows) + of_task:
            problems.append(f"{wrong} stored responses have another grade than their text gets")
        return problems

    @cached_property
    def _task(self) -> HarnessTask | None:
        dataset = self._plan.study.config.dataset
        return HarnessTask.load(dataset) if isinstance(dataset, LmEvalDataset) else None

    def _wrongly_scored_by(self, task: HarnessTask, rows: pl.DataFrame) -> int:
        """Return the number of responses that the task grades otherwise than is stored."""
        numbers = {question_id(number): number for number in range(len(task.documents))}
        stored = rows.select("question_id", "response", "answer_task", "correct_task").iter_rows()
        return sum(
            question in numbers and tuple(task.grade(numbers[question], response)) != (answer, correct)
            for question, response, answer, correct in stored
        )

    def _wrongly_scored(self, rows: pl.DataFrame) -> int:
        known: dict[tuple[str, str], tuple[str | bool | None, ...]] = {}
        wrong = 0
        columns = columns_of(self._graders)
        for question, response, *stored in rows.select("question_id", "response", *columns).iter_rows():
            gold = self._golds.get(question)
            if gold is None:
                continue
            if (response, gold) not in known:
                grades = pairs({name: grade(response, gold) for name, grade in self._graders.items()})
                known[response, gold] = tuple(grades.values())
            wrong += tuple(stored) != known[response, gold]
        return wrong


def _receipt_problems(receipts: EvaluationReceipts, requested: Mapping[str, object]) -> Iterator[str]:
    """Yield where the receipts of an evaluation are not about what its settings request."""
    yield from receipts.facts.shard_problems(requested)
    spec = EvaluationSpec.model_validate(requested)
    for evaluated in receipts.passes:
        yield from evaluated.differences(spec.evaluation.noise_at(evaluated.noise_level, spec.attention))


def _setting_problems(record: RunRecord, requested: Mapping[str, object]) -> list[str]:
    difference = first_difference(record.config, requested)
    return [f"made with {difference}"] if difference else []
