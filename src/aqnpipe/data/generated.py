"""Generated problems of both tasks in the format of GSM8K. Every distinct question belongs to exactly one pool.

The second task compares numbers in a story with a limit and counts; no other arithmetic is needed. It uses the words of
the word problems, so that both tasks share the tiny models' tokenizer.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

from aqnpipe.config.dataset import GeneratedDataset, GeneratedTask, Split
from aqnpipe.errors import DataError
from aqnpipe.seeding import derive_seed

Pool = Literal["pretrain", "selection", "train", "test"]

# The pool of each sixteenth of all questions. Only the recipe of the built-in models uses `pretrain` and `selection`.
_POOL_OF_SIXTEENTH: tuple[Pool, ...] = ("pretrain",) * 8 + ("selection",) + ("train",) * 4 + ("test",) * 3
# A pool counts as exhausted after this many draws without a new problem (one or two seconds). The probability of a new
# problem per draw is then below one in a thousand.
_MAX_DRAWS_WITHOUT_NEW_PROBLEM = 10_000

COMPARISONS = {
    "more": "How many have more than {limit} {objects}?",
    "fewer": "How many have fewer than {limit} {objects}?",
}

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


def normalise_question(question: str) -> str:
    """Return `question` in lower case with single spaces. Questions that agree in this form count as the same."""
    return " ".join(question.lower().split())


def pool_of(question: str) -> Pool:
    """Return the pool of a question, which depends only on its normalised text (not on a seed)."""
    digest = hashlib.blake2b(normalise_question(question).encode(), digest_size=8).digest()
    return _POOL_OF_SIXTEENTH[int.from_bytes(digest, "little") % len(_POOL_OF_SIXTEENTH)]


def problem_stream(
    seed: int, pool: Pool, difficulty: Difficulty, task: GeneratedTask = "word_problems"
) -> Iterator[Problem]:
    """Yield distinct problems of a task and pool until the pool is exhausted.

    The same arguments give the same problems in the same order.
    """
    rng = np.random.default_rng(derive_seed(seed, task, get_args(Pool).index(pool)))
    seen: set[str] = set()
    repeats = 0
    while repeats < _MAX_DRAWS_WITHOUT_NEW_PROBLEM:
        problem = _DRAW[task](rng, difficulty)
        key = normalise_question(problem.question)
        if key in seen or pool_of(key) != pool:
            repeats += 1
            continue
        seen.add(key)
        repeats = 0
        yield problem


def take_problems(
    seed: int, pool: Pool, difficulty: Difficulty, count: int, task: GeneratedTask = "word_problems"
) -> list[Problem]:
    """Return the first `count` problems of a stream; DataError if there are fewer."""
    stream = problem_stream(seed, pool, difficulty, task)
    problems = [problem for problem, _ in zip(stream, range(count), strict=False)]
    if len(problems) < count:
        raise DataError(
            f"generated data set: found only {len(problems)} distinct {pool} problems with {difficulty}, "
            f"expected {count}; ask for fewer or widen the difficulty"
        )
    return problems


def generate_problems(config: GeneratedDataset, split: Split) -> list[Problem]:
    """Return the problems of a split; DataError if more are requested than exist."""
    count = config.num_train if split == "train" else config.num_test
    limits = Difficulty(config.min_steps, config.max_steps, config.max_number, config.distractor_probability)
    return take_problems(config.seed, split, limits, count, config.task)


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


def _draw_comparison(rng: np.random.Generator, difficulty: Difficulty) -> Problem:
    """Draw a problem: `num_steps + 1` people have numbers of objects; how many have more, or fewer, than a limit?

    A line of the worked answer has a number, its relation to the limit and the count so far. Numbers are 2 to
    `max_number`, so that every noun is a plural, and none equals the limit.
    """
    num_steps = int(rng.integers(difficulty.min_steps, difficulty.max_steps + 1))
    people = [NAMES[index] for index in rng.permutation(len(NAMES))[: num_steps + 1]]
    objects = choose(rng, OBJECTS)
    limit = int(rng.integers(2, difficulty.max_number + 1))
    numbers = [_draw_other_number(rng, limit, difficulty.max_number) for _ in people]
    facts = [
        choose(rng, OPENINGS).format(N=person, a=number, objects=objects)
        for person, number in zip(people, numbers, strict=True)
    ]
    has_distractor = bool(rng.random() < difficulty.distractor_probability)
    if has_distractor:
        facts.insert(int(rng.integers(len(facts) + 1)), _distraction(rng, objects, difficulty.max_number))
    requested = choose(rng, tuple(COMPARISONS))
    relations = ["more" if number > limit else "fewer" for number in numbers]
    tallies = accumulate(int(relation == requested) for relation in relations)
    worked = [
        f"{number} {relation} {tally}" for number, relation, tally in zip(numbers, relations, tallies, strict=True)
    ]
    return Problem(
        question=" ".join([*facts, COMPARISONS[requested].format(limit=limit, objects=objects)]),
        answer="\n".join([*worked, f"#### {relations.count(requested)}"]),
        num_steps=num_steps,
        has_distractor=has_distractor,
        kind=f"{requested} of {len(numbers)}",
    )


def _draw_other_number(rng: np.random.Generator, taken: int, max_number: int) -> int:
    """Draw a number from 2 to `max_number` other than `taken`."""
    number = int(rng.integers(2, max_number))
    return number + (number >= taken)


def _distraction(rng: np.random.Generator, objects: str, max_number: int) -> str:
    """Return a sentence with a number that must be ignored: of other objects, or an age."""
    others = choose(rng, tuple(other for other in OBJECTS if other != objects))
    number = int(rng.integers(2, max_number + 1))
    return choose(rng, DISTRACTORS).format(D=choose(rng, NAMES), d=number, others=others)


_DRAW: dict[GeneratedTask, Callable[[np.random.Generator, Difficulty], Problem]] = {
    "word_problems": draw_problem,
    "comparison": _draw_comparison,
}
