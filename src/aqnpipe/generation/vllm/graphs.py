"""vLLM's CUDA graphs: in passes without noise, decode steps are replayed and not computed by Python.

A graph repeats kernels that were recorded when the engine started, before there was any noise or fault, so a replay has
none. Nor does it run hooks, and noise, faults and their audit need those in every pass. An engine with graphs therefore
replays in passes without noise alone, and computes the others as one without graphs does. Prompts are always read by
Python, with the audit of a clean pass. Every replay is counted, and the receipt states the number.

A graph reads the memory in which the weights were when it was captured, so weights that move are refused.

Never run on a GPU: tested with vLLM's own dispatcher and wrapper on a CPU, and stand-ins for the graphs.
"""

from typing import Any

from torch import nn

from aqnpipe.config.noise import NoiseSpec
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ReceiptError

_SIZES = 32
"""Batch sizes of which graphs are captured, at most, beside 1, 2 and 4; a batch is padded to the next."""


def why_no_graphs(*, is_requested: bool, device: DeviceKind, rollouts: NoiseSpec | None = None) -> str | None:
    """Return in one line why an engine has no CUDA graphs; None if it has. `rollouts`: the noise of those it draws."""
    if not is_requested:
        return "generation.cuda_graphs is false"
    if device != "cuda":
        return f"vLLM has no CUDA graphs on a device of kind {device}"
    if rollouts is not None and not rollouts.is_clean_in("rollout"):
        return "the rollouts have noise or faults, which run in Python"
    return None


def graph_settings(batch_size: int) -> dict[str, Any]:
    """Return vLLM's settings for graphs of decode steps alone, without compilation, for batches up to a size."""
    step = max(8, -(-batch_size // (8 * _SIZES)) * 8)
    sizes = {size for size in (1, 2, 4, *range(step, batch_size, step), batch_size) if size <= batch_size}
    return {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sorted(sizes)}


class WorkerGraphs:
    """The graphs of one worker, whose `model_runner` is given; off until they are allowed. `replays` counts them."""

    def __init__(self, runner: Any) -> None:
        self.replays = 0
        self._dispatcher = runner.cudagraph_dispatcher
        self._modes = {True: self._dispatcher.cudagraph_mode, False: type(self._dispatcher.cudagraph_mode).NONE}
        self._addresses = _addresses(runner.get_model())
        entries = getattr(runner.model, "concrete_cudagraph_entries", {}).values()
        captured = [entry for entry in entries if entry.cudagraph is not None]
        for entry in captured:
            entry.cudagraph = _Counted(entry.cudagraph, self)
        self.number = len(captured)
        self.allow(False)

    def allow(self, is_clean: bool) -> None:
        """Let vLLM replay in what follows, or compute every pass by Python."""
        # Of what vLLM computes next, its dispatcher alone decides whether it is replayed.
        self._dispatcher.cudagraph_mode = self._modes[is_clean]

    def refuse_moved(self, model: nn.Module) -> None:
        """Raise ReceiptError if a weight is not where it was at the start, where graphs read it."""
        if not self.number:
            return
        now = _addresses(model)
        if moved := [name for name, address in self._addresses.items() if now.get(name) != address]:
            raise ReceiptError(
                f"weight sync: {len(moved)} of {len(now)} parameters moved, and CUDA graphs read their old memory: "
                f"{', '.join(moved[:3])}; generation.cuda_graphs: false runs without"
            )


class _Counted:
    def __init__(self, graph: Any, graphs: WorkerGraphs) -> None:
        self._graph, self._graphs = graph, graphs

    def replay(self) -> None:
        self._graphs.replays += 1
        self._graph.replay()


def _addresses(model: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
