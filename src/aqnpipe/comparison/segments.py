"""The effect of one claim by segment of the questions: by kind of problem, and by the steps of the worked answer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import polars as pl

from aqnpipe.artifacts.comparisons import SegmentBy, SegmentEffect
from aqnpipe.comparison.contrasts import Contrast, Scores
from aqnpipe.statistics.clusters import Clusters
from aqnpipe.statistics.crossed_effects import estimate_difference

MIN_QUESTIONS = 10
"""A smaller segment is left out: its interval says nothing."""
MAX_SEGMENTS = 12
"""Of kinds of problems, the most frequent ones. Where every question has a kind of its own, none is shown."""


def segment_effects(contrasts: Sequence[Contrast], questions: pl.DataFrame, alpha: float) -> tuple[SegmentEffect, ...]:
    """Return the effects of the primary claim, else of the first one with data; empty if there are no two segments.

    questions: columns as in `artifacts.problems.ProblemTable`. Intervals are at 1 - alpha, each by itself.
    """
    primary = [contrast for contrast in contrasts if contrast.comparison.role == "primary"]
    chosen = next((one for one in primary or contrasts if one.scores is not None), None)
    if chosen is None or chosen.scores is None:
        return ()
    rows = {row["question_id"]: row for row in questions.iter_rows(named=True)}
    asked = [rows.get(name, {}) for name in chosen.scores.question_ids]
    labels: Mapping[SegmentBy, list[object]] = {
        "kind": [row.get("cluster") for row in asked],
        "steps": [_num_steps(row.get("answer", "")) for row in asked],
    }
    return tuple(
        effect
        for by, values in labels.items()
        for effect in _effects(chosen.comparison_id, chosen.scores, by, values, alpha)
    )


def _num_steps(answer: str) -> int | None:
    """Return the number of lines before the one with `####`; None for an answer that is not worked like this."""
    *steps, last = [line for line in answer.splitlines() if line.strip()] or [""]
    return len(steps) if steps and last.startswith("####") else None


def _effects(
    comparison_id: str, scores: Scores, by: SegmentBy, labels: Sequence[object], alpha: float
) -> Iterator[SegmentEffect]:
    counts = [(label, count) for label, count in Counter(labels).most_common() if count >= MIN_QUESTIONS]
    shown = [label for label, _ in counts[:MAX_SEGMENTS]]
    if None in labels or len(shown) < 2:
        return
    for label in sorted(shown) if by == "steps" else shown:  # type: ignore[type-var]
        chosen = np.array([other == label for other in labels])
        codes = np.zeros(0) if scores.clusters is None else scores.clusters.codes[chosen]
        # The questions of one kind are one cluster: then they are the units.
        clusters = Clusters.of(codes.tolist()) if len(set(codes)) > 1 else None
        estimate = estimate_difference(scores.treatment[:, chosen], scores.control[:, chosen], None, clusters)
        yield SegmentEffect(
            comparison_id=comparison_id,
            by=by,
            segment=str(label),
            num_questions=int(chosen.sum()),
            num_clusters=None if clusters is None else clusters.number,
            **estimate.columns(1 - alpha, scores.bound),
        )
