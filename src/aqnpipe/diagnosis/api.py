"""`aqnpipe.diagnose`: diagnosis of a model in memory by scans and exact probes, its verdict, and the file of it."""

import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import get_args

import polars as pl
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import DiagnosisFile, Finding, LayerMetrics, Verdict
from aqnpipe.artifacts.hardware import Hardware, read_hardware
from aqnpipe.artifacts.provenance import versions
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import AnyFault, format_fault, parse_fault
from aqnpipe.config.model import Dtype
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.capture import NonFiniteOutputError
from aqnpipe.diagnosis.checks import CHECKSUM_PROBES
from aqnpipe.diagnosis.exact_probes import ExactResult, run_exact
from aqnpipe.diagnosis.kernels import Kernels, kernel_faults, observe_kernels, write_reproducer
from aqnpipe.diagnosis.scans import run_scans, with_roles
from aqnpipe.diagnosis.stored_weights import compare_with_file
from aqnpipe.diagnosis.verdict import judge, scanned_fault
from aqnpipe.errors import ConfigError, ModelError, ReceiptError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import weights_sha256
from aqnpipe.noise.injection.faults import simulated_faults
from aqnpipe.noise.receipts.table import Row
from aqnpipe.seeding import keyed_generator

RANDOM_PROMPT_TOKENS = 64


@dataclass(frozen=True)
class Diagnosed:
    """A verdict and its evidence. `table` is a LayerTable, None if the scans did not run.

    `unscanned` is the reason why scans that were asked for gave no table: a layer outputs NaN or infinity.
    """

    verdict: Verdict
    exact: ExactResult
    table: pl.DataFrame | None
    kernels: Kernels | None = None
    unscanned: NonFiniteOutputError | None = None


def diagnose_model(
    model: nn.Module,
    prompt_ids: Sequence[Tensor],
    config: DiagnosisConfig,
    *,
    faults: Sequence[Fault] = (),
    method: DiagnosisMethod = "all",
    show_progress: Callable[[str], None] = lambda line: None,
    weights: Path | None = None,
    names_kernels: bool = True,
) -> Diagnosed:
    """Diagnose `model` by `method`; the scans use the prompts [tokens]. Weights and mode are restored.

    `names_kernels`: where exact probes find a fault, operators are computed again to say which kernels err. With
    `weights`, the folder that the model was loaded from, exact probes compare every weight with its file.

    A layer with finite weights that outputs NaN or infinity is a fault, and no scan is reported. Raises ModelError if
    the layer or site of a fault does not exist or weights are not finite, ReceiptError if a simulated fault changed no
    value.
    """
    with simulated_faults(model, faults) as rows:
        # The scans run first, so that a cached threshold is taken from an ordinary forward and not from a probe.
        scans, unscanned = (
            (None, None) if method == "exact" else _scan(model, prompt_ids, config, weights, show_progress)
        )
        exact = run_exact(model, config, show_progress, weights)
        kernels = observe_kernels(model, prompt_ids[0]) if names_kernels and exact.faults and prompt_ids else None
    wrong = kernel_faults(kernels) if kernels else ()
    simulated = list(map(describe_fault, faults, rows))
    verdict = judge(exact, scans, config, simulated, wrong)
    if unscanned is not None:
        verdict = _verdict_without_scans(unscanned, verdict, model)
    table = None if scans is None else with_roles(scans[0], exact.faults)
    return Diagnosed(verdict, exact, table, kernels, unscanned)


def _scan(
    model: nn.Module,
    prompt_ids: Sequence[Tensor],
    config: DiagnosisConfig,
    weights: Path | None,
    show_progress: Callable[[str], None],
) -> tuple[tuple[pl.DataFrame, list[Finding], float] | None, NonFiniteOutputError | None]:
    """Return the result of the scans, or the reason why there is none."""
    show_progress(f"statistical scans: {len(prompt_ids)} prompts")
    try:
        return run_scans(model, prompt_ids, config), None
    except NonFiniteOutputError as error:
        before = model.get_input_embeddings()  # type: ignore[operator]
        own = (before if error.layer is None else decoder_layers(model)[error.layer]).parameters()
        is_broken = not all(bool(torch.isfinite(weight).all()) for weight in own)
        # Weights that became NaN in memory are a fault of the machine, which the comparison with their file names.
        if is_broken and not (weights and any(check.mismatch for check in compare_with_file(model, weights))):
            raise ModelError(f"{error}: its weights are not finite") from error
        return None, error


