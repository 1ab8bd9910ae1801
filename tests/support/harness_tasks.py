"""Four tasks for lm-evaluation-harness, multiple-choice and generative, made without the hub."""

import json
from pathlib import Path

import yaml

from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.data.generated import generate_problems

NUM_QUESTIONS = 6
CHOICE = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "label"}
GENERATE = {
    "output_type": "generate_until",
    "doc_to_target": "{{gold}}",
    "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 16, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}
TASKS = {
    "choose_number": CHOICE | {"doc_to_text": "{{question}}\n#### ", "target_delimiter": ""},
    "choose_name": CHOICE | {"doc_to_text": "{{question}}\n", "doc_to_choice": "{{solutions}}", "target_delimiter": ""},
    "write_solution": GENERATE
    | {
        "doc_to_text": "{{question}}\n",
        "filter_list": [
            {
                "name": "strict",
                "filter": [{"function": "regex", "regex_pattern": "#### (-?[0-9]+)"}, {"function": "take_first"}],
            }
        ],
    },
    "write_number": GENERATE
    | {
        "doc_to_text": "{{question}}\n",
        "filter_list": [
            {
                "name": "last",
                "filter": [
                    {"function": "regex", "regex_pattern": "([0-9]+)", "group_select": -1},
                    {"function": "take_first"},
                ],
            }
        ],
    },
}


def write_tasks(folder: Path) -> Path:
    """Write the tasks and their questions to `folder`, and return it."""
    settings = GeneratedDataset(num_test=NUM_QUESTIONS, max_steps=1, distractor_probability=0.0)
    rows = []
    for problem in generate_problems(settings, "test"):
        gold = int(problem.answer.rpartition("#### ")[2])
        numbers = [str(number) for number in (gold, gold + 1, gold + 7)]
        rows.append(
            {
                "question": problem.question,
                "gold": str(gold),
                "choices": numbers,
                "solutions": [problem.answer.replace(f"#### {gold}", f"#### {number}") for number in numbers],
                "label": 0,
            }
        )
    (folder / "questions.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {
        "dataset_path": "json",
        "test_split": "test",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "questions.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
    }
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name} | data | task))
    return folder
