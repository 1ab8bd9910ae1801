"""Consequences of the looks of a study that adds seeds: the next look, the seeds of every arm, and the end."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.artifacts.comparisons import LookDesign, LookFile
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.provenance import sha256_of_file, sha256_of_json
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.config.analysis import PRETRAINED, AdaptiveSeeds, Comparison
from aqnpipe.config.plan import StudyPlan
from aqnpipe.config.study import Study
from aqnpipe.errors import ConfigError, DataError

if TYPE_CHECKING:
    from aqnpipe.statistics.group_sequential import Looks

FOLDER = "looks"
DESIGN = "design.json"


def look_file(results: str, look: int) -> Path:
    """Return the path of the record of a look."""
    return Path(results, FOLDER, f"look{look}.json")


def read_looks(results: str, number: int | None = None) -> list[LookFile]:
    """Return the records of the first `number` looks, or of all that follow one another from the first.

    Without `number`, a record that does not follow from the one before ends the list: the workflow makes it again.
    Raises DataError if a file is damaged and, with `number`, if one is missing or does not follow.
    """
    found: list[LookFile] = []
    while len(found) != number and (number is not None or look_file(results, len(found) + 1).is_file()):
        path, before = look_file(results, len(found) + 1), look_file(results, len(found))
        record = read_json(path, LookFile)
        if found and (record.previous_sha256, record.design) != (sha256_of_file(before), found[-1].design):
            if number is None:
                break
            raise DataError(
                f"{path}: does not follow from {before} (another record or design); remove "
                f"{path} and the records of later interim analyses, which are made again"
            )
        found.append(record)
    return found


def planned_looks(design: LookDesign) -> "Looks":
    """Return the looks of a design."""
    # Imports SciPy, and every start of the workflow imports this module.
    from aqnpipe.statistics.group_sequential import Looks

    return Looks(start=design.start, step=design.step, planned=design.planned, reserve=design.reserve)


def seeds_after(study: Study, looks: Sequence[LookFile]) -> dict[str, int]:
    """Return the seeds of every arm after the given looks: arms of open claims have those of the next look.

    An A/A control has as many as the arm that it repeats. Arms without claims keep those of the first look.
    """
    rule = _rule(study)
    numbers = dict.fromkeys(study.arms, rule.start)
    states = {claim.comparison_id: claim for claim in looks[-1].claims} if looks else {}
    for name, comparison in comparison_ids(study.comparisons()).items():
        claim = states.get(name)
        if claim is None:
            continue
        wanted = min(claim.seeds + rule.step, rule.max) if claim.state == "open" else claim.seeds
        for arm in _arms_of(comparison):
            numbers[arm] = max(numbers[arm], wanted)
    for name, settings in study.arms.items():
        repeated = settings.aa_control_of
        if repeated in numbers:
            numbers[name] = numbers[repeated] = max(numbers[name], numbers[repeated])
    return numbers


def next_look(study: Study, looks: Sequence[LookFile]) -> int | None:
    """Return the number of the look that comes after the given ones; None if no claim is open or `max` is reached."""
    rule = study.adaptive_seeds
    if rule is None:
        return None
    is_open = not looks or any(claim.state == "open" for claim in looks[-1].claims)
    number = len(looks) + 1
    return number if is_open and rule.seeds_at(number) <= rule.max else None


def plan_after(study: Study, looks: Sequence[LookFile]) -> StudyPlan:
    """Return the jobs of a study with the seeds that its arms have after the given looks; of a fixed study, its own."""
    if study.adaptive_seeds is None:
        return StudyPlan(study)
    return StudyPlan(study.with_seeds_per_arm(seeds_after(study, looks)))


def design_of(study: Study, planned: int) -> LookDesign:
    """Return the design of a study whose first look was planned with the maximum `planned`."""
    rule = _rule(study)
    return LookDesign(
        start=rule.start,
        step=rule.step,
        planned=planned,
        futility=rule.futility,
        reserve=rule.reserve,
        alpha=study.config.statistics.alpha,
        scorer=study.config.evaluation.primary_scorer,
        claims={name: _as_tested(claim) for name, claim in comparison_ids(study.comparisons()).items()},
        settings=_settings(study),
    )


def registered_design(study: Study) -> LookDesign:
    """Return the design that was registered before the first look, or that of the study if there was no look.

    Raises ConfigError if the study was changed after that, so that the error rates of its looks would not hold.
    """
    rule, results = _rule(study), study.config.results_dir
    recorded = _recorded_design(results)
    if recorded is None:
        return design_of(study, rule.max)
    path, design, last_look = recorded
    for problem in _changes(design, design_of(study, design.planned)):
        raise ConfigError(
            f"{problem} was changed after the study began ({path}), so the error rates of its claims would no longer "
            f"hold; change it back, or set another results_dir for a new analysis"
        )
    used = rule.seeds_at(last_look) if last_look else rule.start
    if rule.max < used:
        raise ConfigError(
            f"seeds.max: found {rule.max}, interim analysis {last_look} used {used} seeds, expected at least {used}"
        )
    if rule.max > design.planned and not design.reserve:
        raise ConfigError(
            f"seeds.max: found {rule.max}, the study began with {design.planned} and seeds.reserve 0, so no error rate "
            "is left for more interim analyses"
        )
    return design


def register_design(results: str, design: LookDesign) -> None:
    """Write the design of a study, unless it is there."""
    path = Path(results, FOLDER, DESIGN)
    if not path.is_file():
        write_json(path, design)


def progress(study: Study) -> str:
    """Return in one line which look comes next and what it needs, or that there is none.

    Raises DataError if a record is damaged.
    """
    rule, results = _rule(study), study.config.results_dir
    looks = read_looks(results)
    number = next_look(study, looks)
    claims = looks[-1].claims if looks else ()
    num_open = sum(claim.state == "open" for claim in claims) if looks else len(study.comparisons())
    if number is None:
        at_end = f", {num_open} open at seeds.max {rule.max}" if num_open else ""
        return f"no further interim analysis: {len(claims) - num_open} of {len(claims)} claims have ended{at_end}"
    before = dict.fromkeys(study.arms, 0) if not looks else looks[-1].seeds_per_arm
    growing = [arm for arm, seeds in seeds_after(study, looks).items() if seeds > before.get(arm, 0)]
    return (
        f"interim analysis {number} of at most {rule.num_looks} is next, at {rule.seeds_at(number)} seeds of "
        f"{', '.join(growing) or 'no arm'}; {num_open} of {len(study.comparisons())} claims open"
    )


def _rule(study: Study) -> AdaptiveSeeds:
    if study.adaptive_seeds is None:
        raise ValueError("the seeds of the study are fixed")
    return study.adaptive_seeds


def _recorded_design(results: str) -> tuple[Path, LookDesign, int] | None:
    """Return the last recorded design with its file and the number of its look (0: before the first), if any."""
    stems = (path.stem.removeprefix("look") for path in Path(results, FOLDER).glob("look*.json"))
    if last := max((int(stem) for stem in stems if stem.isdigit()), default=0):
        return look_file(results, last), read_json(look_file(results, last), LookFile).design, last
    path = Path(results, FOLDER, DESIGN)
    return (path, read_json(path, LookDesign), 0) if path.is_file() else None


_KEYS = {
    **{name: f"seeds.{name}" for name in ("start", "step", "futility", "reserve")},
    "alpha": "statistics.alpha",
    "scorer": "evaluation.primary_scorer",
}
"""Keys of a study by the fields of its design."""


def _changes(registered: LookDesign, found: LookDesign) -> Iterator[str]:
    for name, key in _KEYS.items():
        if getattr(registered, name) != getattr(found, name):
            yield f"{key} ({getattr(registered, name)} to {getattr(found, name)})"
    for name in (*registered.claims, *found.claims):
        if registered.claims.get(name) != found.claims.get(name):
            change = "removed" if name not in found.claims else "added" if name not in registered.claims else "edited"
            yield f"comparisons: the claim {name} ({change})"
    for name in registered.settings:
        if registered.settings[name] != found.settings.get(name):
            of_arm = f"the training or evaluation of arm {name}"
            yield "the data set, prompt, evaluation or statistics.unit" if name == "data" else of_arm


def _as_tested(claim: Comparison) -> str:
    """Return what decides the verdict on a claim; its wording may be corrected at any time."""
    tested = claim.model_dump(mode="json", exclude={"claim", "claim_zh"})
    return json.dumps(tested, sort_keys=True)


def _arms_of(claim: Comparison) -> list[str]:
    arms = [claim.arm] if claim.kind == "levels" else [claim.treatment, claim.control]
    return [arm for arm in arms if arm != PRETRAINED]


def _settings(study: Study) -> dict[str, str]:
    """Return digests of what decides the outcomes of the claims."""
    plan, config = StudyPlan(study), study.config
    arms = dict.fromkeys(arm for claim in study.comparisons() for arm in _arms_of(claim))
    shared = (config.dataset, config.prompt, config.evaluation)
    # Only another unit than the usual one is part of it, so that designs of earlier versions stay valid.
    unit = [] if config.statistics.unit == "question" else [config.statistics.unit]
    found: dict[str, object] = {"data": [*(part.model_dump(mode="json") for part in shared), *unit]}
    for arm in arms:
        role = study.arms[arm].model
        evaluation = plan.evaluation_spec(model=role, arm=arm, seed="0", step=str(study.num_steps))
        model = config.models[role].model_dump(mode="json")
        found[arm] = [model, plan.training_spec(arm, 0), evaluation]
    return {name: sha256_of_json(content) for name, content in found.items()}
