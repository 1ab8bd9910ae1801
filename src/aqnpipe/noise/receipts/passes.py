"""The passes of a phase, step by step, and what a study requires of them.

Other parts of a receipt say what the noise of a phase was; this one says when. A row counts the passes of one phase in
one optimiser step. What a step needs follows from the study alone, and every row is compared with it, so noise that
stops after some steps, a phase that skips one, or a pass in another number format shows as a row that is missing or
different.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from pydantic import ConfigDict

from aqnpipe.config.noise import Phase

_LISTED_STEPS = 4


@dataclass
class PassRow:
    """The passes of one phase in one step, and what was seen of them.

    `sequences` were read from their first token on, without gradients; `trained_sequences` with gradients. Both are
    None where an engine does not say. `noised_parts` counts, over all passes, the layers (and output projection) with
    an error on at least one operator; None where it is not counted. `formats`: the number formats of the passes.
    `workers`: how many workers the row adds up.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    phase: Phase
    step: int
    passes: int = 0
    gradient_passes: int = 0
    sequences: int | None = None
    trained_sequences: int = 0
    noised_parts: int | None = None
    formats: set[str] = field(default_factory=set)
    workers: int = 1

    @property
    def place(self) -> tuple[Phase, int]:
        """Phase and step."""
        return self.phase, self.step

    def add(self, other: "PassRow") -> None:
        """Add later passes of the same worker."""
        self.passes += other.passes
        self.gradient_passes += other.gradient_passes
        self.trained_sequences += other.trained_sequences
        self.formats |= other.formats
        if other.sequences is not None:
            self.sequences = (self.sequences or 0) + other.sequences
        if other.noised_parts is not None:
            self.noised_parts = (self.noised_parts or 0) + other.noised_parts


class RequiredPasses(NamedTuple):
    """Passes that a study requires of one phase, on each worker.

    In every step of `steps`, `sequences` are read without gradients (None: any number above 0); in those of
    `trained_steps`, `trained_sequences` with gradients. `num_format`: that of all passes. `drops`: passes may have
    dropout.
    """

    phase: Phase
    num_format: str
    steps: Collection[int] = ()
    sequences: int | None = None
    trained_steps: Collection[int] = ()
    trained_sequences: int = 0
    drops: bool = False


def pass_problems(
    required: Sequence[RequiredPasses],
    rows: Mapping[tuple[Phase, int], PassRow],
    noised_parts: Mapping[Phase, int],
    steps_done: int,
) -> list[str]:
    """Return one line per difference between the required passes of the steps done and the rows that were seen.

    `noised_parts`: the parts of the model with noise in every pass of a phase, for phases that have noise.
    """
    found: dict[str, list[int]] = {}
    for phase in required:
        # A validation has the number of the steps before it.
        for step in range(steps_done + (phase.phase == "validation")):
            row = rows.get((phase.phase, step)) or PassRow(phase.phase, step, sequences=0)
            for problem in _row_problems(phase, row, noised_parts.get(phase.phase, 0)):
                found.setdefault(f"{phase.phase}: {problem}", []).append(step)
    for step in range(steps_done) if required else ():
        trained, backward = (rows.get((phase, step)) for phase in ("actor_forward", "backward"))
        passes, graphs = backward.passes if backward else 0, trained.gradient_passes if trained else 0
        if passes != graphs:
            found.setdefault(f"backward: {passes} passes, the actor's had {graphs}", []).append(step)
        elif backward and noised_parts.get("backward", 0) * passes > (backward.noised_parts or 0):
            found.setdefault(f"backward: {_too_few_parts(backward, noised_parts['backward'])}", []).append(step)
    return [f"{problem}, in {_steps(steps)}" for problem, steps in found.items()]


def _row_problems(required: RequiredPasses, row: PassRow, noised_parts: int) -> Iterator[str]:
    is_due = row.step in required.steps
    if is_due and not row.passes:
        yield "no pass of it was seen"
        return
    sequences = (required.sequences or 0) * row.workers if is_due else 0
    if row.sequences is not None and required.sequences is not None and row.sequences != sequences:
        yield f"{row.sequences} sequences were read from their first token on, the study needs {sequences}"
    trained = required.trained_sequences * row.workers if row.step in required.trained_steps else 0
    if row.trained_sequences != trained:
        yield f"{row.trained_sequences} sequences were trained on, the study needs {trained}"
    if row.noised_parts is not None and row.noised_parts < noised_parts * row.passes:
        yield _too_few_parts(row, noised_parts)
    allowed = {required.num_format, *([f"{required.num_format} with dropout"] if required.drops else ())}
    for other in sorted(row.formats - allowed):
        yield f"passes computed in {other}, the study asks for {required.num_format}"


def _too_few_parts(row: PassRow, noised_parts: int) -> str:
    return f"its {row.passes} passes had noise in {row.noised_parts} layers altogether, expected {noised_parts} in each"


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:_LISTED_STEPS]))
    more = f" and {len(steps) - _LISTED_STEPS} more" if len(steps) > _LISTED_STEPS else ""
    return f"step {shown}{more}"
