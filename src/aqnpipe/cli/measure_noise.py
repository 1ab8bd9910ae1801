"""`aqnpipe measure-noise`: measure the noise of an arm on a model: operators, share of the compute, and scale."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from aqnpipe.cli.options import TrustCode, check_writable, console_of, number_ranges, table_of
from aqnpipe.cli.study import refuse_unusable_errors
from aqnpipe.config.arm import Arm
from aqnpipe.config.base import describe_validation_error, replaced
from aqnpipe.config.custom_code import refuse_foreign_code
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import Attention, Dtype, ModelConfig
from aqnpipe.config.noise import CacheNoise, FakeQuantization, OperatorNoise
from aqnpipe.config.study import read_arms
from aqnpipe.config.validation_messages import one_of
from aqnpipe.errors import ConfigError, ReceiptError

if TYPE_CHECKING:
    from rich.table import Table

    from aqnpipe.noise.receipts.receipt import Receipt
    from aqnpipe.noise.receipts.table import Row


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
    console = console_of(stderr=False, width=120)
    for table in (_coverage(receipt), _operators(receipt)):
        console.print(table)
    for line in _notes(receipt, measured):
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


def _coverage(receipt: "Receipt") -> "Table":
    """Return a table with a row per phase: calls, share of operations with noise, requested and measured scale."""
    measures = ("requested", "measured", "values", "reference check")
    table = table_of("phases", ["phase"], ["forwards", "noised calls", "share of FLOPs", *measures])
    for record in receipt.phases:
        requested = receipt.requested_scale(record.phase)
        measured, elements = receipt.measured_scale(record.phase)
        share = record.noised_share
        table.add_row(
            record.phase,
            str(record.passes),
            f"{record.calls:,}",
            "-" if share is None else f"{share:.1%}",
            f"{requested:.4g}" if requested else "none",
            _with_error(measured, elements) if elements else "-",
            f"{elements:,}",
            "-" if record.phase == "backward" else f"{record.reference_scale:.4g}",
        )
    return table


def _operators(receipt: "Receipt") -> "Table":
    """Return a table with a row per phase and operator, summed over layers."""
    left, right = ["phase", "operator", "layers", "error"], ["calls", "elements", "requested", "measured"]
    table = table_of("operators", left, right)
    groups: dict[tuple[str, str, str, float], list[Row]] = {}
    for cell in receipt.cells:
        operator = f"{cell.operator} (lm_head)" if cell.layer is None and not cell.is_module else cell.operator
        groups.setdefault((cell.phase, operator, cell.kind, cell.requested), []).append(cell)
    for (phase, operator, error, requested), cells in groups.items():
        squares = sum((cell.measured or 0.0) ** 2 * cell.measured_elements for cell in cells)
        elements = sum(cell.measured_elements for cell in cells)
        table.add_row(
            phase,
            operator,
            number_ranges([cell.layer for cell in cells if cell.layer is not None]) or "-",
            error.replace("_", " "),
            f"{sum(cell.calls for cell in cells):,}",
            f"{sum(cell.elements for cell in cells):,}",
            f"{requested:.4g}",
            _with_error((squares / elements) ** 0.5, elements) if elements else "-",
        )
    if receipt.kv_cache is not None:
        _add_caches(table, receipt, receipt.kv_cache)
    return table


def _add_caches(table: "Table", receipt: "Receipt", noise: CacheNoise) -> None:
    from aqnpipe.noise.receipts.cache_checks import cache_error
    from aqnpipe.noise.receipts.table import CACHE

    for phase in noise.phases:
        cells = [cell for cell in receipt.cache_cells if cell.phase == phase]
        layers = number_ranges([cell.layer for cell in cells if cell.layer is not None]) or "-"
        calls, elements = (f"{sum(getattr(cell, name) for cell in cells):,}" for name in ("calls", "elements"))
        size = cache_error(cells)
        table.add_row(phase, CACHE, layers, noise.format, calls, elements, "-", "-" if size is None else f"{size:.4g}")


def _with_error(measured: float, elements: int) -> str:
    from aqnpipe.statistics.continuous import scale_standard_error  # imports SciPy, which is slow

    return f"{measured:.4g} ± {measured * scale_standard_error(elements):.2g}"


def _attention(noise: OperatorNoise) -> str:
    if isinstance(noise.error, FakeQuantization):
        return "its products have no weight and are exact; the operands of products with a weight are quantized"
    if noise.attention == "fused":
        return "one fused operator with noise on its output"
    return "decomposed, with noise on both products"


def _notes(receipt: "Receipt", arm: Arm) -> list[str]:
    lines = ["±: standard error, if the errors of the elements are independent and Gaussian"] if receipt.cells else []
    if arm.operator_noise is not None:
        lines.append(f"attention: {_attention(arm.operator_noise)}")
    for sync in receipt.weight_syncs:
        lines.append(
            f"AQN on {sync.targets} targets with the largest scheduled sigma {sync.sigma or 0.0:.4g}: measured "
            f"{sync.sigma_measured:.4g} over {sync.elements:,} elements; clean norm weights "
            + ("restored bit for bit" if sync.is_restored else "NOT restored")
        )
    for phase in dict.fromkeys(cell.phase for cell in receipt.weight_cells):
        cells = [cell for cell in receipt.weight_cells if cell.phase == phase]
        sigmas = [f"{'outside' if cell.layer is None else cell.layer}: {cell.sigma_measured:.2f}" for cell in cells]
        lines.append(f"AQN in {phase} by layer, measured, times the scheduled sigma: {', '.join(sigmas)}")
    if arm.aqn is not None and arm.aqn.layer_sigmas_from is not None:
        lines.append(
            "AQN: in a study the sigma of each layer comes from a diagnosis; here it was the same in every layer"
        )
    return lines