def describe_fault(fault: AnyFault, row: Row) -> dict[str, object]:
    """Return the simulated fault and the number of values it changed; ReceiptError if it changed none."""
    if not row.changed:
        raise ReceiptError(
            f"simulated fault {format_fault(fault)} changed none of {row.elements} values in {row.calls} calls, "
            "expected at least one: raise magnitude or sparsity"
        )
    return {
        **fault.model_dump(mode="json"),
        "faulty_channels": row.num_faulty_channels,
        "elements": row.elements,
        "affected_elements": row.changed,
    }


def layer_metrics(diagnosed: Diagnosed) -> tuple[LayerMetrics, ...]:
    """Return the metrics of every layer from the exact probes and the scans that ran."""
    rows = {row["layer"]: row for row in diagnosed.table.to_dicts()} if diagnosed.table is not None else {}
    return tuple(_metrics_of(layer, diagnosed, rows.get(layer)) for layer in range(diagnosed.verdict.num_layers))


def _metrics_of(layer: int, diagnosed: Diagnosed, scans: dict[str, float | str | None] | None) -> LayerMetrics:
    checks = [check for check in diagnosed.exact.checks if check.layer == layer]
    probed = [check for check in checks if check.probe not in CHECKSUM_PROBES]
    largest = max(check.deviation for check in checks)  # not finite if a value is NaN or infinite
    seen: dict[str, int] = {}
    for check in probed:
        if check.probe != "monomial":
            seen[check.site] = seen.get(check.site, 0) + check.elements_per_channel
    return LayerMetrics(
        layer=layer,
        sites_probed=len(seen),
        elements_probed=sum(check.elements_per_channel * check.num_channels for check in probed),
        elements_per_channel=min(seen.values()),
        faulty_sites=tuple(fault.site for fault in diagnosed.exact.faults if layer in (fault.layer, *fault.layers)),
        largest_deviation=largest if isfinite(largest) else None,
        scans=scans,
    )


def _verdict_without_scans(found: NonFiniteOutputError, exact: Verdict, model: nn.Module) -> Verdict:
    """Return the verdict on exact probes and on a layer that outputs NaN or infinity.

    Exact probes that find a fault decide, because they know its site. Otherwise the layer is faulty, except in float16,
    in which healthy layers of some models overflow: no verdict.
    """
    reason = f"{found}, so that there are no scans"
    if exact.verdict == "fault":
        return exact.model_copy(update={"reason": f"{exact.reason}; {reason}", "method": "all"})
    reason += f"; of the exact probes: {exact.reason}"
    if next(model.parameters()).dtype == torch.float16:
        overflow = f"{reason}; in float16 this may be the overflow of a healthy layer, bfloat16 or float32 shows which"
        return exact.model_copy(update={"verdict": "abstain", "reason": overflow, "method": "all"})
    site = "embedding" if found.layer is None else "layer"
    fault = scanned_fault(found.layer, site, "other", ("scan",), "outputs NaN or infinity for an ordinary text")
    decided = {"verdict": "fault", "reason": reason, "layer": found.layer, "type": fault.type, "site": fault.site}
    return exact.model_copy(update={**decided, "faults": (fault,), "method": "all"})


