"""The parity of two captures: operators, log-probabilities, and a verdict."""

from collections import Counter
from collections.abc import Callable

import polars as pl

from aqnpipe.artifacts.parities import (
    SEVERITY,
    WITHIN_ROUNDING,
    OperatorParity,
    ParityFile,
    ParityVerdict,
    Substitution,
)
from aqnpipe.parity.capture_file import Capture
from aqnpipe.parity.compare import Sides, compare_operators, function_differences, setting_differences, sides_of
from aqnpipe.parity.effects import log_probability_differences

_NAMED = 3


def parity_of(first: Capture, second: Capture, substitute: Callable[[Sides], Substitution] | None = None) -> ParityFile:
    """Return the parity of two captures; `substitute` measures which operators explain the log-probabilities.

    Raises DataError if the captures cannot be compared.
    """
    sides, notes = sides_of(first, second)
    operators = compare_operators(sides)
    beyond = [operator for operator in operators if operator.verdict not in WITHIN_ROUNDING]
    verdict: ParityVerdict = max((operator.verdict for operator in operators), key=SEVERITY.index)
    log_probabilities = log_probability_differences(sides.first, sides.second)
    if verdict == "equal" and log_probabilities.largest > 0:
        # Operators were recorded on some tokens only, so the cause is in others.
        verdict = "not located"
    # With the same inputs a setting that changes a result is a fault of its operator.
    other_function = () if sides.same_inputs else function_differences(sides.first.identity, sides.second.identity)
    if other_function and verdict != "fault" and log_probabilities.largest > 0:
        verdict = "different function"
    stale = [*sides.first.identity.stale_parameters, *sides.second.identity.stale_parameters]
    if stale:
        verdict = "stale weights"
    if substitute is None:
        notes += ("No model was given (--model), so no operator was put in the place of another.",)
    elif not sides.same_inputs:
        notes += ("Operators are put in each other's place only if the second capture was made with --replay.",)
        substitute = None
    notes += _not_compared(sides)
    return ParityFile(
        verdict=verdict,
        summary=_summary(verdict, sides, beyond, other_function, log_probabilities.rms),
        first=sides.first.identity,
        second=sides.second.identity,
        same_inputs=sides.same_inputs,
        num_rows=sides.shared.num_rows,
        first_beyond_rounding=beyond[0].name if beyond else None,
        operators=operators,
        log_probabilities=log_probabilities,
        substitution=None if substitute is None else substitute(sides),
        settings=setting_differences(sides.first.identity, sides.second.identity),
        notes=notes,
    )


def _not_compared(sides: Sides) -> tuple[str, ...]:
    """Return a note if no operator was compared while decoding, because operators were recorded on some tokens only."""
    decoded = sides.first.tokens.join(sides.second.tokens, on=["sequence", "position"], suffix="_second").filter(
        pl.col("is_decoded") | pl.col("is_decoded_second")
    )
    places = decoded.select("sequence", "position").iter_rows()
    if decoded.height and not any(sides.shared.row(*place) is not None for place in places):
        return ("No decoded token is among the recorded ones: no operator was compared while decoding.",)
    return ()


def _summary(
    verdict: ParityVerdict, sides: Sides, beyond: list[OperatorParity], other_function: tuple[str, ...], rms: float
) -> str:
    if verdict == "stale weights":
        parts = [
            f"the {name} side computed with other weights than its files: {_list(list(side.identity.stale_parameters))}"
            for name, side in (("first", sides.first), ("second", sides.second))
            if side.identity.stale_parameters
        ]
        return f"{'; '.join(parts)}. What follows is not noise of a machine."
    if verdict == "different function":
        return (
            f"the two sides do not compute the same function: their models have other settings "
            f"({_list(list(other_function))}), and log-probabilities differ by {rms:.2g} nats (RMS). Operators were "
            "compared with what the settings of their side ask for; capture the second side again with --replay to "
            "see which of them differ on the same input."
        )
    if verdict == "equal":
        return "every operator gives the same bits on both sides."
    if verdict == "not located":
        return (
            "log-probabilities differ although the recorded operators are equal: the cause is in tokens, batches or "
            "channels that were not recorded. Capture again with more --rows."
        )
    if verdict == "rounding" and sides.same_inputs:
        return "all operators differ by rounding at most."
    if verdict == "rounding":
        return "every operator is within rounding of the exact result for the input that it has on its side."
    worst = [operator for operator in beyond if operator.verdict == verdict]
    first = beyond[0]
    return (
        f"{len(worst)} operators ({_list(list(Counter(operator.kind for operator in worst)))}) are of verdict "
        f"{verdict!r}; the first beyond rounding is {first.name}: {first.reason}."
    )


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
