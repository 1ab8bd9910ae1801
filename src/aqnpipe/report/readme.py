"""README.md of a study's results: a table of its folders and files."""

from aqnpipe.config.study import Study
from aqnpipe.report.words import Words

_CONTENTS = {
    "report.html": "readme.report",
    "claims.json": "readme.claims",
    "accuracy": "readme.accuracy",
    "comparisons": "readme.comparisons",
    "robustness": "readme.robustness",
    "differences": "readme.differences",
    "training, layers, flips": "readme.tables",
    "data/": "readme.data",
    "models/MODEL/": "readme.models",
    "srdd/MODEL/MACHINE/": "readme.diagnosis",
    "runs/MODEL/ARM/seedS/": "readme.runs",
    "eval/MODEL/ARM/seedS/": "readme.evaluations",
    "loss_study/MODEL/": "readme.loss_studies",
    "looks/": "readme.looks",
    "jobs/": "readme.jobs",
    "logs/RULE/, benchmarks/RULE/": "readme.logs",
    "*.logs, scratch/": "readme.scratch",
}
"""Paths in the results, and the keys of their descriptions in the catalogue."""

_ON_MACHINES = {"machines": "readme.machines", "eval_on/MACHINE/MODEL/ARM/seedS/": "readme.machine_evaluations"}
"""Those of a study that evaluates on further machines."""


def readme(study: Study, words: Words) -> str:
    """Return the text of the README; the same for the same study."""
    arms = ", ".join(study.config.arms)
    trained = words("readme.made_by", arms=arms, seeds=", ".join(map(str, study.seeds)))
    made_by = trained if study.has_training else words("readme.made_of_checkpoints", checkpoints=arms)
    contents = _CONTENTS | (_ON_MACHINES if study.config.evaluation.machines else {})
    rows = [f"| `{path}` | {words(key)} |" for path, key in contents.items()]
    return "\n".join(
        [
            f"# {words('readme.title', study=study.config.study)}\n",
            f"{made_by}\n",
            f"| {words('readme.path')} | {words('readme.content')} |",
            "|---|---|",
            *rows,
            f"\n{words('readme.note')}\n",
        ]
    )
