"""Sabotage between the stages: files and settings of one job are not those of the study."""

import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
from checksum_files import write_parquet_with_checksum
from hold import took_effect
from micro_study import MicroStudy
from replacing import replaced
from sabotage import (
    AFTER_TRAINING,
    END,
    EVALUATE,
    TRAIN,
    Sabotage,
    edited,
    of_group,
    patched,
    replace_file,
    update_digests,
)
from safetensors.torch import load_file, save_file

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.data.graders import Grader, graders_of
from aqnpipe.data.scoring import Graded
from aqnpipe.noise.receipts.receipt import Receipt


def _always_right(*scorer: str | None) -> dict[str, Grader]:
    """Return the graders of an evaluation, each of which finds every response right."""
    return {name: lambda response, gold: Graded(gold, True) for name in graders_of(*scorer)}


def _with_table(
    arm: str, change: Callable[[pl.DataFrame], pl.DataFrame], *, forged: bool = False, seeds: Any = (0,)
) -> Any:
    """Change the answers of an arm; `forged`: and update the digests in the records."""

    def edit(study: MicroStudy) -> None:
        for seed in seeds:
            path = study.evaluation_file(arm, seed, "parquet")
            write_parquet_with_checksum(path, change(pl.read_parquet(path)))
            if forged:
                update_digests(study, arm, seed)

    return edited(edit)


def _all_right(table: pl.DataFrame) -> pl.DataFrame:
    return table.with_columns(correct_strict=pl.lit(value=True))


def _all_right_in_text(table: pl.DataFrame) -> pl.DataFrame:
    golds = pl.read_parquet("results/data/test.parquet").select("question_id", "gold_answer")
    joined = table.join(golds, on="question_id", maintain_order="left")
    gold = joined["gold_answer"]
    texts = {"response": "#### " + gold}
    answers = {name: gold for name in table.columns if name.startswith("answer_")}
    right = {name: pl.lit(value=True) for name in table.columns if name.startswith("correct_")}
    start = pl.when(pl.col("noise_level") > 0).then(pl.lit(" ")).otherwise(pl.lit(""))
    noisy = (start + pl.col("response")).alias("response")
    return joined.with_columns(**texts, **answers, **right).with_columns(noisy).select(table.columns)


def _plain_edit(study: MicroStudy) -> None:
    path = study.evaluation_file("guided", 0, "parquet")
    table = _all_right(pl.read_parquet(path))
    path.unlink()
    table.write_parquet(path)


def _no_first_question(table: pl.DataFrame) -> pl.DataFrame:
    return table.filter(pl.col("question_id") != pl.col("question_id").min())


def _everywhere_forged(study: MicroStudy) -> None:
    for _, arm, seed, step in study.plan.evaluations():
        path = study.evaluation_file(arm, seed, "parquet", step)
        write_parquet_with_checksum(path, _no_first_question(pl.read_parquet(path)))
        update_digests(study, arm, seed, step)


def _remove_last(study: MicroStudy) -> None:
    for suffix in ("parquet", "receipt.json", "run.json"):
        study.evaluation_file("guided", 0, suffix).unlink()


def _checkpoint(arm: str, seed: int, step: int) -> Callable[[MicroStudy], None]:
    """Put another checkpoint in the place of the last one of arm guided, seed 0."""

    def edit(study: MicroStudy) -> None:
        target = study.run_folder("guided", 0) / "checkpoints" / f"step{study.last_step}"
        shutil.rmtree(target)
        source = study.run_folder(arm, seed) / "checkpoints" / f"step{step}"
        shutil.copytree(source if step else study.results / "models" / "base", target)

    return edit


def _weights(study: MicroStudy) -> Path:
    return study.run_folder("guided", 0) / "checkpoints" / f"step{study.last_step}" / "model.safetensors"


