"""The second generated task: compare numbers in a story with a limit and count; no other arithmetic is needed.

It uses the words of the word problems (`data/stories.py`), so that both tasks share the tiny models' tokenizer.
"""

from itertools import accumulate

import numpy as np

from aqnpipe.data.stories import DISTRACTORS, NAMES, OBJECTS, OPENINGS, Difficulty, Problem

QUESTIONS = {
    "more": "How many have more than {limit} {objects}?",
    "fewer": "How many have fewer than {limit} {objects}?",
}


def draw_comparison(rng: np.random.Generator, difficulty: Difficulty) -> Problem:
    """Draw a problem: `num_steps + 1` people have numbers of objects; how many have more, or fewer, than a limit?

    A line of the worked answer has a number, its relation to the limit and the count so far. Numbers are 2 to
    `max_number`, so that every noun is a plural, and none equals the limit.
    """
    num_steps = int(rng.integers(difficulty.min_steps, difficulty.max_steps + 1))
    people = [NAMES[index] for index in rng.permutation(len(NAMES))[: num_steps + 1]]
    objects = _choose(rng, OBJECTS)
    limit = int(rng.integers(2, difficulty.max_number + 1))
    numbers = [_draw_other_number(rng, limit, difficulty.max_number) for _ in people]
    facts = [
        _choose(rng, OPENINGS).format(N=person, a=number, objects=objects)
        for person, number in zip(people, numbers, strict=True)
    ]
    has_distractor = bool(rng.random() < difficulty.distractor_probability)
    if has_distractor:
        facts.insert(int(rng.integers(len(facts) + 1)), _distraction(rng, objects, difficulty.max_number))
    requested = _choose(rng, tuple(QUESTIONS))
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


def _choose(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _draw_other_number(rng: np.random.Generator, taken: int, max_number: int) -> int:
    """Draw a number from 2 to `max_number` other than `taken`."""
    number = int(rng.integers(2, max_number))
    return number + (number >= taken)


def _distraction(rng: np.random.Generator, objects: str, max_number: int) -> str:
    """Return a sentence with a number that must be ignored: of other objects, or an age."""
    others = _choose(rng, tuple(other for other in OBJECTS if other != objects))
    number = int(rng.integers(2, max_number + 1))
    return _choose(rng, DISTRACTORS).format(D=_choose(rng, NAMES), d=number, others=others)
