"""Reads the figures of measured errors from the parity files that a job names, and refuses files of another model."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from aqnpipe.artifacts.files import read_json
from aqnpipe.artifacts.parities import OperatorParity, ParityFile
from aqnpipe.config.base import replaced
from aqnpipe.config.measured_noise import ErrorFigures, MeasuredError
from aqnpipe.config.model import Dtype
from aqnpipe.config.run import EvaluationSpec, TrainingSpec
from aqnpipe.errors import ConfigError

Spec = TypeVar("Spec", TrainingSpec, EvaluationSpec)

_SHAPE = (
    *("model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)
"""Keys of config.json that decide the operators of a model and their sizes."""


def with_figures(
    error: MeasuredError,
    *,
    dtype: Dtype | None = None,
    attention: str | None = None,
    config: Mapping[str, object] | None = None,
    weights_sha256: str | None = None,
) -> MeasuredError:
    """Return `error` with the figures in its file; unchanged if it has them already.

    dtype, attention (the kernel), config and weights_sha256 describe the model that gets the noise; None skips that
    comparison. Raises DataError for a file that is missing, damaged or not by aqnpipe; ConfigError for a parity of
    another model, dtype or attention kernel, without figures, or in which no operator has an error.
    """
    if error.figures is not None:
        return error
    path = Path(error.source)
    parity = read_json(path, ParityFile)
    _refuse_other_model(path, parity, dtype, attention, config or {}, weights_sha256)
    if parity.verdict == "stale weights":
        raise ConfigError(f"{path}: {parity.summary} Expected a parity of the same weights on both sides")
    norms = [operator for operator in parity.operators if operator.is_norm]
    # In files of older versions no norm has figures, or is a fault.
    has_norms = any(norm.figures is not None or norm.verdict == "fault" for norm in norms)
    products = [operator for operator in parity.operators if operator.is_product]
    judged = products + (norms if has_norms else [])
    figures = {operator.name: _figures_of(path, parity, operator) for operator in judged}
    if all(found.is_zero for found in figures.values()):
        raise ConfigError(
            f"{path}: linear modules, attention and norms give the same bits on both sides, so there is no noise"
        )
    layers = {operator.layer for operator in products if operator.layer is not None}
    num_layers = (config or {}).get("num_hidden_layers", len(layers))
    if layers != set(range(int(str(num_layers)))) or "lm_head" not in figures:
        raise ConfigError(
            f"{path}: figures of layers {sorted(layers)}, expected those of {num_layers} layers and lm_head"
        )
    return error.model_copy(update={"figures": figures})


def measured_layer_errors(path: Path, weights_sha256: str | None = None) -> dict[int, float]:
    """Return the relative error of every decoder layer in a parity file; see `ParityFile.layer_errors`.

    Raises DataError for a file that is missing, damaged or not by aqnpipe; ConfigError for one of other weights
    (`weights_sha256`; None: not compared), made without the same inputs, or with a fault.
    """
    parity = read_json(path, ParityFile)
    _refuse_other_model(path, parity, None, None, {}, weights_sha256)
    if parity.verdict in ("fault", "stale weights"):
        raise ConfigError(f"{path}: {parity.summary} Expected a parity of a machine that computes correctly")
    if not parity.same_inputs:
        raise ConfigError(
            f"{path}: its second capture was made without --replay, which alone measures each operator by itself"
        )
    return parity.layer_errors()


def spec_with_figures(
    spec: Spec, *, config: Mapping[str, object] | None = None, weights_sha256: str | None = None
) -> Spec:
    """Return the settings of a training or an evaluation with the figures of measured errors; see `with_figures`.

    In an evaluation weights are not compared: those of a trained checkpoint are not those of the parity.
    """

    def change(error: MeasuredError) -> MeasuredError:
        return with_figures(
            error, dtype=spec.dtype, attention=spec.attention, config=config, weights_sha256=weights_sha256
        )

    return replaced(spec, MeasuredError, change)


def _figures_of(path: Path, parity: ParityFile, operator: OperatorParity) -> ErrorFigures:
    if operator.figures is not None:
        return operator.figures
    if not parity.same_inputs:
        advice = "its second capture was made without --replay, which alone measures each operator by itself"
    elif operator.verdict == "fault":
        advice = f"{operator.name} is a fault: {operator.reason}"
    else:
        advice = "an older aqnpipe wrote it; compare the captures again"
    raise ConfigError(f"{path}: no figures of the error of {operator.name}: {advice}")


def _refuse_other_model(
    path: Path,
    parity: ParityFile,
    dtype: Dtype | None,
    attention: str | None,
    config: Mapping[str, object],
    weights_sha256: str | None,
) -> None:
    first = parity.first
    if weights_sha256 is not None and first.weights_sha256 != weights_sha256:
        raise ConfigError(
            f"{path}: a parity of other weights: found SHA-256 {first.weights_sha256[:12]} ({first.model}), expected "
            f"those of the model here, {weights_sha256[:12]}"
        )
    for key in _SHAPE:
        if key in config and key in first.config and config[key] != first.config[key]:
            raise ConfigError(
                f"{path}: a parity of another model ({first.model}): found {key} {first.config[key]}, the model that "
                f"gets the noise has {config[key]}"
            )
    # The attention kernels of vLLM have other names.
    kernel = attention if first.backend == "transformers" else None
    for how, found, expected in (("in", first.dtype, dtype), ("attention with", first.attention, kernel)):
        if expected not in (None, found):
            raise ConfigError(
                f"{path}: the first side computed {how} {found}, the model that gets the noise does "
                f"{how.rpartition(' ')[2]} {expected}; expected a parity whose first side is the machine that computes "
                "here"
            )
