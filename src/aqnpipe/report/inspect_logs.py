"""Evaluations as logs of Inspect (inspect_ai), whose viewer shows them: `inspect view --log-dir FOLDER`.

A log is one checkpoint at one noise level: a sample per question, an epoch per noise seed and sampled response, and a
score by every scorer. This is the JSON form of Inspect's logs, version 2, written without its library, which needs
other versions of fsspec and urllib3 than those that this package is tested with.
"""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import polars as pl

from aqnpipe.artifacts.evaluations import EvaluationTable, last_evaluations
from aqnpipe.artifacts.files import read_table, write_text
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.config.evaluation import EvaluationConfig, scorer_column
from aqnpipe.errors import DataError

_CORRECT = "correct_"
_STOPS = {"stop": "stop", "length": "max_tokens"}


def write_inspect_logs(results: Path, study: str, settings: EvaluationConfig, folder: Path) -> int:
    """Write a log per noise level of the last checkpoint of every run into `folder`; return their number.

    results, study, settings: those of the study, and its name. Raises DataError for a damaged evaluation, or none.
    """
    checkpoints, path = last_evaluations(results), results / "data" / "test.parquet"
    if not checkpoints:
        raise DataError(f"{results}: found no evaluations in eval/, expected the results folder of a study")
    asked = read_table(path, ProblemTable).iter_rows(named=True) if path.exists() else ()
    questions = {row["question_id"]: row for row in asked}
    names, primary, number = settings.noise_names(), scorer_column(settings.primary_scorer), 0
    for one in checkpoints:
        model, made = f"{one.model}/{one.arm}/seed{one.seed}/step{one.step}", one.table.stat().st_mtime
        table = read_table(one.table, EvaluationTable).sort("noise_level", "noise_seed", "sample", "question_id")
        # The viewer shows the first score in its list: that of the study.
        graded = [name.removeprefix(_CORRECT) for name in table.columns if name.startswith(_CORRECT)]
        columns = sorted(graded, key=lambda scorer: scorer != primary)
        scorers = {scorer: settings.primary_scorer if scorer == primary else scorer for scorer in columns}
        for (level,), rows in table.group_by("noise_level", maintain_order=True):
            task = f"{study}, {names.get(level) or f'noise {level:g}'}"
            identity, time = short_digest((task, model), 8), datetime.fromtimestamp(made, UTC)
            log: dict[str, Any] = {"version": 2, "status": "success", **_log(rows, questions, scorers)}
            log["eval"] |= {"created": time.isoformat(timespec="seconds"), "task": task, "model": model}
            log["eval"] |= dict.fromkeys(("eval_id", "run_id", "task_id"), identity)
            # The viewer lists files whose names begin with a time.
            write_text(folder / f"{time:%Y-%m-%dT%H-%M-%S+00-00}_{study}_{identity}.json", json.dumps(log))
            number += 1
    return number


def _log(rows: pl.DataFrame, questions: dict[str, dict[str, str]], scorers: dict[str, str]) -> dict[str, Any]:
    """Return what a log says of responses at one noise level, and not of their model."""
    accuracies = {shown: rows[f"correct_{scorer}"].mean() for scorer, shown in scorers.items()}
    scores = [
        {"name": name, "scorer": name, "metrics": {"accuracy": {"name": "accuracy", "value": accuracy}}}
        for name, accuracy in accuracies.items()
    ]
    num_questions = rows["question_id"].n_unique()
    return {
        "eval": {
            "dataset": {"name": "test", "samples": num_questions},
            "config": {"epochs": len(rows) // num_questions},
            "packages": {"aqnpipe": version("aqnpipe")},
            "metadata": {"noise_level": rows["noise_level"][0]},
        },
        "results": {"total_samples": len(rows), "completed_samples": len(rows), "scores": scores},
        "samples": list(_samples(rows, questions, scorers)),
    }


def _samples(
    rows: pl.DataFrame, questions: dict[str, dict[str, str]], scorers: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """Yield the samples; the input is the question as it is in the data, without the prompt around it."""
    epochs: dict[str, int] = {}
    for row in rows.iter_rows(named=True):
        name, response = row["question_id"], {"role": "assistant", "content": row["response"]}
        epochs[name] = epochs.get(name, 0) + 1
        asked = questions.get(name, {"question": name, "gold_answer": ""})
        yield {
            "id": name,
            "epoch": epochs[name],
            "input": asked["question"],
            "target": asked["gold_answer"],
            "messages": [{"role": "user", "content": asked["question"]}, response],
            "output": {
                "choices": [{"message": response, "stop_reason": _STOPS[row["finish_reason"]]}],
                "completion": row["response"],
                "usage": {"output_tokens": row["response_tokens"], "total_tokens": row["response_tokens"]},
            },
            "scores": {
                shown: {"value": "C" if row[f"correct_{scorer}"] else "I", "answer": row[f"answer_{scorer}"]}
                for scorer, shown in scorers.items()
            },
            "metadata": {key: row[key] for key in ("noise_seed", "sample")},
        }
