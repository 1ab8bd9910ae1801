"""Packs the graded answers of a study that added seeds into one small file, and judges its looks from that file again.

`pack RESULTS FOLDER` writes the answers (answers.parquet: run, question, noise, and right or wrong by each scorer), the
design and the looks of a study, and adds to answers that are there. `judge STUDY FOLDER` takes every look again from
the answers alone and prints each claim; it ends with exit code 1 where a number is not the recorded one. `look STUDY
FOLDER` takes the look that comes next, once the answers of all its runs are there: they may be made one by one, also on
several machines. `table STUDY FOLDER` prints every claim at its last look as a Markdown table, and `picture STUDY
FOLDER` draws every arm minus the reference arm from the same answers (robustness.png).
"""

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import ascii_lowercase

import altair as alt
import numpy as np
import polars as pl
import smallest
import vl_convert

from aqnpipe.artifacts.comparisons import ClaimAtLook, LookDesign, LookFile
from aqnpipe.artifacts.evaluations import evaluation_files
from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.comparison.contrasts import Checkpoint, Contrasts
from aqnpipe.comparison.descriptive import difference_rows
from aqnpipe.comparison.evaluations import PASS_KEYS, EvaluationInput, LevelScores, LoadedEvaluation
from aqnpipe.comparison.identity import comparison_ids
from aqnpipe.comparison.look_states import next_look, plan_after, planned_looks, seeds_after
from aqnpipe.comparison.looks import claims_at
from aqnpipe.config.study import Study, load_study_file
from aqnpipe.data.scoring import SCORERS
from aqnpipe.report import charts, numbers
from aqnpipe.report.markup import INK, MUTED, light_spec
from aqnpipe.report.words import load_words
from aqnpipe.statistics.clusters import Clusters

ANSWERS = "answers.parquet"
_IN_WORDS = {
    "E5_scale_1": "1 % noise (E5_scale_1)",
    "E5_scale_2": "2 % noise (E5_scale_2)",
    "E5": "5 % noise (E5)",
    "E5_scale_10": "10 % noise (E5_scale_10)",
    "E5a": "5 %, AQN with a global schedule (E5a)",
    "E5b": "5 %, epoch-aware AQN (E5b)",
    "guided_robust_first": "5 %, AQN by diagnosis (guided_robust_first)",
    "guided_shuffled_layers": "5 %, its sigmas shuffled (guided_shuffled_layers)",
}
"""Arms of the decide study by what they do, as the pictures name them."""
RUN = ["model", "arm", "seed", "step"]
_DIGITS = 10
"""Sums of the same answers in another order differ by rounding alone beyond these."""


def pack(results: Path, folder: Path) -> None:
    """Write the answers, the design and the looks of the study in `results` into `folder`."""
    tables = sorted((results / "eval").glob("*/*/seed*/step*.parquet"))
    if not tables:
        sys.exit(f"{results}/eval: no evaluation, expected the results of a finished study")
    folder.mkdir(parents=True, exist_ok=True)
    before = [pl.read_parquet(folder / ANSWERS)] if (folder / ANSWERS).exists() else []
    answers = pl.concat([*before, *(_answers(path) for path in tables)], how="diagonal").unique(maintain_order=True)
    others = answers.filter(pl.struct(*RUN, *PASS_KEYS, "sample").is_duplicated())
    if not others.is_empty():
        sys.exit(f"{folder / ANSWERS}: has other answers of {others['arm'][0]} seed {others['seed'][0]} than {results}")
    if answers["sample"].max():
        sys.exit(f"{results}: several samples per question, expected one: looks are judged from one answer each")
    answers.write_parquet(folder / ANSWERS, compression="zstd", compression_level=22, statistics=False)
    for path in sorted((results / "looks").glob("*.json")):
        shutil.copy(path, folder)


def _answers(path: Path) -> pl.DataFrame:
    model, arm, seed, step = (*path.parts[-4:-1], path.stem)
    table = pl.read_parquet(path)
    return table.sort("noise_level", "noise_seed", "question_id", "sample").select(
        pl.lit(model).alias("model"),
        pl.lit(arm).alias("arm"),
        pl.lit(int(seed.removeprefix("seed")), pl.Int32).alias("seed"),
        pl.lit(int(step.removeprefix("step")), pl.Int32).alias("step"),
        pl.col("question_id").cast(pl.Categorical),
        *([pl.col("cluster").cast(pl.Categorical)] if "cluster" in table.columns else []),
        "noise_level",
        pl.col("noise_seed").cast(pl.Int16),
        pl.col("sample").cast(pl.Int16),
        *(f"correct_{name}" for name in SCORERS),
    )