def _flip(path: Path, place: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    replace_file(path, bytes(content))


def _cut(path: Path) -> None:
    replace_file(path, path.read_bytes()[:-7])


def _run_of_another_arm(study: MicroStudy) -> None:
    shutil.rmtree(study.run_folder("guided", 0))
    shutil.copytree(study.run_folder("baseline", 0), study.run_folder("guided", 0))


def _other_receipts(study: MicroStudy) -> None:
    source = study.evaluation_file("baseline", 0, "receipt.json")
    replace_file(study.evaluation_file("guided", 0, "receipt.json"), source.read_bytes())


def _polished_receipt(study: MicroStudy) -> None:
    path = study.run_folder("guided", 0) / "receipt.json"
    receipt = read_json(path, Receipt)
    as_requested = ((row, row.measured_elements * row.requested**2) for row in receipt.rows)
    rows = tuple(replace(row, squares=squares) if row.error else row for row, squares in as_requested)
    write_json(path, receipt.model_copy(update={"rows": rows}))


def _edited_numbers(name: str, column: str) -> Callable[[MicroStudy], None]:
    def edit(study: MicroStudy) -> None:
        path = study.results / name
        write_parquet_with_checksum(path, pl.read_parquet(path).with_columns(pl.lit(0.5).alias(column)))

    return edit


def _edited_verdict(study: MicroStudy) -> None:
    path = study.results / "claims.json"
    claims = read_json(path, ClaimsFile)
    better = tuple(claim.model_copy(update={"verdict": "supported"}) for claim in claims.claims)
    write_json(path, claims.model_copy(update={"claims": better}))


def _leak(study: MicroStudy) -> None:
    train, test = (pl.read_parquet(study.results / "data" / f"{name}.parquet") for name in ("train", "test"))
    leaked = test.head(1).with_columns(question_id=pl.lit(train["question_id"][-1]))
    write_parquet_with_checksum(
        study.results / "data" / "train.parquet", pl.concat([train.head(len(train) - 1), leaked])
    )


def _other_questions(study: MicroStudy) -> None:
    path = study.results / "data" / "test.parquet"
    table = pl.read_parquet(path)
    write_parquet_with_checksum(path, table.with_columns(gold_answer=pl.lit("7")))


@contextmanager
def _other_models_diagnosis(study: MicroStudy) -> Any:
    """The target machine is diagnosed with a model whose weights differ, under the same name."""
    mine, other = study.results / "models" / "base", study.results / "models" / "other"
    shutil.copytree(mine, other)
    (other / "aqnpipe_model.json").unlink()
    weights = {
        name: tensor * 1.5 if "mlp" in name else tensor
        for name, tensor in load_file(other / "model.safetensors").items()
    }
    (other / "model.safetensors").unlink()
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    mine.rename(study.results / "models" / "mine")
    other.rename(mine)
    study.diagnose("target")
    study.sigmas("target")
    mine.rename(other)
    (study.results / "models" / "mine").rename(mine)
    took_effect()
    yield


def _verdict_of_device(study: MicroStudy) -> None:
    folder = study.results / "srdd" / "base"
    for name in ("layers.parquet", "verdict.json"):
        replace_file(folder / "target" / name, (folder / "device" / name).read_bytes())


def _layers_of_device(study: MicroStudy) -> None:
    folder = study.results / "srdd" / "base"
    replace_file(folder / "target" / "layers.parquet", (folder / "device" / "layers.parquet").read_bytes())


def _sigmas_of_device(study: MicroStudy) -> None:
    folder, name = study.results / "srdd" / "base", "sigmas-published.yaml"
    replace_file(folder / "target" / name, (folder / "device" / name).read_bytes())


def _edited_sigmas(study: MicroStudy) -> None:
    path = study.results / "srdd" / "base" / "target" / "sigmas-published.yaml"
    replace_file(path, replaced(path.read_bytes(), b"base_sigma: 0.05", b"base_sigma: 0.06"))


def _evaluated_with(**changes: Any) -> Any:
    """One evaluation is made with other settings than the study's."""

    @contextmanager
    def apply(study: MicroStudy) -> Any:
        requested = study.plan.evaluation_spec(model="base", arm="guided", seed="0", step=str(study.last_step))
        spec = EvaluationSpec.model_validate(_merged(requested, changes))
        study.evaluate("guided", 0, spec=spec)
        took_effect()
        yield

    return apply


def _trained_with(**changes: Any) -> Any:
    """One run is trained with other settings than the study's."""

    @contextmanager
    def apply(study: MicroStudy) -> Any:
        requested = study.plan.training_spec("guided", 0)
        study.train("guided", 0, TrainingSpec.model_validate(_merged(requested, changes)))
        took_effect()
        yield

    return apply


def _merged(content: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return content | {
        key: _merged(content[key], value) if isinstance(value, dict) else value for key, value in changes.items()
    }


@contextmanager
def _unread_key(study: MicroStudy) -> Any:
    """The per-layer sigmas stand under a key that nothing reads."""
    arms = {name: dict(arm) for name, arm in study.settings["arms"].items()}
    arms["guided"]["aqn"] = {**arms["guided"]["aqn"], "layer_sigma_file": "sigmas.yaml"}
    study.write(arms)
    took_effect()
    yield


def _old_record(study: MicroStudy) -> None:
    """The record of an earlier evaluation of the same checkpoint stays where the new one would be."""
    path = study.evaluation_file("guided", 0, "run.json")
    record = read_json(path, RunRecord)
    write_json(path, record.model_copy(update={"outputs_sha256": {}}))


def ending(
    name: str, what: str, edit: Callable[[MicroStudy], None], facts: int | None = None, cause: str = ""
) -> Sabotage:
    """A change of files after the last evaluation."""
    return Sabotage(name, what, edited(edit), (), END, facts, cause=cause)


def reporting(name: str, what: str, edit: Callable[[MicroStudy], None], cause: str) -> Sabotage:
    """A change of files between the comparison and the report."""
    return Sabotage(name, what, edited(edit), (), (("report",),), cause=cause)


SABOTAGES = of_group(
    "files and records",
    "",
    (
        Sabotage(
            "a key that nothing reads",
            "per-layer sigmas under a misspelt key of an arm",
            _unread_key,
            (("load",),),
            (),
            3,
            cause=r"layer_sigma_file",
        ),
        ending(
            "last checkpoint not evaluated",
            "its table, receipt and record are missing",
            _remove_last,
            6,
            cause=r"missing evaluation",
        ),
        Sabotage(
            "checkpoint of another arm",
            "replaced by the baseline's weights",
            edited(_checkpoint("baseline", 0, 2)),
            EVALUATE,
            END,
            7,
            cause=r"not those of the checkpoint|another|checkpoint",
        ),
        Sabotage(
            "checkpoint of another seed",
            "replaced by seed 1's weights",
            edited(_checkpoint("guided", 1, 2)),
            EVALUATE,
            END,
            7,
            cause=r"not those of the checkpoint|checkpoint",
        ),
        Sabotage(
            "checkpoint of an earlier step",
            "the last step is replaced by step 1",
            edited(_checkpoint("guided", 0, 1)),
            EVALUATE,
            END,
            6,
            cause=r"not those of the checkpoint|checkpoint",
        ),
        Sabotage(
            "the model before training",
            "it replaces the last checkpoint",
            edited(_checkpoint("base", 0, 0)),
            EVALUATE,
            END,
            7,
            cause=r"not those of the checkpoint|checkpoint",
        ),
        Sabotage(
            "a flipped bit in a checkpoint",
            "one bit of one weight is flipped",
            edited(lambda study: _flip(_weights(study), 0.7)),
            EVALUATE,
            END,
            cause=r"SHA-256",
        ),
        Sabotage(
            "a truncated checkpoint",
            "its last bytes are missing",
            edited(lambda study: _cut(_weights(study))),
            EVALUATE,
            END,
            cause=r"SHA-256|damaged",
        ),
        Sabotage(
            "evaluation subset changed",
            "one arm answers half of the questions",
            _evaluated_with(evaluation={"num_questions": 6}),
            (),
            END,
            9,
            cause=r"num_questions",
        ),
        Sabotage(
            "other prompt",
            "one arm has another prompt text",
            _evaluated_with(prompt={"instruction": "Think."}),
            (),
            END,
            9,
            cause=r"prompt",
        ),
        Sabotage(
            "other noise seeds",
            "one arm is evaluated with other draws",
            _evaluated_with(evaluation={"noise_seeds": [1]}),
            (),
            END,
            9,
            cause=r"noise_seeds",
        ),
        Sabotage(
            "other responses allowed",
            "one arm may give longer answers",
            _evaluated_with(evaluation={"max_response_tokens": 30}),
            (),
            END,
            9,
            cause=r"max_response_tokens",
        ),
        Sabotage(
            "other scorer",
            "one arm's answers are all graded as right",
            patched("aqnpipe.evaluation.stage.graders_of", _always_right),
            EVALUATE,
            END,
            9,
            cause=r"grade",
        ),
        Sabotage(
            "other learning rate",
            "one arm is trained with twice the rate",
            _trained_with(training={"learning_rate": 4e-4}),
            (),
            AFTER_TRAINING,
            9,
            cause=r"learning_rate",
        ),
        Sabotage(
            "other noise than the arm's",
            "one run is trained at 4 % instead of 5 %",
            _trained_with(arm={"operator_noise": {"error": {"scale": 0.04}}}),
            (),
            AFTER_TRAINING,
            9,
            cause=r"scale",
        ),
        Sabotage(
            "duplicated rows",
            "two answers appear twice in the table",
            _with_table("guided", lambda t: pl.concat([t, t.head(2)])),
            cause=r"repeat",
        ),
        Sabotage(
            "dropped rows",
            "one question is missing in one arm",
            _with_table("guided", _no_first_question),
            cause=r"step2.parquet|not in the table|responses in the table",
        ),
        Sabotage(
            "duplicated rows, record updated",
            "as before, and the record has the new digest",
            _with_table("guided", lambda t: pl.concat([t, t.head(2)]), forged=True),
            cause=r"repeat",
        ),
        ending(
            "dropped rows, records updated",
            "one question is missing in all arms, and every record has the new digest",
            _everywhere_forged,
            cause=r"not in the table|responses in the table",
        ),
        ending("results edited by hand", "correct_strict is set with another tool", _plain_edit, cause=r"checksum"),
        Sabotage(
            "results edited, checksum updated",
            "correct_strict is set and the file gets a new checksum",
            _with_table("guided", _all_right),
            cause=r"edited",
        ),
        Sabotage(
            "results edited, record updated",
            "as before, and the record has the new digest",
            _with_table("guided", _all_right, forged=True),
            cause=r"grade",
        ),
        Sabotage(
            "answers rewritten, all digests updated",
            "every response, answer and grade of an arm is rewritten to be right, with new digests everywhere",
            _with_table("guided", _all_right_in_text, forged=True, seeds=(0, 1)),
            cause=r"response|decoded|token",
        ),
        Sabotage(
            "responses not stored",
            "the texts are empty",
            _with_table("guided", lambda t: t.with_columns(response=pl.lit("")), forged=True),
            facts=8,
            cause=r"response",
        ),
        ending(
            "receipts of another evaluation",
            "the baseline's receipts lie beside the arm's table",
            _other_receipts,
            cause=r"receipt",
        ),
        ending(
            "receipt edited",
            "every measured scale of the training run is set to what was requested",
            _polished_receipt,
            cause=r"receipt",
        ),
        ending(
            "run overwritten by another arm's",
            "the baseline's run has the arm's name",
            _run_of_another_arm,
            8,
            cause=r"arm baseline",
        ),
        ending(
            "a record without digests",
            "the record of an evaluation has no digests of its outputs",
            _old_record,
            8,
            cause=r"SHA-256",
        ),
        ending(
            "questions changed after the evaluation",
            "test.parquet has other gold answers",
            _other_questions,
            9,
            cause=r"test.parquet|test_problems",
        ),
        Sabotage(
            "data leak",
            "a test question is among the training questions",
            edited(_leak),
            TRAIN,
            AFTER_TRAINING,
            cause=r"test question",
        ),
        Sabotage(
            "diagnosis of another model",
            "the sigmas are of a model with other weights",
            _other_models_diagnosis,
            TRAIN,
            AFTER_TRAINING,
            cause=r"another model",
        ),
        Sabotage(
            "diagnosis of another machine",
            "replaced by the healthy machine's verdict",
            edited(_verdict_of_device),
            (("sigmas", "target"),),
            (*TRAIN, *AFTER_TRAINING),
            cause=r"machine",
        ),
        Sabotage(
            "layers of another diagnosis",
            "the healthy machine's layers lie beside the verdict",
            edited(_layers_of_device),
            (("sigmas", "target"),),
            (*TRAIN, *AFTER_TRAINING),
            cause=r"diagnosis",
        ),
        Sabotage(
            "sigmas of another machine",
            "replaced by the healthy machine's sigmas",
            edited(_sigmas_of_device),
            TRAIN,
            AFTER_TRAINING,
            cause=r"machine|device",
        ),
        Sabotage(
            "sigmas edited by hand",
            "0.05 is written as 0.06",
            edited(_edited_sigmas),
            TRAIN,
            AFTER_TRAINING,
            cause=r"SHA-256",
        ),
        reporting(
            "accuracies edited",
            "accuracy.parquet is changed and gets a new checksum before the report",
            _edited_numbers("accuracy.parquet", "accuracy"),
            cause=r"accuracy.parquet",
        ),
        reporting(
            "comparisons edited",
            "a p-value is changed and the file gets a new checksum before the report",
            _edited_numbers("comparisons.parquet", "p_holm"),
            cause=r"comparisons.parquet",
        ),
        reporting(
            "verdicts edited",
            "every verdict of claims.json is set to supported, with a new checksum",
            _edited_verdict,
            cause=r"supported",
        ),
    ),
)
"""Every sabotage of files."""
