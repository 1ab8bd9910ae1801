"""Checks of a study of given checkpoints across its sections: what cannot be compared is refused before any job."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.config.analysis import PRETRAINED
from aqnpipe.config.arm import Arm
from aqnpipe.config.cross_references import (
    comparison_problems,
    context_problems,
    explore_problems,
    layer_problems,
    machine_problems,
    measured_evaluation_problems,
    noised_attention_problems,
    scorer_problems,
    size_problems,
    vllm_evaluation_problems,
)
from aqnpipe.config.dataset import LmEvalDataset, PromptFormat
from aqnpipe.config.machine_devices import machine_device_problems
from aqnpipe.config.model import source_kind

if TYPE_CHECKING:
    from aqnpipe.config.study import CheckpointStudyConfig


def checkpoint_problems(study: "CheckpointStudyConfig", arms: Mapping[str, Arm], source: str) -> Iterator[str]:
    """Yield the problems of `study`, read from `source`: one line each. `arms`: its checkpoints as arms."""
    if PRETRAINED in study.checkpoints:
        yield f"{source}: checkpoints.{PRETRAINED}: this name is reserved, expected another one"
    yield from size_problems(study, source)
    yield from scorer_problems(study, source)
    yield from context_problems(study, study.models, source)
    yield from _task_problems(study, source)
    yield from machine_problems(study, source)
    yield from machine_device_problems(study, source)
    yield from layer_problems(study, arms, source)
    yield from noised_attention_problems(study, source)
    yield from vllm_evaluation_problems(study, study.checkpoints, "checkpoints", source)
    yield from measured_evaluation_problems(study, source)
    yield from comparison_problems(study, study.arms, source)
    yield from explore_problems(study, arms, study.arms, source)
    yield from _incomparable(study, source)


def _task_problems(study: "CheckpointStudyConfig", source: str) -> Iterator[str]:
    """Yield settings that have no effect on a task of lm-evaluation-harness, or that it does not allow."""
    if not isinstance(study.dataset, LmEvalDataset):
        return
    if study.prompt != PromptFormat(style=study.prompt.style):
        yield (
            f"{source}: prompt: found layout, instruction or examples, expected style alone: the task makes its "
            "prompts (dataset.num_fewshot sets the examples)"
        )
    if study.evaluation.sampling is not None:
        yield f"{source}: evaluation.sampling: the task says how responses are drawn, remove sampling"
    if study.generation.backend == "vllm":
        yield f"{source}: generation.backend: found vllm, expected transformers or auto for dataset.source lm_eval"


def _incomparable(study: "CheckpointStudyConfig", source: str) -> Iterator[str]:
    """Yield pairs of checkpoints that are the same model, or that would compute differently."""
    names = list(study.checkpoints)
    for position, name in enumerate(names):
        for other in names[:position]:
            first, second = study.checkpoints[other], study.checkpoints[name]
            where = f"{source}: checkpoints.{name}"
            if _place(first.source) == _place(second.source) and first.revision == second.revision:
                yield f"{where}: found {second.source!r}, which is also checkpoint {other}, expected another model"
            for key in ("dtype", "attention"):
                ours, theirs = getattr(second, key), getattr(first, key)
                if ours != theirs:
                    yield (
                        f"{where}.{key}: found {ours}, checkpoint {other} has {theirs}: expected the same for all, "
                        "because a comparison would also be one of number formats or kernels"
                    )


def _place(source: str) -> str:
    """Return the folder of a local model as an absolute path without links; other sources as they are."""
    return str(Path(source).resolve()) if source_kind(source) == "folder" else source
