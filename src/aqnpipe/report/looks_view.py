"""The looks of a study that adds seeds until its claims are decided: which claims ended at which look."""

from collections import Counter

from aqnpipe.artifacts.comparisons import ClaimsFile
from aqnpipe.report.claims_view import claim_text
from aqnpipe.report.tables import Row, Table
from aqnpipe.report.words import Words

MAX_CLAIMS_PER_LOOK = 20
"""Claims that are named where they ended; claims.json has all of them."""


def look_table(claims: ClaimsFile, words: Words) -> Table | None:
    """Return a row per look: its seeds, the claims that ended there, and how many stay open; None without looks."""
    texts = {claim.comparison_id: claim_text(claim, words) for claim in claims.claims}
    rows: list[Row] = []
    states: dict[str, str] = {}
    for look in claims.looks:
        ended = [claim for claim in look.claims if claim.state not in ("open", states.get(claim.comparison_id))]
        states = {claim.comparison_id: claim.state for claim in look.claims}
        shown = [
            words(
                "looks.ended",
                claim=texts.get(claim.comparison_id, claim.comparison_id),
                state=words(f"looks.state.{claim.state}"),
            )
            for claim in ended[:MAX_CLAIMS_PER_LOOK]
        ]
        if others := ended[MAX_CLAIMS_PER_LOOK:]:
            counts = Counter(claim.state for claim in others)
            parts = [
                words("summary.part", count=count, verdict=words(f"looks.state.{state}"))
                for state, count in counts.items()
            ]
            shown.append(words("looks.more", count=len(others), parts=words("summary.separator").join(parts)))
        num_open = sum(state == "open" for state in states.values())
        ended_here = words("list.separator").join(shown) or words("looks.nothing")
        rows.append(Row((str(look.look), str(look.seeds), ended_here, str(num_open))))
    headers = tuple(words(f"looks.column.{name}") for name in ("look", "seeds", "ended", "open"))
    return Table("looks", words("looks.title"), headers, tuple(rows), 1) if rows else None
