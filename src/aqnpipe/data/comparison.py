"""The second generated task: numbers are read off a story and compared with one; nothing is computed but a count.

Written in the words of the word problems (`data/stories.py`), so that the tiny models' tokenizer serves both.
"""

from itertools import accumulate

import numpy as np

from aqnpipe.data.stories import DISTRACTORS, NAMES, OBJECTS, OPENINGS, Difficulty, Problem

QUESTIONS = {
    "more": "How many have more than {limit} {objects}?",
    "fewer": "How many have fewer than {limit} {objects}?",
}


def draw_comparison(rng: np.random.Generator, difficulty: Difficulty) -> Problem:
    """Draw one problem: `num_steps + 1` people with numbers, and how many of them have more, or fewer, than a limit.

    A worked step is a number, how it compares, and the tally so far. All numbers are 2 to `max_number`, so that every
    noun is a plural, and nobody has just the limit.
    """
    num_steps = int(rng.integers(difficulty.min_steps, difficulty.max_steps + 1))
    people = [NAMES[index] for index in rng.permutation(len(NAMES))[: num_steps + 1]]
    objects = _choose(rng, OBJECTS)
    limit = int(rng.integers(2, difficulty.max_number + 1))
    numbers = [_number_but(rng, limit, difficulty.max_number) for _ in people]
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
    worked = [f"{one} {relation} {tally}" for one, relation, tally in zip(numbers, relations, tallies, strict=True)]
    return Problem(
        question=" ".join([*facts, QUESTIONS[requested].format(limit=limit, objects=objects)]),
        answer="\n".join([*worked, f"#### {relations.count(requested)}"]),
        num_steps=num_steps,
        has_distractor=has_distractor,
    )


def _choose(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.integers(len(options)))]


def _number_but(rng: np.random.Generator, taken: int, max_number: int) -> int:
    """Draw one of 2 to `max_number` that is not `taken`."""
    number = int(rng.integers(2, max_number))
    return number + (number >= taken)


def _distraction(rng: np.random.Generator, objects: str, max_number: int) -> str:
    """Say something with a number that is not to be compared: other objects, or an age."""
    others = _choose(rng, tuple(one for one in OBJECTS if one != objects))
    number = int(rng.integers(2, max_number + 1))
    return _choose(rng, DISTRACTORS).format(D=_choose(rng, NAMES), d=number, others=others)
