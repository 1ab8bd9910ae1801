"""Words, sentences and arithmetic of the generated word problems. A story follows one quantity through its steps."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Operation = Literal["+", "-", "*", "/"]

HE_NAMES = ("Tom", "Sam", "Ben", "Max", "Leo", "Omar")
SHE_NAMES = ("Ann", "Mia", "Zoe", "Lily", "Emma", "Nora")
NAMES = HE_NAMES + SHE_NAMES
OBJECTS = ("apples", "books", "pens", "coins", "cards", "eggs", "cups", "toys", "shells", "stamps", "nuts", "balls")
CONTAINERS = ("bags", "boxes", "jars")

OPENINGS = ("{N} has {a} {objects}.", "{N} finds {a} {objects}.", "{N} buys {a} {objects}.")
# {S}: the person whose quantity it is (name or pronoun), {N}: the same by name, {M}: another person, {b}: the operand.
SAME_PERSON: dict[Operation, tuple[str, ...]] = {
    "+": ("{S} buys {b} more {objects}.", "{S} finds {b} more {objects}.", "{M} gives {N} {b} more {objects}."),
    "-": ("{S} loses {b} {objects}.", "{S} sells {b} {objects}.", "{S} gives {b} {objects} to {M}."),
    "*": ("After a year {N} has {b} times as many {objects}.",),
    "/": (
        "{S} puts the {objects} into {b} equal piles and keeps one pile.",
        "{S} packs the {objects} into {b} equal {containers} and keeps one of the {containers}.",
    ),
}
OTHER_PERSON: dict[Operation, tuple[str, ...]] = {
    "+": ("{M} has {b} more {objects} than {N}.",),
    "-": ("{M} has {b} fewer {objects} than {N}.",),
    "*": ("{M} has {b} times as many {objects} as {N}.",),
    "/": ("{N} has {b} times as many {objects} as {M}.",),
}
# Operands that are written as a word.
WORDED: dict[tuple[Operation, int], tuple[str, ...]] = {
    ("*", 2): ("{M} has twice as many {objects} as {N}.",),
    ("/", 2): ("{M} has half as many {objects} as {N}.",),
    ("/", 3): ("{M} has a third as many {objects} as {N}.",),
}
GROUPS = ("{N} has {a} {containers} with {b} {objects} each.", "{N} has {a} {containers}. Each has {b} {objects}.")
TOGETHER = "{M} has {b} {objects}."
DISTRACTORS = (
    "{D} has {d} {others}.",
    "{D} is {d} years old.",
    "{D} also has {d} {others}.",
    "{D} wants {d} {others}.",
)
QUESTIONS = ("How many {objects} does {N} have?", "How many {objects} does {N} have now?")
TOGETHER_QUESTION = "How many {objects} do {N} and {M} have together?"
PRONOUNS = ("He", "She")


@dataclass(frozen=True)
class Difficulty:
    """Difficulty of problems: number of steps, largest number, probability of a distracting sentence."""

    min_steps: int = 1
    max_steps: int = 3
    max_number: int = 20
    distractor_probability: float = 0.3


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in `#### n`.

    `kind`: what problems that differ in words and numbers alone have in common; their answers vary together.
    """

    question: str
    answer: str
    num_steps: int
    has_distractor: bool
    kind: str


@dataclass
class _Story:
    """A story under construction: the quantity so far, the person who has it, and the sentences so far."""

    rng: np.random.Generator
    max_number: int
    person: str
    objects: str
    containers: str
    value: int = 0
    sentences: list[str] = field(default_factory=list)
    worked_steps: list[str] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=lambda: list(NAMES))
    # The subject of the last sentence, to whom a pronoun in the next sentence would refer.
    last_named: str | None = None
    question: str = ""

    def __post_init__(self) -> None:
        self.newcomers.remove(self.person)

    def draw_newcomer(self) -> str:
        """Return a person not yet in the story; a second quantity of a person could contradict the first."""
        return self.newcomers.pop(int(self.rng.integers(len(self.newcomers))))

    def add_sentence(self, template: str, **words: object) -> None:
        known = {"N": self.person, "S": self.subject(), "objects": self.objects, "containers": self.containers}
        self.sentences.append(template.format(**known, **words))

    def subject(self) -> str:
        """Return a pronoun with probability 0.5 where it is unambiguous, else the name."""
        if self.last_named != self.person or self.rng.random() < 0.5:
            return self.person
        return PRONOUNS[0] if self.person in HE_NAMES else PRONOUNS[1]

    def apply_step(self, operation: Operation, operand: int) -> None:
        """Add a line to the worked answer and update the quantity."""
        result = apply(operation, self.value, operand)
        self.worked_steps.append(f"{self.value}{operation}{operand}={result}")
        self.operations.append(operation)
        self.value = result


