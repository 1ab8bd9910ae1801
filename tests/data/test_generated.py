"""Generated questions of both tasks: every answer is derived again from the text of its question."""

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from scipy.stats import binom
from tiny_tokenizer import build_tokenizer, story_words

from aqnpipe.config.dataset import GeneratedDataset
from aqnpipe.data import generated
from aqnpipe.data.generated import OBJECTS, Difficulty, generate_problems, normalise_question, pool_of, take_problems
from aqnpipe.data.scoring import extract_answer, is_correct
from aqnpipe.errors import DataError

FIRST_QUESTION = (
    "Mia finds 10 eggs. Mia has 2 times as many eggs as Leo. Zoe has 4 times as many eggs as Leo. "
    "How many eggs does Zoe have now?"
)
FIRST_ANSWER = "10/2=5\n5*4=20\n#### 20"
STEP = re.compile(r"(\d+)([+\-*/])(\d+)=(\d+)")


def evaluate_steps(answer: str) -> list[tuple[int, int, int]]:
    """Check every worked line by integer arithmetic written out here; return left, right and result of each."""
    *lines, last = answer.split("\n")
    steps = []
    for line in lines:
        match = STEP.fullmatch(line)
        assert match, line
        left, right, result = int(match[1]), int(match[3]), int(match[4])
        if match[2] == "/":
            assert result * right == left
        else:
            assert result == {"+": left + right, "-": left - right, "*": left * right}[match[2]]
        steps.append((left, right, result))
    assert last == f"#### {steps[-1][2]}"
    return steps


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(sorted),
    max_number=st.integers(10, 200),
)
def test_worked_steps_are_right_chained_and_bounded(seed, steps, max_number):
    config = GeneratedDataset(
        seed=seed, num_train=15, num_test=15, min_steps=steps[0], max_steps=steps[1], max_number=max_number
    )
    for problem in generate_problems(config, "train") + generate_problems(config, "test"):
        worked = evaluate_steps(problem.answer)
        assert steps[0] <= len(worked) <= steps[1]
        assert len(worked) == problem.num_steps
        assert all(after[0] == before[2] for before, after in pairwise(worked))
        numbers = [int(number) for number in re.findall(r"\d+", problem.question + " " + problem.answer)]
        assert all(0 <= number <= max_number for number in numbers)
        assert is_correct(problem.answer, str(worked[-1][2]), "strict")


def test_every_operand_is_told_in_the_question():
    told_in_words = {"twice": 2, "half": 2, "third": 3}
    for problem in take_problems(3, "test", Difficulty(), 300):
        told = [int(number) for number in re.findall(r"\d+", problem.question)]
        told += [value for word, value in told_in_words.items() if word in problem.question]
        for step, (left, right, _) in enumerate(evaluate_steps(problem.answer)):
            assert right in told
            assert step > 0 or left in told


def test_splits_share_no_question_whatever_the_seeds():
    small = {"max_steps": 1, "max_number": 8, "distractor_probability": 0.0}
    train, test = set(), set()
    for seed in range(4):
        config = GeneratedDataset(seed=seed, num_train=400, num_test=300, **small)
        train |= {normalise_question(problem.question) for problem in generate_problems(config, "train")}
        test |= {normalise_question(problem.question) for problem in generate_problems(config, "test")}
    assert len(train) > 800  # the seeds gave different problems
    assert not train & test


def test_pools_depend_on_the_normalised_question_alone_and_have_their_shares():
    questions = [f"How many cards does Tom have after {i} days?" for i in range(16_000)]
    pools = [pool_of(question) for question in questions]
    assert pool_of("  how MANY cards does\nTom have after 0 days?") == pools[0]
    for pool, share in (("pretrain", 8 / 16), ("selection", 1 / 16), ("train", 4 / 16), ("test", 3 / 16)):
        low, high = binom.ppf([1e-6, 1 - 1e-6], len(questions), share)
        assert low <= pools.count(pool) <= high


def test_same_seed_gives_the_same_bytes_and_other_seeds_others():
    config = GeneratedDataset(seed=5, num_train=50, num_test=20)
    assert generate_problems(config, "train") == generate_problems(config, "train")
    longer = config.model_copy(update={"num_train": 80})
    assert generate_problems(longer, "train")[:50] == generate_problems(config, "train")
    other = config.model_copy(update={"seed": 6})
    assert generate_problems(other, "train") != generate_problems(config, "train")


def test_first_problem_of_the_default_data_set_stays_what_it_is():
    """The tiny models are measured on these streams; a changed generator has to change this test, knowingly."""
    first = generate_problems(GeneratedDataset(), "test")[0]
    assert (first.question, first.answer) == (FIRST_QUESTION, FIRST_ANSWER)


@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
def test_share_of_problems_with_a_distractor(probability):
    problems = take_problems(11, "train", Difficulty(min_steps=3, distractor_probability=probability), 1000)
    low, high = binom.ppf([1e-6, 1 - 1e-6], 1000, probability)
    assert low <= sum(problem.has_distractor for problem in problems) <= high
    for problem in problems:
        kinds = {name for name in OBJECTS if re.search(rf"\b{name}\b", problem.question)}
        assert problem.has_distractor == (len(kinds) == 2 or "years old" in problem.question)


