"""One diagnosis of a model in memory: scans and exact probes under the machine's faults, and the verdict on both."""

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
    """A verdict and what it rests on; `table` is a LayerTable, None where the scans did not run."""

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
    say: Callable[[str], None] = lambda line: None,
) -> Diagnosed:
    """Diagnose `model` by `method`; prompts [tokens] are for the scans. Weights and mode come back as they were.

    Raises ModelError if a fault's place does not exist or a scan meets NaN, ReceiptError if a simulated fault changed
    nothing at all.
    """
    with simulated_faults(model, faults) as records:
        if method != "exact":
            say(f"statistical scans: {len(prompt_ids)} prompts")
        # The scans come first: a cached threshold then is one of ordinary use, not of a probe.
        scans = None if method == "exact" else run_scans(model, prompt_ids, config)
        exact = None if method == "statistical" else run_exact(model, config, say)
    verdict = judge(exact, scans, config, [describe_fault(record) for record in records])
    return Diagnosed(verdict, exact, scans[0] if scans else None)


def describe_fault(record: FaultRecord) -> dict[str, object]:
    """Return the simulated fault with its measured reach; ReceiptError if it changed nothing."""
    fault = record.fault
    if not record.affected_elements:
        raise ReceiptError(
            f"simulated fault {format_fault(fault)} changed none of {record.elements} values in {record.calls} calls, "
            "expected some: raise magnitude or sparsity"
        )
    return {
        **fault.model_dump(mode="json"),
        "faulty_channels": record.num_faulty_channels,
        "elements": record.elements,
        "affected_elements": record.affected_elements,
    }


def layer_metrics(diagnosed: Diagnosed) -> tuple[LayerMetrics, ...]:
    """Return the metrics of every layer, by exact probes and by scans, as far as they ran."""
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
        # a spike may be infinite in a narrow dtype, which JSON cannot hold
        largest_deviation=min(max(check.deviation for check in checks), 1e300),
        scans=scans,
    )
