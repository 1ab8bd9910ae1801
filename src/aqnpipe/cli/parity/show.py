"""A parity as lines for the terminal."""

from collections.abc import Sequence
from statistics import median_high

from aqnpipe.artifacts.parities import SEVERITY, OperatorParity, ParityFile, Substitution
from aqnpipe.cli.options import aligned

HEADINGS = (
    "operator",
    "layers",
    "verdict",
    "operator error",
    "bias",
    "ulps (99 %)",
    "same bits",
    "of bound",
    "accumulated",
    "alone, nats",
)
MEANINGS = (
    "operator error: RMS on the same input, relative to the results; bias: mean in the same unit; ulps: in the coarser "
    "dtype; of bound: largest error over the forward error bounds; accumulated: in each side's forward passes, at the "
    "last layer; alone: RMS change of log-probabilities with the second side's operator in the first side's place."
)


def text_of(file: ParityFile) -> list[str]:
    """Return the parity as lines: verdict, operators by kind, log-probabilities, and what explains them."""
    lines = [
        f"first:  {file.first.setting}",
        f"second: {file.second.setting}",
        f"differing settings: {'; '.join(file.settings) or 'none'}",
        "",
        f"{file.verdict}: {file.summary}",
        "",
        *aligned([HEADINGS, *kind_rows(file)]),
        MEANINGS,
        "",
        *reasons(file),
        *log_probability_lines(file),
        *scale_lines(file),
    ]
    if file.substitution is not None:
        lines += ["", *substitution_lines(file.substitution)]
    return [*lines, *(["", *file.notes] if file.notes else [])]


def kind_rows(file: ParityFile) -> list[tuple[str, ...]]:
    """Return one row of cells per kind of operator, each with the worst of its layers."""
    alone = {row.kinds[0]: row.rms for row in file.substitution.alone} if file.substitution else {}
    return [_kind_row(kind, rows, alone.get(kind)) for kind, rows in _by_kind(file.operators).items()]


def _kind_row(kind: str, rows: Sequence[OperatorParity], alone: float | None) -> tuple[str, ...]:
    worst = max(rows, key=lambda row: SEVERITY.index(row.verdict))
    same = [row.equal_share for row in rows if row.equal_share is not None]
    return (
        kind,
        str(len(rows)),
        worst.verdict,
        f"{median_high(row.relative_rms for row in rows):.2g}",
        f"{max((row.bias for row in rows), key=abs):+.1g}",
        f"{median_high(row.ulps_p99 for row in rows):.3g}",
        f"{100 * sum(same) / len(same):.0f} %" if same else "",
        f"{max(row.bound_share for row in rows):.2g}",
        f"{rows[-1].accumulated_relative_rms:.2g}",
        "" if alone is None else f"{alone:.2g}",
    )


def reasons(file: ParityFile) -> list[str]:
    """Return why operators are beyond rounding, once for each kind and reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for row in file.operators:
        if row.verdict in ("different algorithm", "fault"):
            place = "" if row.layer is None else str(row.layer)
            found.setdefault((row.kind, row.verdict, row.reason), []).append(place)
    lines = [f"{kind}{_layers(places)}: {verdict}: {reason}" for (kind, verdict, reason), places in found.items()]
    return [*lines, ""] if lines else []


def _layers(places: list[str]) -> str:
    if places == [""]:
        return ""
    shown = ", ".join(places) if len(places) < 6 else f"{', '.join(places[:3])} ... {places[-1]}"
    return f" (layer{'s' if len(places) > 1 else ''} {shown})"


def log_probability_lines(file: ParityFile) -> list[str]:
    """Return the differences of the log-probabilities in words."""
    found = file.log_probabilities
    parts = [
        f"{name} {value:.2g}"
        for name, value in (("prefill", found.prefill_rms), ("decoding", found.decode_rms))
        if value is not None
    ]
    return [
        f"log-probabilities of {found.num_tokens} tokens: mean {found.mean:+.2g}, RMS {found.rms:.2g} nats "
        f"({', '.join(parts)}), 99th percentile {found.p99:.2g}, largest {found.largest:.2g}; "
        f"another token most likely in {100 * found.argmax_changes:.2g} %"
    ]


def scale_lines(file: ParityFile) -> list[str]:
    """Return relative noise of 5 % on matrix products as a multiple of the measured difference; empty if it is zero."""
    products = [row.relative_rms for row in file.operators if row.is_product]
    typical = median_high(products) if products else 0.0
    if not typical:
        return []
    return [
        f"noise of 5 % on matrix products is {0.05 / typical:.2g} times the difference of theirs here (median relative "
        f"RMS {typical:.2g})"
    ]


def substitution_lines(found: Substitution) -> list[str]:
    """Return which operators explain the difference of the log-probabilities."""
    if not found.alone:
        return ["no operator of the second side changes a log-probability"]
    lines = [
        f"the second side's operators in the first side's place, on {found.num_tokens} tokens that differ by RMS "
        f"{found.rms:.2g} nats:"
    ]
    rows = [("operators", "RMS, nats", "explained")]
    rows += [
        (_kinds(row.kinds), f"{row.rms:.2g}", share_of(row.explained)) for row in (found.alone[0], *found.together)
    ]
    return [
        *lines,
        *aligned(rows),
        "Rounding errors do not repeat when their inputs change a little: they may have the whole size and explain "
        "nothing. What explains a large share is systematic.",
    ]


def share_of(explained: float | None) -> str:
    """Return a share of the mean square in words; a negative one explains nothing."""
    return "" if explained is None else f"{100 * max(0.0, explained):.0f} %"


def _kinds(kinds: Sequence[str]) -> str:
    return " + ".join(kinds) if len(kinds) < 6 else f"all {len(kinds)}"


def _by_kind(rows: Sequence[OperatorParity]) -> dict[str, list[OperatorParity]]:
    found: dict[str, list[OperatorParity]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    return found