def test_more_problems_than_exist_is_one_clear_error(monkeypatch):
    monkeypatch.setattr(generated, "NAMES", ("Tom", "Ann"))
    monkeypatch.setattr(generated, "OBJECTS", ("pens", "eggs"))
    config = GeneratedDataset(num_train=5_000, max_steps=1, max_number=4, distractor_probability=0.0)
    with pytest.raises(DataError, match=r"found only \d+ distinct train problems .* expected 5000") as caught:
        generate_problems(config, "train")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wrong", [{"min_steps": 3, "max_steps": 2}, {"max_number": 3}, {"num_train": 0}, {"sed": 1}])
def test_impossible_configurations_are_refused(wrong):
    with pytest.raises(ValidationError):
        GeneratedDataset(**wrong)


def test_strict_scorer_reads_the_generated_answers():
    assert extract_answer("5+3=8\n8*2=16\n#### 16", "strict") == "16"
    problem = take_problems(0, "train", Difficulty(), 1)[0]
    gold = extract_answer(problem.answer, "strict")
    assert gold is not None
    assert not is_correct(problem.answer, str(int(gold) + 1), "strict")


COMPARISON = re.compile(r"How many have (more|fewer) than (\d+) (\w+)\?$")
FIRST_COMPARISON = "Ben buys 14 cups. Nora finds 10 cups. How many have more than 17 cups?"
FIRST_COUNTS = "14 fewer 0\n10 fewer 0\n#### 0"


def answer_by_hand(question: str) -> str:
    """Read the story again: whoever is said to have, find or buy the objects requested is compared."""
    match = COMPARISON.search(question)
    assert match
    wanted, limit, objects = match[1], int(match[2]), match[3]
    numbers = [int(n) for n in re.findall(rf"\w+ (?:has|finds|buys) (\d+) {objects}\.", question)]
    tally, lines = 0, []
    for number in numbers:
        assert number != limit
        relation = "more" if number > limit else "fewer"
        tally += relation == wanted
        lines.append(f"{number} {relation} {tally}")
    return "\n".join([*lines, f"#### {tally}"])


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.tuples(st.integers(1, 3), st.integers(1, 3)).map(sorted),
    max_number=st.integers(4, 200),
)
def test_answers_follow_from_the_questions_alone(seed, steps, max_number):
    config = GeneratedDataset(
        task="comparison", seed=seed, num_train=15, num_test=15, min_steps=steps[0], max_steps=steps[1],
        max_number=max_number,
    )  # fmt: skip
    for problem in generate_problems(config, "train") + generate_problems(config, "test"):
        assert problem.answer == answer_by_hand(problem.question)
        assert steps[0] + 1 <= problem.answer.count("\n") <= steps[1] + 1
        assert all(2 <= int(number) <= max_number for number in re.findall(r"\d+", problem.question))


def test_distractors_are_about_other_things_and_change_no_answer():
    problems = take_problems(0, "train", Difficulty(distractor_probability=1.0), 200, "comparison")
    for problem in problems:
        assert problem.has_distractor
        assert problem.question.count(".") == problem.answer.count("\n") + 1
        assert problem.answer == answer_by_hand(problem.question)


def test_the_words_are_those_of_the_tiny_tokenizer():
    known, tokenizer = set(story_words()), build_tokenizer()
    for problem in take_problems(1, "test", Difficulty(), 200, "comparison"):
        words = re.findall(r"[A-Za-z]+", f"{problem.question} {problem.answer}")
        assert set(words) <= known
        tokens = tokenizer.tokenize(f"{problem.question}\n{problem.answer}")
        assert [token.strip("ĠĊ") for token in tokens if token.strip("ĠĊ").isalpha()] == words


def test_pools_are_by_question_and_streams_of_tasks_are_unlike():
    problems = take_problems(2, "test", Difficulty(), 100, "comparison")
    assert len({normalise_question(problem.question) for problem in problems}) == 100
    assert {pool_of(problem.question) for problem in problems} == {"test"}
    words = take_problems(2, "test", Difficulty(), 100)
    assert not {problem.question for problem in problems} & {problem.question for problem in words}


def test_half_ask_for_more_and_every_count_occurs():
    problems = take_problems(3, "train", Difficulty(max_steps=1), 1000, "comparison")
    requested = [COMPARISON.search(problem.question)[1] for problem in problems]
    # Four standard deviations of a fair coin thrown 1,000 times.
    assert abs(requested.count("more") - 500) < 4 * 250**0.5
    assert {problem.answer[-1] for problem in problems} == {"0", "1", "2"}


def test_first_problem_of_the_task_stays_what_it_is():
    """`tiny-comparison` is measured on these streams; a changed generator has to change this test, knowingly."""
    config = GeneratedDataset(task="comparison", max_steps=2, distractor_probability=0.0)
    first = generate_problems(config, "train")[0]
    assert (first.question, first.answer) == (FIRST_COMPARISON, FIRST_COUNTS)
