"""Where the report's numbers come from: runs, code, versions, devices and the study itself."""

import json
from collections.abc import Sequence

from aqnpipe.config.study import Study
from aqnpipe.report.inputs import Run
from aqnpipe.report.tables import Row, Table

SHORT_DIGEST = 12


def provenance_table(runs: Sequence[Run]) -> Table:
    """One row per training run."""
    rows = tuple(
        Row(
            (
                f"{run.model}/{run.arm} seed {run.seed}",
                run.record.device,
                run.record.code_digest[:SHORT_DIGEST],
                ", ".join(f"{name} {digest[:SHORT_DIGEST]}" for name, digest in run.record.inputs_sha256.items()),
            )
        )
        for run in runs
    )
    return Table("Training runs", ("run", "device", "code digest", "inputs, sha256"), rows, 4)


def version_table(runs: Sequence[Run]) -> Table:
    """Versions of the libraries; more than one per cell where runs differ."""
    names = sorted({name for run in runs for name in run.record.versions})
    rows = tuple(
        Row((name, ", ".join(sorted({run.record.versions.get(name, "not recorded") for run in runs}))))
        for name in names
    )
    return Table("Versions", ("library", "version"), rows, 2)


def study_text(study: Study) -> str:
    """The resolved study with its arms, as indented JSON."""
    return json.dumps(study.model_dump(mode="json"), indent=1, ensure_ascii=False)