def evaluations_of(study: Study, answers: pl.DataFrame) -> dict[Checkpoint, LoadedEvaluation]:
    """Return the evaluations as the comparison reads them. Receipts and records were checked where the study ran."""
    scorer = study.config.evaluation.primary_scorer
    found: dict[Checkpoint, LoadedEvaluation] = {}
    for key, rows in answers.partition_by(RUN, as_dict=True, maintain_order=True).items():
        model, arm, seed, step = str(key[0]), str(key[1]), int(str(key[2])), int(str(key[3]))
        files = evaluation_files(Path(study.config.results_dir), model, arm, seed, step)
        found[model, arm, seed, step] = LoadedEvaluation(
            source=EvaluationInput(**vars(files)),
            levels=dict(_levels(rows, scorer)),
            problems=(),
            weights=files.name,
            setting={},
            accuracy=rows.group_by("noise_level").agg(
                pl.col(f"correct_{name}").mean().alias(f"accuracy_{name}") for name in SCORERS
            ),
        )
    return found


def _levels(rows: pl.DataFrame, scorer: str) -> Iterator[tuple[float, LevelScores]]:
    for (level,), part in rows.partition_by("noise_level", as_dict=True, maintain_order=True).items():
        seeds = part["noise_seed"].unique(maintain_order=True).to_list()
        first = part.filter(noise_seed=seeds[0])
        yield (
            float(str(level)),
            LevelScores(
                question_ids=tuple(first["question_id"].to_list()),
                noise_seeds=tuple(seeds),
                num_samples=1,
                correct=part[f"correct_{scorer}"].to_numpy().astype(np.float64).reshape(len(seeds), -1),
                same_responses_as=None,
                clusters=Clusters.of(first["cluster"].to_list()) if "cluster" in part.columns else None,
            ),
        )


def looks_of(folder: Path) -> list[LookFile]:
    """Return the recorded looks of a folder in their order."""
    paths = sorted(folder.glob("look*.json"), key=lambda path: int(path.stem.removeprefix("look")))
    return [read_json(path, LookFile) for path in paths]


def judged(study: Study, recorded: Sequence[LookFile], answers: pl.DataFrame) -> list[tuple[ClaimAtLook, ...]]:
    """Return the claims of every look, taken again from the answers that its runs had given."""
    evaluations = evaluations_of(study, answers)
    return [_claims(study, look.design, recorded[:number], evaluations) for number, look in enumerate(recorded)]


def _claims(
    study: Study, design: LookDesign, earlier: Sequence[LookFile], evaluations: Mapping[Checkpoint, LoadedEvaluation]
) -> tuple[ClaimAtLook, ...]:
    seeds = seeds_after(study, earlier)
    there = {key: one for key, one in evaluations.items() if key[2] < seeds.get(key[1], 1)}
    return claims_at(study, design, earlier, there)


def next_look_of(study: Study, folder: Path) -> LookFile:
    """Return the look that follows the recorded ones; SystemExit where answers are missing or no look follows."""
    earlier = looks_of(folder)
    number = next_look(study, earlier)
    if number is None:
        sys.exit(f"{folder}: all claims have ended, or every seed was used")
    design, seeds = read_json(folder / "design.json", LookDesign), seeds_after(study, earlier)
    evaluations = evaluations_of(study, pl.read_parquet(folder / ANSWERS))
    known = {(arm, seed) for _, arm, seed, _ in evaluations}
    missing = [f"{arm} seed {seed}" for arm, n in seeds.items() for seed in range(n) if (arm, seed) not in known]
    if missing:
        sys.exit(f"{folder / ANSWERS}: look {number} needs {len(missing)} more runs: {', '.join(missing)}")
    return LookFile(
        look=number,
        seeds=planned_looks(design).seeds_at(number),
        seeds_per_arm=seeds,
        design=design,
        previous_sha256=sha256_of_file(folder / f"look{number - 1}.json") if earlier else None,
        claims=_claims(study, design, earlier, evaluations),
    )


def differences(recorded: ClaimAtLook, found: ClaimAtLook) -> list[str]:
    """Return the fields in which a claim that was judged again differs from the record, beyond rounding."""
    ours, theirs = recorded.model_dump(), found.model_dump()
    return [f"{name}: {theirs[name]}, recorded {ours[name]}" for name in ours if not _is_same(ours[name], theirs[name])]


def _is_same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 10.0**-_DIGITS * max(1.0, abs(one))
    return one == other


def _shown(number: int, look: LookFile, claims: Sequence[ClaimAtLook]) -> Iterator[str]:
    yield f"\nlook {number}, seeds: {', '.join(f'{arm} {seeds}' for arm, seeds in look.seeds_per_arm.items())}\n"
    yield "| claim | difference | p | p of equivalence | state |\n|---|---|---|---|---|"
    for found in claims:
        numbers = (
            f"{value:{form}}" if value is not None else ""
            for value, form in ((found.difference, "+.4f"), (found.p_holm, ".4f"), (found.p_other_holm, ".4f"))
        )
        yield f"| {' | '.join((found.comparison_id, *numbers, found.state))} |"


