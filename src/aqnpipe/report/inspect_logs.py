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

from aqnpipe.artifacts.evaluations import EvaluationFiles, EvaluationTable
from aqnpipe.artifacts.files import read_table, write_text
from aqnpipe.artifacts.provenance import short_digest
from aqnpipe.report.responses import Responses

_STOPS = {"stop": "stop", "length": "max_tokens"}


def write_inspect_logs(responses: Responses, study: str, folder: Path) -> int:
    """Write a log per noise level of the last checkpoint of every run into `folder`; return their number.

    study: its name. Raises DataError for a damaged evaluation.
    """
    questions = {row["question_id"]: row for row in responses.questions.iter_rows(named=True)}
    names, number = responses.noise_names(), 0
    for checkpoint in responses.checkpoints:
        made = datetime.fromtimestamp(checkpoint.table.stat().st_mtime, UTC)
        table = read_table(checkpoint.table, EvaluationTable).sort("noise_level", "noise_seed", "sample", "question_id")
        for (level,), rows in table.group_by("noise_level", maintain_order=True):
            noise = names.get(level, f"noise {level:g}")  # type: ignore[call-overload]
            log = _log(responses, checkpoint, rows, questions, f"{study}, {noise}", made)
            # The viewer lists files whose names begin with a time.
            name = f"{made:%Y-%m-%dT%H-%M-%S+00-00}_{study}_{log['eval']['eval_id']}.json"
            write_text(folder / name, json.dumps(log))
            number += 1
    return number


def _log(
    responses: Responses,
    checkpoint: EvaluationFiles,
    rows: pl.DataFrame,
    questions: dict[str, dict[str, str]],
    task: str,
    made: datetime,
) -> dict[str, Any]:
    run = {"model": checkpoint.model, "arm": checkpoint.arm, "seed": checkpoint.seed, "step": checkpoint.step}
    model = f"{checkpoint.model}/{checkpoint.arm}/seed{checkpoint.seed}/step{checkpoint.step}"
    identity, time = short_digest((task, model), 8), made.isoformat(timespec="seconds")
    # The viewer puts the first score first: that of the study.
    columns = sorted(responses.scorers, key=lambda scorer: scorer != responses.primary_scorer)
    scorers = {scorer: responses.name_of(scorer) for scorer in columns}
    ids = rows["question_id"].unique(maintain_order=True).to_list()
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": identity,
            "run_id": identity,
            "task_id": identity,
            "created": time,
            "task": task,
            "model": model,
            "dataset": {"name": "test", "samples": len(ids), "sample_ids": ids},
            "config": {"epochs": len(rows) // len(ids)},
            "packages": {"aqnpipe": version("aqnpipe")},
            "metadata": run | {"noise_level": rows["noise_level"][0]},
        },
        "plan": {},
        "results": {
            "total_samples": len(rows),
            "completed_samples": len(rows),
            "scores": [
                {
                    "name": name,
                    "scorer": name,
                    "metrics": {"accuracy": {"name": "accuracy", "value": rows[f"correct_{scorer}"].mean()}},
                }
                for scorer, name in scorers.items()
            ],
        },
        "stats": {"started_at": time, "completed_at": time},
        "samples": list(_samples(rows, questions, scorers, model)),
    }


def _samples(
    rows: pl.DataFrame, questions: dict[str, dict[str, str]], scorers: dict[str, str], model: str
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
                "model": model,
                "choices": [{"message": response, "stop_reason": _STOPS[row["finish_reason"]]}],
                "completion": row["response"],
                "usage": {"output_tokens": row["response_tokens"], "total_tokens": row["response_tokens"]},
            },
            "scores": {
                shown: {"value": "C" if row[f"correct_{scorer}"] else "I", "answer": row[f"answer_{scorer}"]}
                for scorer, shown in scorers.items()
            },
            "metadata": {key: row[key] for key in ("noise_seed", "sample", "cluster") if key in row},
        }
