"""Diagnosis of a model in memory: scans and exact probes with the machine's faults simulated, and their verdict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl
from torch import Tensor, nn

from aqnpipe.artifacts.diagnoses import LayerMetrics, Verdict
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.fault_spec import format_fault
from aqnpipe.config.noise import Fault
from aqnpipe.diagnosis.exact import ExactResult, run_exact
from aqnpipe.diagnosis.scans import run_scans
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.errors import ReceiptError
from aqnpipe.noise.injection.faults import FaultRecord, simulated_faults


@dataclass(frozen=True)
class Diagnosed:
    """A verdict and its evidence. `table` is a LayerTable, None if the scans did not run."""

    verdict: Verdict
    exact: ExactResult | None
    table: pl.DataFrame | None


def diagnose_model(
    model: nn.Module,
    prompt_ids: Sequence[Tensor],
    config: DiagnosisConfig,
    *,
    faults: Sequence[Fault] = (),
    method: DiagnosisMethod = "all",
    show_progress: Callable[[str], None] = lambda line: None,
) -> Diagnosed:
    """Diagnose `model` by `method`; the scans use the prompts [tokens]. Weights and mode are restored.

    Raises ModelError if the layer or site of a fault does not exist or a scan finds NaN, ReceiptError if a simulated
    fault changed no value.
    """
    with simulated_faults(model, faults) as records:
        if method != "exact":
            show_progress(f"statistical scans: {len(prompt_ids)} prompts")
        # The scans run first, so that a cached threshold is taken from an ordinary forward and not from a probe.
        scans = None if method == "exact" else run_scans(model, prompt_ids, config)
        exact = None if method == "statistical" else run_exact(model, config, show_progress)
    verdict = judge(exact, scans, config, [describe_fault(record) for record in records])
    return Diagnosed(verdict, exact, scans[0] if scans else None)


def describe_fault(record: FaultRecord) -> dict[str, object]:
    """Return the simulated fault and the number of values it changed; ReceiptError if it changed none."""
    fault = record.fault
    if not record.affected_elements:
        raise ReceiptError(
            f"simulated fault {format_fault(fault)} changed none of {record.elements} values in {record.calls} calls, "
            "expected at least one: raise magnitude or sparsity"
        )
    return {
        **fault.model_dump(mode="json"),
        "faulty_channels": record.num_faulty_channels,
        "elements": record.elements,
        "affected_elements": record.affected_elements,
    }


def layer_metrics(diagnosed: Diagnosed) -> tuple[LayerMetrics, ...]:
    """Return the metrics of every layer from the exact probes and the scans that ran."""
    rows = {row["layer"]: row for row in diagnosed.table.to_dicts()} if diagnosed.table is not None else {}
    return tuple(_metrics_of(layer, diagnosed, rows.get(layer)) for layer in range(diagnosed.verdict.num_layers))


def _metrics_of(layer: int, diagnosed: Diagnosed, scans: dict[str, float | str | None] | None) -> LayerMetrics:
    if diagnosed.exact is None:
        return LayerMetrics(layer=layer, scans=scans)
    checks = [check for check in diagnosed.exact.checks if check.layer == layer]
    seen: dict[str, int] = {}
    for check in checks:
        if check.probe != "monomial":
            seen[check.site] = seen.get(check.site, 0) + check.elements_per_channel
    return LayerMetrics(
        layer=layer,
        sites_probed=len(seen),
        elements_probed=sum(check.elements_per_channel * check.num_channels for check in checks),
        elements_per_channel=min(seen.values()),
        faulty_sites=tuple(fault.site for fault in diagnosed.exact.faults if fault.layer == layer),
        # A spike may be infinite in a narrow dtype, which JSON cannot represent.
        largest_deviation=min(max(check.deviation for check in checks), 1e300),
        scans=scans,
    )