def diagnose(
    model: nn.Module,
    *,
    method: DiagnosisMethod = "all",
    prompt_ids: Sequence[Tensor] | None = None,
    faults: Sequence[Fault | str] = (),
    name: str | None = None,
    weights: Path | None = None,
    reproducer: Path | None = None,
    show_progress: Callable[[str], None] = lambda line: None,
    **options: object,
) -> DiagnosisFile:
    """Diagnose the machine that `model` is on.

    The weights of one layer at a time are replaced by known ones and then restored bit for bit, also after an error.
    The result shows `verdict` ("healthy", "fault" or "abstain"), `faults`, `untested`, `cost` and everything else that
    `aqnpipe diagnose --json` writes.

    - model: a causal language model of transformers.
    - method: exact probes, which decide, or also the published statistical scans.
    - prompt_ids: prompts [tokens] of the scans; by default random tokens.
    - faults: faults to simulate, as in `type=saturation,layer=3,magnitude=0.3`.
    - name: the name of the model in the result.
    - weights: the folder that the model was loaded from and has not changed since; its weights are compared with it.
    - reproducer: a folder; if a kernel errs, a short script that shows it without aqnpipe is written there.
    - show_progress: called with a line of text before each part of the work.
    - options: settings of the diagnosis by their names in a study (`seed`, `num_prompts`, ...).

    Raises ConfigError if an option or a fault is unknown, ModelError if the model is of another family, on several
    devices or quantized.
    """
    config = _config(method, options)
    simulated = tuple(parse_fault(fault) if isinstance(fault, str) else fault for fault in faults)
    _refuse(model)
    started, clock = datetime.now(UTC), time.monotonic()
    hardware = read_hardware(device_of(model))
    prompts = random_prompts(model, config) if prompt_ids is None else [ids.to(device_of(model)) for ids in prompt_ids]
    with _threads(config.threads if "threads" in options else None):
        diagnosed = diagnose_model(
            model, prompts, config, faults=simulated, method=method, show_progress=show_progress, weights=weights
        )
    if reproducer is not None and diagnosed.kernels is not None:
        kernels, device = diagnosed.verdict.kernels, str(device_of(model))
        write_reproducer(diagnosed.kernels, kernels, device, reproducer, simulated=bool(simulated))
    settings = getattr(model, "config", None)
    return DiagnosisFile.model_validate(
        {
            **diagnosed.verdict.model_dump(),
            "model": name or getattr(settings, "name_or_path", "") or type(model).__name__,
            "weights_sha256": None if weights is None else weights_sha256(weights),
            "device": device_label(device_of(model), hardware),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "attention": str(getattr(settings, "_attn_implementation", None) or "unknown"),
            "seed": config.seed,
            "time": started,
            "host": socket.gethostname(),
            "hardware": hardware,
            "versions": versions(),
            "seconds": round(time.monotonic() - clock, 2),
            "layers": [layer.model_dump() for layer in layer_metrics(diagnosed)],
        }
    )


def random_prompts(model: nn.Module, config: DiagnosisConfig, num_tokens: int = RANDOM_PROMPT_TOKENS) -> list[Tensor]:
    """Return `num_prompts` prompts [tokens] of random tokens on the device of `model`."""
    vocabulary = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    shape = (config.num_prompts, num_tokens)
    ids = torch.randint(0, vocabulary, shape, generator=keyed_generator("cpu", config.seed, "diagnosis.prompts"))
    return list(ids.to(device_of(model)))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the weights of `model`."""
    return next(model.parameters()).device


def device_label(device: torch.device, hardware: Hardware) -> str:
    """Return text for a device: the name of a GPU or NPU, or `cpu` and its instruction set."""
    return hardware.name if device.type != "cpu" else f"{device} ({platform.processor() or platform.machine()})"


def _refuse(model: nn.Module) -> None:
    """Raise ModelError unless `model` is of a known family, on one device, in a number format that can be probed."""
    decoder_layers(model)
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1 or devices == ["meta"]:
        raise ModelError(
            f"{type(model).__name__}: its weights are on {', '.join(devices)}, expected all of them on one device"
        )
    dtype = str(next(decoder_layers(model).parameters()).dtype).removeprefix("torch.")
    if dtype not in get_args(Dtype):
        raise ModelError(f"{type(model).__name__}: its layers are {dtype}, expected {', '.join(get_args(Dtype))}")


def _config(method: str, options: dict[str, object]) -> DiagnosisConfig:
    if method not in get_args(DiagnosisMethod):
        raise ConfigError(f"diagnose: method is {method!r}, expected {', '.join(get_args(DiagnosisMethod))}")
    try:
        return DiagnosisConfig.model_validate(options)
    except ValidationError as error:
        raise ConfigError(f"diagnose: {describe_validation_error(error)}") from error


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Compute with `number` CPU threads in the body; with those of the process if it is None."""
    before = torch.get_num_threads()
    try:
        if number is not None:
            torch.set_num_threads(number)
        yield
    finally:
        torch.set_num_threads(before)
