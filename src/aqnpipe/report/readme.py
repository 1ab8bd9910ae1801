"""README.md of a results folder: what each file and folder contains."""

from aqnpipe.config.study import Study

_FILES = (
    ("report.html", "the answer and everything behind it, one page without network; `summary.md` in brief"),
    ("claims.json", "every claim with its verdict; `invalid` ones with the reason"),
    ("accuracy", "each checkpoint at each noise level (.parquet, and .csv with the same rows)"),
    ("comparisons", "each tested comparison: difference, interval, p-values, minimum detectable difference"),
    ("robustness", "each arm over all noise levels"),
    ("published.json", "published figures tested again, if the study names a file of them"),
    ("training, layers, flips", "curves of all runs, diagnosed layers, questions that flipped between two arms"),
    ("data/", "the questions: `train.parquet`, `test.parquet`"),
    ("models/MODEL/", "the prepared model and its record"),
    ("srdd/MODEL/MACHINE/", "a diagnosis: `verdict.json`, `layers.parquet`, and sigmas by strategy"),
    ("runs/MODEL/ARM/seedS/", "a training run: `metrics.parquet`, `receipt.json`, `run.json`, `checkpoints/stepN/`"),
    ("eval/MODEL/ARM/seedS/", "a checkpoint's answers `stepN.parquet`, with `.receipt.json` and `.run.json`"),
    ("loss_study/MODEL/", "loss studies of faulty machines, without training"),
    ("logs/RULE/, benchmarks/RULE/", "log and cost of each job; a failed job prints the path of its log"),
    ("*.logs, scratch/", "files of trackers; unfinished runs, which the same command continues"),
)


def readme(study: Study) -> str:
    """Return the text; the same for the same study."""
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in _FILES)
    return (
        f"# Results of the study {study.config.study}\n\n"
        f"Made by aqnpipe; arms {', '.join(study.config.arms)}; seeds {', '.join(map(str, study.config.seeds))}.\n\n"
        "| where | what |\n|---|---|\n"
        f"{rows}\n\n"
        "A receipt has the noise and the faults that were measured in a run, beside those that were requested. A\n"
        "record (`run.json`) has the settings, code, versions and inputs of the files beside it. Files contain a\n"
        "SHA-256 checksum and are refused once they are edited or damaged: delete such a file, and the workflow\n"
        "makes it again.\n"
    )
