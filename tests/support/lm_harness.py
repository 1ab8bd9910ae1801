"""lm-evaluation-harness's own task gsm8k, on problems of ours and without the hub: what our scorers are held to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FILTERS = {"harness_strict": "strict-match", "harness_flexible": "flexible-extract"}


def gsm8k_task(folder: Path, train: Sequence[Mapping[str, str]], test: Sequence[Mapping[str, str]]) -> Any:
    """Return the harness's task as in its gsm8k.yaml, on `train` and `test` (question, answer), put in `folder`."""
    import lm_eval.tasks
    import yaml
    from lm_eval.api.task import ConfigurableTask

    files = {}
    for split, rows in (("train", train), ("test", test)):
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps({key: row[key] for key in ("question", "answer")}) + "\n" for row in rows))
        files[split] = str(path)
    config = yaml.safe_load((Path(lm_eval.tasks.__file__).parent / "gsm8k" / "gsm8k.yaml").read_text())
    return ConfigurableTask(
        config=config
        | {
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")},
        }
    )


def harness_grades(
    folder: Path, gold_answers: Sequence[str], responses: Sequence[str]
) -> dict[str, list[tuple[str | None, bool]]]:
    """Return what the harness finds in every response (None: its [invalid]) and whether it is right, by scorer."""
    from lm_eval.api.instance import Instance

    rows = [{"question": f"Question {number}?", "answer": f"#### {gold}"} for number, gold in enumerate(gold_answers)]
    task = gsm8k_task(folder, rows[:1], rows)
    instances = [
        Instance("generate_until", doc, ("", {}), 0, task_name="gsm8k", doc_id=number, repeats=1)
        for number, doc in enumerate(task.test_docs())
    ]
    for instance, response in zip(instances, responses, strict=True):
        instance.resps = [response]
    task._instances = instances
    task.apply_filters()
    graded: dict[str, list[tuple[str | None, bool]]] = {}
    for scorer, name in FILTERS.items():
        found = [instance.filtered_resps[name] for instance in instances]
        right = [
            bool(task.process_results(instance.doc, [one])["exact_match"])
            for instance, one in zip(instances, found, strict=True)
        ]
        graded[scorer] = [
            (None if one == "[invalid]" else one, correct) for one, correct in zip(found, right, strict=True)
        ]
    return graded