def table(study: Study, looks: Sequence[LookFile]) -> list[str]:
    """Return every claim at the last look as the lines of a Markdown table; differences in points."""
    claims, words, rows = comparison_ids(study.comparisons()), load_words("en"), []
    undecided = "not shown" if next_look(study, looks) is None else "open"
    for found in looks[-1].claims:
        role = claims[found.comparison_id].role
        is_other = found.state == "equivalent" or found.p_holm is None
        p_value = numbers.p_value(found.p_other_holm if is_other else found.p_holm)
        rows.append(
            (
                f"{claims[found.comparison_id].claim}{'' if role == 'secondary' else f' ({role})'}",
                numbers.points(found.difference),
                words.span(found.ci_low, found.ci_high, numbers.points),
                f"{p_value} (equivalence)" if found.state == "equivalent" else p_value,
                undecided if found.state == "open" else words(f"looks.state.{found.state}"),
                str(found.seeds),
            )
        )
    header = ("claim", "difference, points", "repeated interval", "adjusted p", "state", "seeds per arm")
    return numbers.markdown_table(header, rows)


def picture(study: Study, looks: Sequence[LookFile], answers: pl.DataFrame) -> bytes:
    """Return the PNG of every arm minus the reference arm after the last look, a panel per noise level."""
    found = plan_after(study, looks[:-1]).study
    trained = {key: one for key, one in evaluations_of(study, answers).items() if key[1] in study.arms}
    evaluations = {key: one for key, one in trained.items() if key[2] in found.seeds_of(key[1])}
    rows = pl.DataFrame(difference_rows(found, Contrasts(found, evaluations)), infer_schema_length=None)
    words = load_words("en")
    arms = [_IN_WORDS.get(arm, arm) for arm in study.config.arms if arm in set(rows["arm"])]
    rows = charts.in_points(rows).with_columns(pl.col("arm").replace(_IN_WORDS))
    ends = [min(rows["ci_low"].min(), 0.0), max(rows["ci_high"].max(), 0.0)]  # type: ignore[call-overload,type-var]
    scale = alt.Scale(domain=ends, nice=True)
    panels = []
    for letter, level in zip(ascii_lowercase, sorted(rows["noise_level"].unique()), strict=False):
        axis = alt.Axis(labelLimit=0, ticks=False, domain=False, labels=not panels, labelFontSize=13, labelColor=INK)
        base = alt.Chart(rows.filter(noise_level=level), width=230, height=26 * len(arms))
        y = alt.Y("arm:N", sort=arms, title=None, axis=axis)
        title = "accuracy minus that without training noise (points)"
        layers = (
            alt.Chart(pl.DataFrame({"zero": [0.0]})).mark_rule(color=MUTED).encode(alt.X("zero:Q", scale=scale)),
            base.mark_rule(strokeWidth=2, color=INK).encode(
                alt.X("ci_low:Q", scale=scale, title=title), alt.X2("ci_high:Q"), y
            ),
            base.mark_point(filled=True, size=60, opacity=1, color=INK).encode(
                alt.X("difference:Q", scale=scale, title=title), y
            ),
        )
        heading = alt.Title(f"{letter}  {words.level(level)} noise at evaluation", anchor="start", fontSize=14)
        panels.append(alt.layer(*layers).properties(title=heading))
    return vl_convert.vegalite_to_png(light_spec(alt.hconcat(*panels, spacing=24), legend=False), scale=2)


def judge(path: Path, folder: Path) -> list[str]:
    """Print every look of `folder` as judged again; return the numbers that are not the recorded ones."""
    study, looks = load_study_file(path), looks_of(folder)
    judged_again = judged(study, looks, pl.read_parquet(folder / ANSWERS))
    lines, others = [], []
    for number, (look, claims) in enumerate(zip(looks, judged_again, strict=True), start=1):
        lines += _shown(number, look, claims)
        for recorded, found in zip(look.claims, claims, strict=True):
            others += [f"look {number}, {found.comparison_id}: {line}" for line in differences(recorded, found)]
    print("\n".join(lines), f"{len(looks)} looks, {len(others)} numbers are not as recorded", sep="\n\n")  # noqa: T201
    return others


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("pack", "judge", "look", "table", "picture"))
    parser.add_argument("source", type=Path, help="the results folder (pack) or the study file")
    parser.add_argument("folder", type=Path, help="the folder of the packed answers and looks")
    arguments = smallest.parse(parser)
    if arguments.action == "pack":
        pack(arguments.source, arguments.folder)
    elif arguments.action == "look":
        found = next_look_of(load_study_file(arguments.source), arguments.folder)
        write_json(arguments.folder / f"look{found.look}.json", found)
    elif arguments.action == "table":
        print("\n".join(table(load_study_file(arguments.source), looks_of(arguments.folder))))  # noqa: T201
    elif arguments.action == "picture":
        study, answers = load_study_file(arguments.source), pl.read_parquet(arguments.folder / ANSWERS)
        (arguments.folder / "robustness.png").write_bytes(picture(study, looks_of(arguments.folder), answers))
    elif others := judge(arguments.source, arguments.folder):
        sys.exit("\n".join(others))


if __name__ == "__main__":
    main()
