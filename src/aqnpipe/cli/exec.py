"""`aqnpipe exec`: any PyTorch program on a noisy machine, unchanged."""

import os
import signal
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError

from aqnpipe.cli.options import refuse_level
from aqnpipe.config.base import describe_validation_error, key_values
from aqnpipe.config.custom_code import CustomError, located
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.yaml_file import typed_scalars
from aqnpipe.errors import ConfigError, ReceiptError
from aqnpipe.noise.autoload import VARIABLE

if TYPE_CHECKING:
    from aqnpipe.config.noise import Fault
    from aqnpipe.noise.program import ProgramMachine
    from aqnpipe.noise.receipts.table import Row
    from aqnpipe.proof.receipt import MachineReceipt

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def execute(
    command: Annotated[list[str], typer.Argument(help="the program and its arguments, behind `--`")],
    noise: Annotated[float | None, typer.Option(help="relative Gaussian noise of this scale, such as 0.05")] = None,
    error: Annotated[
        str | None,
        typer.Option(
            help="another error in place of --noise: kind=mantissa_truncation,mantissa_bits=7, or "
            "kind=measured,from=parity.json (with --no-backward)"
        ),
    ] = None,
    fault: Annotated[
        list[str] | None, typer.Option(help="a hardware fault: type=dead_zone,layer=3,magnitude=0.1,site=mlp_output")
    ] = None,
    operators: Annotated[str, typer.Option(help="matmul, or all: softmax, activations and norms too")] = "matmul",
    seed: Annotated[int, typer.Option(help="seed of the noise")] = 0,
    backward: Annotated[bool, typer.Option(help="put errors on gradients too")] = True,
    only: Annotated[
        list[str] | None, typer.Option(help="layers by path, such as `*.layers.3`, or operators, such as `bmm`")
    ] = None,
    receipts: Annotated[Path | None, typer.Option(help="folder for the receipts of all processes")] = None,
) -> None:
    """Run a program on a noisy or faulty machine: every matrix product has the error, in all processes it starts.

    The program needs no change: torch loads the machine by itself, with this package in the program's environment.
    Compiled code would bypass the replaced kernels, so Dynamo is switched off. The last line says what was measured.
    Exit code: that of the program; 2 if it is 0 and products had no error or nothing was proven. Options behind the
    first word of the program are the program's.
    """
    if os.environ.get(VARIABLE):
        raise ConfigError(f"{VARIABLE} is in the environment: this is a noisy machine already, expected one `exec`")
    from aqnpipe.noise.program import ProgramMachine, read_receipts

    if os.environ.get(_AUTOLOAD, "1") == "0":
        raise ConfigError(f"{_AUTOLOAD} is 0 in the environment, expected it unset: torch loads the machine by it")
    with TemporaryDirectory(prefix="aqnpipe-receipts-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary) if receipts is None else _receipt_folder(receipts)
        of_errors = {"--only": bool(only), "--operators": operators != "matmul", "--no-backward": not backward}
        for option in (option for option, is_given in of_errors.items() if is_given):
            if noise is None and error is None:
                raise ConfigError(f"{option} is of errors, expected --noise or --error beside it")
        content = {
            "error": _error(noise, error, has_faults=bool(fault)),
            "seed": seed,
            "backward": backward,
            "operators": operators,
            "only": only or [],
            "faults": [typed_scalars(key_values("--fault", each)) for each in fault or []],
            "receipts": folder,
        }
        try:
            machine = _planned(ProgramMachine.model_validate(content))
        except ValidationError as problem:
            raise ConfigError(describe_validation_error(problem)) from problem
        environment = os.environ | {VARIABLE: machine.model_dump_json(), "TORCHDYNAMO_DISABLE": "1"}
        try:
            code = _run(command, environment)
            receipt, faults, num_processes, num_behind = read_receipts(folder, machine)
            had_receipts = any(folder.glob("*.json"))
        except OSError as problem:
            raise ConfigError(f"{command[0]}: {problem.strerror}") from problem
    if not had_receipts and code:
        raise typer.Exit(code)
    if not had_receipts:
        raise ReceiptError(
            f"{command[0]}: no process of the program wrote a receipt; expected a program that imports torch, with "
            "aqnpipe in its environment, and computes"
        )
    said = [] if machine.error is None else [_products(receipt)]
    said += [
        f"{_described(fault)} changed {row.changed:,} of {row.elements:,} values in {row.calls:,} "
        f"call{'s' * (row.calls != 1)}"
        for fault, row in zip(machine.faults, faults, strict=True)
    ]
    without = ", ".join(f"{number:,} {what}" for what, number in sorted(receipt.without_error().items()))
    typer.echo(
        f"aqnpipe: {'; '.join(said)} in {num_processes} process{'es' * (num_processes != 1)}"
        + (f"; without {without}" if without else "")
        + (f"; not counted: the last products of killed processes ({num_behind})" if num_behind else "")
        + ("" if receipts is None else f"; receipts in {receipts}"),
        err=True,
    )
    if code:
        # What is missing is missing because the program failed.
        if contradictions := receipt.contradictions():
            typer.echo(f"ERROR: {ReceiptError('; '.join(contradictions))}", err=True)
        raise typer.Exit(code)
    # Without a backward pass errors of its gradients cannot be missing.
    problems = receipt.problems() if receipt.backward_passes or not backward else receipt.forward_problems()
    if only and not receipt.noised:
        problems = [f"--only: {' '.join(only)} selects nothing that the program computed", *problems]
    problems = [*problems, *filter(None, map(_fault_problem, machine.faults, faults))]
    if problems:
        raise ReceiptError("; ".join(problems))


def _receipt_folder(folder: Path) -> Path:
    """Return the absolute path of the folder for receipts, which is made; ConfigError if it has some already."""
    folder = folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise ConfigError(f"--receipts: {folder} cannot be made: {problem.strerror}") from problem
    if any(folder.glob("*.json")):
        raise ConfigError(f"--receipts: {folder} has receipts of an earlier run, expected an empty folder")
    return folder


def _run(command: list[str], environment: dict[str, str]) -> int:
    """Return the exit code of a program, 128 and its number for a signal; a request to end is passed on to it."""
    with subprocess.Popen(command, env=environment) as program:  # noqa: S603
        before = signal.signal(signal.SIGTERM, lambda number, _: program.send_signal(number))
        try:
            code = program.wait()
        except BaseException:
            program.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
    return code if code >= 0 else 128 - code


def _products(receipt: "MachineReceipt") -> str:
    scale = receipt.measured_scale
    measured = "" if scale is None else f", measured scale {scale:.4f}"
    return (
        f"{receipt.noised:,} of {receipt.products:,} products had {receipt.requested.in_words}{measured} from "
        f"{receipt.recomputed_numbers:,} recomputed values"
    )


def _described(fault: "Fault") -> str:
    return f"{fault.type} in layer {fault.layer} ({fault.site})"


def _fault_problem(fault: "Fault", row: "Row") -> str | None:
    if not row.calls:
        expected = f"a program that calls a decoder with a layer {fault.layer}"
    elif not row.changed:
        expected = "a larger magnitude"
    elif row.calls < row.passes:
        return f"{_described(fault)} was in {row.calls:,} of {row.passes:,} calls of its layer"
    else:
        return None
    return f"{_described(fault)} changed none of {row.elements:,} values, expected {expected}"


def _error(noise: float | None, error: str | None, *, has_faults: bool) -> dict[str, Any] | None:
    if noise is not None and error is not None:
        raise ConfigError(f"found --noise {noise} and --error {error}, expected one of the two")
    if noise is not None:
        refuse_level("--noise", noise)
        return {"kind": "relative_gaussian", "scale": noise}
    if error is None and not has_faults:
        raise ConfigError("found no --noise, no --error and no --fault, expected one of them")
    settings: dict[str, Any] | None = None if error is None else typed_scalars(key_values("--error", error))
    return settings


def _planned(machine: "ProgramMachine") -> "ProgramMachine":
    """Return a machine with the digest of a user's own error, or with the file of a measured one by its whole path.

    Raises ConfigError if the function is not usable, or the file no parity of a machine with errors.
    """
    error = machine.error
    if isinstance(error, MeasuredError):
        from aqnpipe.artifacts.measured_errors import with_figures

        if machine.backward or machine.operators != "matmul":
            raise ConfigError(
                "--error kind=measured: a measured error is of matmul operators in forward passes, expected "
                "--no-backward and no --operators"
            )
        if error.machine is not None:
            raise ConfigError(
                f"--error kind=measured: from is {error.source!r}, expected a file of `aqnpipe parity --json`"
            )
        found = error.measured_in(str(Path(error.source).absolute()))
        with_figures(found)
        return machine.model_copy(update={"error": found})
    if not isinstance(error, CustomError):
        return machine
    from aqnpipe.noise.kernels.custom import refuse_unusable

    own = error.model_copy(update={"function": located(error.function, Path.cwd())}).planned()
    refuse_unusable(own)
    return machine.model_copy(update={"error": own})
