"""Words, sentences and arithmetic of the generated word problems: one story is one running quantity."""

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
# {S}: the person whose quantity runs (name or pronoun), {N}: the same by name, {M}: another person, {b}: the operand.
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
# Operands that have a word of their own.
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
    """What makes problems harder: steps, largest number anywhere in them, chance of a distracting sentence."""

    min_steps: int = 1
    max_steps: int = 3
    max_number: int = 20
    distractor_probability: float = 0.3


@dataclass(frozen=True)
class Problem:
    """A question and its worked answer, which ends in `#### n`."""

    question: str
    answer: str
    num_steps: int
    has_distractor: bool


@dataclass
class _Story:
    """A story being told: the quantity so far, whose it is, and what has been said."""

    rng: np.random.Generator
    max_number: int
    person: str
    objects: str
    containers: str
    value: int = 0
    sentences: list[str] = field(default_factory=list)
    worked_steps: list[str] = field(default_factory=list)
    newcomers: list[str] = field(default_factory=lambda: list(NAMES))
    # Whom a pronoun in the next sentence would mean: the last sentence's subject.
    last_named: str | None = None
    question: str = ""

    def __post_init__(self) -> None:
        self.newcomers.remove(self.person)

    def choose(self, options: tuple[str, ...]) -> str:
        return options[int(self.rng.integers(len(options)))]

    def someone_new(self) -> str:
        """Return a person whose quantity nothing was said about: else two sentences could contradict each other."""
        return self.newcomers.pop(int(self.rng.integers(len(self.newcomers))))

    def say(self, template: str, **words: object) -> None:
        known = {"N": self.person, "S": self.subject(), "objects": self.objects, "containers": self.containers}
        self.sentences.append(template.format(**known, **words))

    def subject(self) -> str:
        """Return a pronoun half of the time where it can mean nobody else, else the name."""
        if self.last_named != self.person or self.rng.random() < 0.5:
            return self.person
        return PRONOUNS[0] if self.person in HE_NAMES else PRONOUNS[1]

    def work(self, operation: Operation, operand: int) -> None:
        """Write one worked step down and carry its result on."""
        result = apply(operation, self.value, operand)
        self.worked_steps.append(f"{self.value}{operation}{operand}={result}")
        self.value = result


def apply(operation: Operation, left: int, right: int) -> int:
    """Return `left operation right`; a division that leaves a remainder raises ValueError."""
    if operation == "+":
        return left + right
    if operation == "-":
        return left - right
    if operation == "*":
        return left * right
    if left % right:
        raise ValueError(f"{left}/{right} is no integer")
    return left // right


def draw_problem(rng: np.random.Generator, difficulty: Difficulty) -> Problem:
    """Draw one problem: steps uniform in the range requested, operations uniform among those that stay in bounds."""
    num_steps = int(rng.integers(difficulty.min_steps, difficulty.max_steps + 1))
    person, objects, containers = (
        str(choices[int(rng.integers(len(choices)))]) for choices in (NAMES, OBJECTS, CONTAINERS)
    )
    story = _Story(rng, difficulty.max_number, person, objects, containers)
    _open(story)
    has_distractor = bool(rng.random() < difficulty.distractor_probability)
    # A distractor follows one of the sentences before the question.
    distractor_step = int(rng.integers(len(story.worked_steps), num_steps + 1)) if has_distractor else None
    while len(story.worked_steps) < num_steps:
        if len(story.worked_steps) == distractor_step:
            _distract(story)
        _tell_step(story, is_last=len(story.worked_steps) == num_steps - 1)
    if distractor_step == num_steps:
        _distract(story)
    question = story.question or story.choose(QUESTIONS).format(N=story.person, objects=story.objects)
    return Problem(
        question=" ".join([*story.sentences, question]),
        answer="\n".join([*story.worked_steps, f"#### {story.value}"]),
        num_steps=num_steps,
        has_distractor=has_distractor,
    )


def _open(story: _Story) -> None:
    """Say what there is at first: a number, or (one time in five) groups, which is a step already."""
    if story.rng.random() < 0.2:
        groups = int(story.rng.integers(2, story.max_number // 2 + 1))
        each = int(story.rng.integers(2, story.max_number // groups + 1))
        story.say(story.choose(GROUPS), a=groups, b=each)
        story.value = groups
        story.work("*", each)
    else:
        story.value = int(story.rng.integers(2, story.max_number + 1))
        story.say(story.choose(OPENINGS), a=story.value)
    story.last_named = story.person


def _operands(value: int, max_number: int, is_last: bool) -> dict[Operation, list[int]]:
    """Return, per operation, the operands whose result stays in 1..max_number (0 too where no step follows).

    Operands start at 2, so that every noun is a plural and every step changes something.
    """
    candidates: dict[Operation, list[int]] = {
        "+": list(range(2, max_number - value + 1)),
        "-": list(range(2, value + (1 if is_last else 0))),
        "*": list(range(2, max_number // value + 1)),
        "/": [operand for operand in range(2, value // 2 + 1) if value % operand == 0],
    }
    return {operation: operands for operation, operands in candidates.items() if operands}


def _tell_step(story: _Story, is_last: bool) -> None:
    """Tell and work one step."""
    candidates = _operands(story.value, story.max_number, is_last)
    operation = tuple(candidates)[int(story.rng.integers(len(candidates)))]
    operands = candidates[operation]
    operand = operands[int(story.rng.integers(len(operands)))]
    other = story.someone_new()
    if is_last and operation == "+" and story.rng.random() < 0.3:
        story.say(TOGETHER, M=other, b=operand)
        story.question = TOGETHER_QUESTION.format(objects=story.objects, N=story.person, M=other)
    elif story.rng.random() < 0.5:
        story.say(story.choose(SAME_PERSON[operation]), M=other, b=operand)
        story.last_named = None if story.sentences[-1].startswith(other) else story.person
    else:
        templates = OTHER_PERSON[operation] + WORDED.get((operation, operand), ())
        story.say(story.choose(templates), M=other, b=operand)
        story.person = other
        story.last_named = other if story.sentences[-1].startswith(other) else None
    story.work(operation, operand)


def _distract(story: _Story) -> None:
    """Say something with a number that the question does not need: other objects, or an age."""
    others = story.choose(tuple(objects for objects in OBJECTS if objects != story.objects))
    number = int(story.rng.integers(2, story.max_number + 1))
    story.say(story.choose(DISTRACTORS), D=story.choose(NAMES), d=number, others=others)
    story.last_named = None
