"""Generated problems of both tasks in the format of GSM8K. Every distinct question belongs to exactly one pool.

The second task compares numbers in a story with a limit and counts; no other arithmetic is needed. It uses the words of
the word problems (`data/stories.py`), so that both tasks share the tiny models' tokenizer.
"""

import hashlib
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Literal, get_args

import numpy as np

from aqnpipe.config.dataset import GeneratedDataset, GeneratedTask, Split
from aqnpipe.data.stories import DISTRACTORS, NAMES, OBJECTS, OPENINGS, Difficulty, Problem, choose, draw_problem
from aqnpipe.errors import DataError
from aqnpipe.seeding import derive_seed

Pool = Literal["pretrain", "selection", "train", "test"]

# The pool of each sixteenth of all questions. Only the recipe of the built-in models uses `pretrain` and `selection`.
_POOL_OF_SIXTEENTH: tuple[Pool, ...] = ("pretrain",) * 8 + ("selection",) + ("train",) * 4 + ("test",) * 3
# A pool counts as exhausted after this many draws without a new problem (one or two seconds). The probability of a new
# problem per draw is then below one in a thousand.
_MAX_DRAWS_WITHOUT_NEW_PROBLEM = 10_000

QUESTIONS = {
    "more": "How many have more than {limit} {objects}?",
    "fewer": "How many have fewer than {limit} {objects}?",
}


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
    return take_problems(config.seed, split, difficulty_of(config), count, config.task)


def difficulty_of(config: GeneratedDataset) -> Difficulty:
    """Return the difficulty parameters of a data set."""
    return Difficulty(config.min_steps, config.max_steps, config.max_number, config.distractor_probability)


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
    requested = choose(rng, tuple(QUESTIONS))
    relations = ["more" if number > limit else "fewer" for number in numbers]
    tallies = accumulate(int(relation == requested) for relation in relations)
    worked = [
        f"{number} {relation} {tally}" for number, relation, tally in zip(numbers, relations, tallies, strict=True)
    ]
    return Problem(
        question=" ".join([*facts, QUESTIONS[requested].format(limit=limit, objects=objects)]),
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
