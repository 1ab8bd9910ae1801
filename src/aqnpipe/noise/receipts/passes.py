"""The passes of a phase, step by step, against those that a study requires.

Other checks ask what the noise of a phase was; this one asks when. Every required row is compared with the row that was
seen, so noise that stops after some steps, a phase that skips one, or a pass in another number format is a difference.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aqnpipe.config.model import Attention
from aqnpipe.models.layout import ATTENTION_KERNELS
from aqnpipe.noise.receipts.table import Row, TablePhase

if TYPE_CHECKING:
    from aqnpipe.noise.receipts.receipt import Receipt

_LISTED_STEPS = 4
_STATED = {"formats": "", "modes": " mode", "attention": " attention", "algorithms": " algorithms"}
"""Columns with what the study states of every pass, and the word behind their values."""


def pass_problems(receipt: "Receipt", steps_done: int) -> list[str]:
    """Return one line per difference between the required passes of the steps done and the rows that were seen."""
    seen = {(row.phase, row.step): row for row in receipt.rows if row.step is not None and not row.operator}
    parts = _noised_parts(receipt)
    found: dict[str, list[int]] = {}
    for needed in receipt.required:
        step = needed.step or 0
        # A validation has the number of the steps before it.
        if step < steps_done + (needed.phase == "validation"):
            row = seen.get((needed.phase, step)) or Row(needed.phase, step, sequences=0)
            for problem in _differences(needed, row, parts.get(needed.phase, 0), receipt.num_workers):
                found.setdefault(f"{needed.phase}: {problem}", []).append(step)
    for step in range(steps_done) if receipt.required else ():
        backward = seen.get(("backward", step)) or Row("backward", step)
        graphs = (seen.get(("actor_forward", step)) or Row("actor_forward")).gradient_passes
        if backward.passes != graphs:
            found.setdefault(f"backward: ran {backward.passes} times, the actor {graphs} times", []).append(step)
        elif parts.get("backward", 0) * backward.passes > (backward.noised_parts or 0):
            found.setdefault(f"backward: {_too_few_parts(backward, parts['backward'])}", []).append(step)
    late = (
        f"{row.phase}: a first forward pass began at position {row.largest_first_position}: tokens were read before"
        for row in receipt.rows
        if row.largest_first_position
    )
    return [*(f"{problem}, in {_steps(steps)}" for problem, steps in found.items()), *dict.fromkeys(late)]


def places_with_gradients(receipt: "Receipt", phase: TablePhase) -> set[int]:
    """Return the layers, and as the number after them the output projection, that a phase must reach.

    A backward pass must reach those whose inputs need a gradient. In others, as below the first adapter, some products
    may need one: the audit refuses each of these without noise.
    """
    needing = [row.gradients for row in receipt.phases if row.gradients is not None]
    if phase != "backward" or not needing:
        return set(range(receipt.num_layers + 1))
    return set().union(*needing)


def noised_places(receipt: "Receipt") -> set[int]:
    """Return the layers, and as the number after them the output projection, of which operator noise was requested."""
    noise, places = receipt.operator_noise, range(receipt.num_layers + 1)
    if noise is None or not noise.is_active:
        return set()
    return {place for place in places if noise.error_in(place if place < receipt.num_layers else None) is not None}


def _noised_parts(receipt: "Receipt") -> Mapping[TablePhase, int]:
    """Return in how many parts of the model each pass of a phase needs an error, for the phases that have noise."""
    noised, noise = noised_places(receipt), receipt.operator_noise
    phases = noise.phases if noise is not None and noise.is_active else ()
    return {phase: len(noised & places_with_gradients(receipt, phase)) for phase in phases}


def _differences(needed: Row, row: Row, noised_parts: int, num_workers: int) -> Iterator[str]:
    if needed.passes and not row.passes:
        yield "it was never seen"
        return
    sequences = None if needed.sequences is None else needed.sequences * num_workers
    if row.sequences is not None and sequences is not None and row.sequences != sequences:
        yield f"{row.sequences} sequences were read from their first token on, the study needs {sequences}"
    trained = needed.trained_sequences * num_workers
    if row.trained_sequences != trained:
        yield f"{row.trained_sequences} sequences were trained on, the study needs {trained}"
    if row.noised_parts is not None and row.noised_parts < noised_parts * row.passes:
        yield _too_few_parts(row, noised_parts)
    yield from other_settings(needed, row)


def stated(num_format: str, attention: Attention, mode: str = "evaluation") -> dict[str, Any]:
    """Return the columns of what a study states of every pass; no setting of it asks for deterministic algorithms."""
    return {
        "formats": {num_format},
        "modes": {mode},
        "attention": set(ATTENTION_KERNELS[attention]),
        "algorithms": {"default"},
    }


def other_settings(needed: Row, row: Row) -> Iterator[str]:
    """Yield the number formats, modes, attention kernels and algorithms of passes that the study does not state."""
    for column, what in _STATED.items():
        allowed = getattr(needed, column)
        for other in sorted(getattr(row, column) - allowed):
            yield f"computed in {other}{what}, the study asks for {min(allowed, key=len)}"


def _too_few_parts(row: Row, noised_parts: int) -> str:
    return f"ran {row.passes} times with noise in {row.noised_parts} layers altogether, expected {noised_parts} in each"


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_LISTED_STEPS]))
    more = f" and {len(steps) - _LISTED_STEPS} more" if len(steps) > _LISTED_STEPS else ""
    return f"step {shown}{more}"