def choose(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    """Return one of the options, all equally probable."""
    return options[int(rng.integers(len(options)))]


def apply(operation: Operation, left: int, right: int) -> int:
    """Return `left operation right`; ValueError if a division leaves a remainder."""
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    if operation == "*":
        return left * right
    if left % right:
        raise ValueError(f"{left}/{right} is not an integer")
    return left // right


def draw_problem(rng: np.random.Generator, difficulty: Difficulty) -> Problem:
    """Draw a problem: the number of steps and each operation are uniform among those allowed by `difficulty`."""
    num_steps = int(rng.integers(difficulty.min_steps, difficulty.max_steps + 1))
    person, objects, containers = choose(rng, NAMES), choose(rng, OBJECTS), choose(rng, CONTAINERS)
    story = _Story(rng, difficulty.max_number, person, objects, containers)
    _open(story)
    has_distractor = bool(rng.random() < difficulty.distractor_probability)
    # The step before which the distractor comes; `num_steps` puts it before the question.
    distractor_step = int(rng.integers(len(story.worked_steps), num_steps + 1)) if has_distractor else None
    while len(story.worked_steps) < num_steps:
        if len(story.worked_steps) == distractor_step:
            _add_distractor(story)
        _add_step(story, is_last=len(story.worked_steps) == num_steps - 1)
    if distractor_step == num_steps:
        _add_distractor(story)
    question = story.question or choose(story.rng, QUESTIONS).format(N=story.person, objects=story.objects)
    return Problem(
        question=" ".join([*story.sentences, question]),
        answer="\n".join([*story.worked_steps, f"#### {story.value}"]),
        num_steps=num_steps,
        has_distractor=has_distractor,
        kind="".join(story.operations),
    )


def _open(story: _Story) -> None:
    """Add the opening: a number or, with probability 0.2, equal groups, which count as the first step."""
    if story.rng.random() < 0.2:
        groups = int(story.rng.integers(2, story.max_number // 2 + 1))
        each = int(story.rng.integers(2, story.max_number // groups + 1))
        story.add_sentence(choose(story.rng, GROUPS), a=groups, b=each)
        story.value = groups
        story.apply_step("*", each)
    else:
        story.value = int(story.rng.integers(2, story.max_number + 1))
        story.add_sentence(choose(story.rng, OPENINGS), a=story.value)
    story.last_named = story.person


def _operands(value: int, max_number: int, is_last: bool) -> dict[Operation, list[int]]:
    """Return the operands of each operation whose result is in 1..max_number (0 is allowed in the last step).

    Operands start at 2, so that every noun is a plural and every step changes the quantity.
    """
    candidates: dict[Operation, list[int]] = {
        "+": list(range(2, max_number - value + 1)),
        "-": list(range(2, value + (1 if is_last else 0))),
        "*": list(range(2, max_number // value + 1)),
        "/": [operand for operand in range(2, value // 2 + 1) if value % operand == 0],
    }
    return {operation: operands for operation, operands in candidates.items() if operands}


def _add_step(story: _Story, is_last: bool) -> None:
    """Add a step: its sentence and its line of the worked answer."""
    candidates = _operands(story.value, story.max_number, is_last)
    operation = tuple(candidates)[int(story.rng.integers(len(candidates)))]
    operands = candidates[operation]
    operand = operands[int(story.rng.integers(len(operands)))]
    other = story.draw_newcomer()
    if is_last and operation == "+" and story.rng.random() < 0.3:
        story.add_sentence(TOGETHER, M=other, b=operand)
        story.question = TOGETHER_QUESTION.format(objects=story.objects, N=story.person, M=other)
    elif story.rng.random() < 0.5:
        story.add_sentence(choose(story.rng, SAME_PERSON[operation]), M=other, b=operand)
        story.last_named = None if story.sentences[-1].startswith(other) else story.person
    else:
        templates = OTHER_PERSON[operation] + WORDED.get((operation, operand), ())
        story.add_sentence(choose(story.rng, templates), M=other, b=operand)
        story.person = other
        story.last_named = other if story.sentences[-1].startswith(other) else None
    story.apply_step(operation, operand)


def _add_distractor(story: _Story) -> None:
    """Add a sentence with a number that the question does not need: of other objects, or an age."""
    others = choose(story.rng, tuple(objects for objects in OBJECTS if objects != story.objects))
    number = int(story.rng.integers(2, story.max_number + 1))
    story.add_sentence(choose(story.rng, DISTRACTORS), D=choose(story.rng, NAMES), d=number, others=others)
    story.last_named = None
