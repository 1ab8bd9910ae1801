"""README.md of a study's results: what each folder and file is, for whoever opens the folder."""

from aqnpipe.config.study import Study

_FILES = (
    ("report.html", "the answer and everything behind it, one page that loads nothing; `summary.md` is the short form"),
    ("claims.json", "every claim with its verdict; `invalid` ones say why"),
    ("accuracy", "each checkpoint at each noise level (.parquet, and .csv with the same rows)"),
    ("comparisons", "each tested comparison: difference, interval, p-values, what would have been found"),
    ("robustness", "each arm over all noise levels"),
    ("training, layers, flips", "curves of all runs, diagnosed layers, questions that changed sides"),
    ("data/", "the questions: `train.parquet`, `test.parquet`"),
    ("models/MODEL/", "the prepared model and what it is"),
    ("srdd/MODEL/MACHINE/", "a diagnosis: `verdict.json`, `layers.parquet`, and sigmas by strategy"),
    ("runs/MODEL/ARM/seedS/", "a training run: `metrics.parquet`, `receipt.json`, `run.json`, `checkpoints/stepN/`"),
    ("eval/MODEL/ARM/seedS/", "a checkpoint's answers `stepN.parquet`, with `.receipt.json` and `.run.json`"),
    ("loss_study/MODEL/", "loss studies of faulty machines, without training"),
    ("logs/RULE/, benchmarks/RULE/", "what each job said, and what it cost; a failed job names its log"),
    ("*.logs, scratch/", "what loggers wrote; runs that are not finished, which the same command goes on with"),
)


def readme(study: Study) -> str:
    """Return the text; the same for the same study."""
    rows = "\n".join(f"| `{name}` | {what} |" for name, what in _FILES)
    return (
        f"# Results of the study {study.config.study}\n\n"
        f"Made by aqnpipe; arms {', '.join(study.config.arms)}; seeds {', '.join(map(str, study.config.seeds))}.\n\n"
        "| where | what |\n|---|---|\n"
        f"{rows}\n\n"
        "A receipt is what was measured of noise and faults in a run, against what was requested. A record (`run.json`)\n"
        "says what made the files beside it: settings, digests of inputs and outputs, code and versions. Files carry\n"
        "their own SHA-256 and are refused once they are edited or damaged: remove such a file, and the workflow\n"
        "makes it again.\n"
    )
