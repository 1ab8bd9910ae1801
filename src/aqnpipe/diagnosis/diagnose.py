"""Diagnosis of a model in memory: scans and exact probes with the machine's faults simulated, and their verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import polars as pl
import torch
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import Finding, LayerMetrics, Verdict
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import AnyFault, format_fault
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.capture import NonFiniteOutputError
from aqnpipe.diagnosis.checks import CHECKSUM_PROBES
from aqnpipe.diagnosis.exact_probes import ExactResult, run_exact
from aqnpipe.diagnosis.kernels import Kernels, kernel_faults, observe_kernels
from aqnpipe.diagnosis.scans import run_scans, with_roles
from aqnpipe.diagnosis.stored_weights import compare_with_file
from aqnpipe.diagnosis.verdict import judge, scanned_fault
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.models.layout import decoder_layers
from aqnpipe.noise.injection.faults import simulated_faults
from aqnpipe.noise.receipts.table import Row


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
