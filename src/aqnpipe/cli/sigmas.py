"""`aqnpipe sigmas`: derive layer sigmas from a stored diagnosis, without a study."""

from pathlib import Path
from typing import Annotated

import typer
import yaml
from pydantic import ValidationError

from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.diagnosis import NEEDS_PARITY, SigmaRule, SigmaStrategy
from aqnpipe.errors import ConfigError, DataError


def sigmas(
    diagnosis: Annotated[Path, typer.Argument(help="file written by `aqnpipe diagnose --json`")],
    strategy: Annotated[
        SigmaStrategy, typer.Option(help="strategy that derives sigmas from the diagnosis")
    ] = "published",
    sensitivity: Annotated[
        Path | None,
        typer.Option(help="file written by `aqnpipe sensitivity --json`, for strategies that need the sensitivity"),
    ] = None,
    parity: Annotated[
        Path | None,
        typer.Option(help="file written by `aqnpipe parity --json`, for strategies that need the measured error"),
    ] = None,
    base_sigma: Annotated[float, typer.Option(help="sigma of a layer to which no rule applies")] = 0.05,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="write to this file instead of standard output")
    ] = None,
) -> None:
    """Derive one AQN sigma per layer, with reasons, from a diagnosis; print it as YAML."""
    import polars as pl

    from aqnpipe.artifacts.diagnoses import SENSITIVITY_SCALE, DiagnosisFile, SensitivityFile, Verdict
    from aqnpipe.artifacts.files import read_json, write_yaml
    from aqnpipe.artifacts.measured_errors import measured_layer_errors
    from aqnpipe.diagnosis.sigmas import layer_sigmas

    if parity is not None and strategy != NEEDS_PARITY:
        raise ConfigError(
            f"--parity: found beside --strategy {strategy}, which does not use it; expected --strategy {NEEDS_PARITY}"
        )
    file = read_json(diagnosis, DiagnosisFile)
    rows = [layer.scans for layer in file.layers if layer.scans is not None]
    if len(rows) < len(file.layers) or not rows:
        raise DataError(f"{diagnosis}: no scan metrics found, expected a diagnosis with --method all or statistical")
    try:
        rule = SigmaRule(base_sigma=base_sigma)
    except ValidationError as error:
        raise ConfigError(f"--base-sigma: {describe_validation_error(error)}") from error
    table = pl.DataFrame(rows)
    if sensitivity is not None:
        measured = read_json(sensitivity, SensitivityFile)
        # An estimate grows with the square of the noise; strategies take that of the usual scale.
        factor = (SENSITIVITY_SCALE / measured.scale) ** 2
        estimates = [part.estimate * factor for part in measured.layers if part.layer is not None]
        if len(estimates) != table.height:
            raise DataError(f"{sensitivity}: found {len(estimates)} layers, expected {table.height} as in {diagnosis}")
        table = table.with_columns(pl.Series("sensitivity", estimates))
    verdict = Verdict.model_validate(file.model_dump(include=set(Verdict.model_fields)))
    if parity is not None and file.weights_sha256 is None:
        raise DataError(
            f"{diagnosis}: no weights_sha256, so its model cannot be compared with that of {parity}; expected a "
            "diagnosis of a model in files, by this version of `aqnpipe diagnose`"
        )
    errors = None if parity is None else measured_layer_errors(parity, file.weights_sha256)
    known: dict[str, int | float | str] = {"model": file.model, "device": file.device}
    result = layer_sigmas(table, verdict, rule, strategy, errors=errors, metadata=known)
    if output is None:
        typer.echo(yaml.safe_dump(result.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)
    else:
        write_yaml(output, result)
