"""`aqnpipe measure-noise`: measure the noise of an arm on a model: operators, share of the compute, and scale."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from aqnpipe.cli.options import TrustCode, as_printed, check_writable, console_of
from aqnpipe.cli.study import refuse_unusable_errors
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import describe_validation_error, replaced
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import Attention, Dtype, ModelConfig
from aqnpipe.config.noise import FakeQuantization, OperatorNoise
from aqnpipe.config.study import read_arms
from aqnpipe.config.validation_messages import one_of
from aqnpipe.errors import ConfigError, ReceiptError

if TYPE_CHECKING:
    from aqnpipe.noise.receipts.receipt import Receipt


def measure_noise(
    model: Annotated[str, typer.Argument(help="model: a folder, a hub id, or `tiny`")],
    arm: Annotated[str, typer.Option(help="id of an arm in the arms file")] = "E5",
    arms: Annotated[Path, typer.Option(help="arms file")] = Path("config/arms.yaml"),
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    trust_code: TrustCode = False,
    json: Annotated[Path | None, typer.Option(help="write the whole receipt to this file")] = None,
) -> None:
    """Apply the noise of an arm to a model for one training step and show the measurements.

    Exit code 2 if requested noise is missing, or noise was measured that was not requested.
    """
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.artifacts.measured_errors import with_figures
    from aqnpipe.models.loading import load_model, source_folder
    from aqnpipe.noise.measure_arm import measure_arm
    from aqnpipe.report.receipts import operator_table, phase_table, sync_text
    from aqnpipe.report.words import load_words

    known = read_arms(arms)
    if expected := one_of(arm, sorted(known)):
        raise ConfigError(f"--arm: found {arm!r}, expected {expected}, which {arms} defines")
    requested = _without_machine(arm, known[arm])
    if not trust_code:
        refuse_foreign_code(requested, [arms])
    refuse_unusable_errors(f"{arms}: arms.{arm}", requested)
    check_writable("--json", json)
    try:
        settings = ModelConfig(source=model)
    except ValidationError as error:
        raise ConfigError(describe_validation_error(error).removeprefix("source: ")) from error
    loaded = load_model(source_folder(settings), dtype=dtype, attention=attention)
    config = loaded.config.to_dict()

    def figures_of(error: MeasuredError) -> MeasuredError:
        return with_figures(error, dtype=dtype, attention=attention, config=config)

    measured = replaced(requested, MeasuredError, figures_of).on_attention(attention).planned()
    receipt = measure_arm(loaded, measured)
    if json is not None:
        write_json(json, receipt)
    words, console = load_words("en"), console_of(stderr=False, width=160)
    for table in (phase_table(receipt, words), operator_table(receipt, words)):
        console.print(as_printed(table))
    for line in (sync_text(receipt, words), *_notes(receipt, measured)):
        console.print(line)
    problems = receipt.problems()
    if problems:
        raise ReceiptError(f"arm {arm} on {model}: " + "; ".join(problems))
    console.print(f"arm {arm} on {model}: every phase has what was requested.")


def _without_machine(name: str, arm: Arm) -> Arm:
    """Return an arm whose noise is known here; ConfigError for the noise of a machine that a study measures."""
    error = arm.operator_noise.error if arm.operator_noise else None
    if isinstance(error, MeasuredError) and error.machine is not None:
        raise ConfigError(
            f"--arm: {name} has the noise of machine {error.machine}, which the jobs of a study measure; expected an "
            "arm with `from:` a file of `aqnpipe parity --json`, or with another error"
        )
    return arm


def _attention(noise: OperatorNoise) -> str:
    if isinstance(noise.error, FakeQuantization):
        return "its products have no weight and are exact; the operands of products with a weight are quantized"
    if noise.attention == "fused":
        return "one fused operator with noise on its output"
    return "decomposed, with noise on both products"


def _notes(receipt: "Receipt", arm: Arm) -> list[str]:
    lines = []
    if arm.operator_noise is not None:
        lines.append(f"attention: {_attention(arm.operator_noise)}")
    for phase in dict.fromkeys(cell.phase for cell in receipt.weight_cells):
        cells = [cell for cell in receipt.weight_cells if cell.phase == phase]
        sigmas = [f"{'outside' if cell.layer is None else cell.layer}: {cell.sigma_measured:.2f}" for cell in cells]
        lines.append(f"AQN in {phase} by layer, measured, times the scheduled sigma: {', '.join(sigmas)}")
    if arm.aqn is not None and arm.aqn.layer_sigmas_from is not None:
        lines.append(
            "AQN: in a study the sigma of each layer comes from a diagnosis; here it was the same in every layer"
        )
    return lines
