"""Provenance of the report's numbers: runs, code, versions, devices and the study itself."""

import json
from collections.abc import Sequence
from itertools import islice

from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.config.study import Study
from aqnpipe.report import tables
from aqnpipe.report.inputs import Evaluated, ReportData, Run
from aqnpipe.report.tables import Row, RunLink, Table
from aqnpipe.report.words import Words

SHORT_DIGEST = 12
MAX_ARMS_IN_STUDY = 256
"""The text of 2,000 arms would be the largest part of a page."""


def run_links(runs: Sequence[Run]) -> RunLink:
    """Return the function from (model, arm, seed) to the anchor of the run in the provenance table; "" if none.

    Runs beyond the rows that the page shows have none.
    """
    shown = enumerate(islice(runs, tables.MAX_ROWS_ON_PAGE), start=1)
    anchors = {(run.model, run.arm, run.seed): f"run-{number}" for number, run in shown}
    return lambda model, arm, seed: anchors.get((model, arm, seed), "")


def run_table(runs: Sequence[Run], words: Words, run_link: RunLink) -> Table:
    """Return one row per training run."""
    rows = tuple(
        Row(
            (str(run.source.record), *_record_cells(run.record)),
            anchor=run_link(run.model, run.arm, run.seed),
        )
        for run in runs
    )
    return Table("provenance-runs", words("provenance.runs"), _headers(words), rows, 4)


def evaluation_table(evaluations: Sequence[Evaluated], words: Words, run_link: RunLink) -> Table:
    """Return one row per evaluated checkpoint; each links to the run that trained it."""
    rows = tuple(
        Row(
            (str(evaluated.source.record), *_evaluation_cells(evaluated, words)),
            link=run_link(evaluated.source.model, evaluated.source.arm, evaluated.source.seed),
        )
        for evaluated in evaluations
    )
    return Table("provenance-evaluations", words("provenance.evaluations"), _headers(words), rows, 4)


def version_table(data: ReportData, words: Words) -> Table:
    """Return the versions of the libraries; several in a cell if jobs differ."""
    records = [*(run.record for run in data.runs), *(evaluated.record for evaluated in data.evaluations)]
    names = sorted({name for record in records for name in record.versions})
    rows = tuple(
        Row((name, ", ".join(sorted({record.versions.get(name, words("provenance.unknown")) for record in records}))))
        for name in names
    )
    headers = (words("column.library"), words("column.version"))
    return Table("versions", words("provenance.versions"), headers, rows, 2)


def study_text(study: Study) -> str:
    """Return the resolved study with its first `MAX_ARMS_IN_STUDY` arms as indented JSON."""
    content = study.model_dump(mode="json")
    content["arms"] = dict(islice(content["arms"].items(), MAX_ARMS_IN_STUDY))
    return json.dumps(content, indent=1, ensure_ascii=False)


def _headers(words: Words) -> tuple[str, ...]:
    return tuple(words(f"column.{name}") for name in ("record", "device", "code", "inputs"))


def _evaluation_cells(evaluated: Evaluated, words: Words) -> tuple[str, str, str]:
    """Return the cells of an evaluation; the device with the number of shards if its layers were shared."""
    device, code, inputs = _record_cells(evaluated.record)
    shards = evaluated.receipts.facts.shards
    return words("provenance.shards", device=device, shards=shards) if shards > 1 else device, code, inputs


def _record_cells(record: RunRecord) -> tuple[str, str, str]:
    inputs = ", ".join(f"{name} {digest[:SHORT_DIGEST]}" for name, digest in record.inputs_sha256.items())
    return record.device, record.code_digest[:SHORT_DIGEST], inputs
