"""vLLM's CUDA graphs: which engines have them, which passes replay them, and what proves it. Graphs stand in."""

import enum
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import AdaptiveNoise, Fault, ModuleNoise, NoiseSpec, OperatorNoise, RelativeGaussian
from aqnpipe.errors import ReceiptError
from aqnpipe.generation.noisy_passes import PassNoise
from aqnpipe.generation.vllm import worker
from aqnpipe.generation.vllm.engine import VllmEngine
from aqnpipe.generation.vllm.launch import graph_settings, why_no_graphs
from aqnpipe.generation.vllm.plugin import is_vllm_installed
from aqnpipe.generation.vllm.worker import WorkerGraphs, WorkerPass
from aqnpipe.generation.vllm.worker_merge import checked_measurements
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

NOISE = OperatorNoise(error=RelativeGaussian(scale=0.05))
AQN = AdaptiveNoise(schedule={"kind": "constant", "sigma": 0.05})
EVALUATED = NOISE.model_copy(update={"phases": ("evaluation",)})
MODULES = ModuleNoise(modules="minimal", error=NOISE.error)
FAULT = Fault(type="saturation", layer=0, magnitude=0.5)


@pytest.mark.parametrize(
    "rollouts", [None, NoiseSpec(), NoiseSpec(operator_noise=NOISE.model_copy(update={"phases": ("actor_forward",)}))]
)
def test_engines_have_graphs_where_nothing_needs_python(rollouts):
    assert why_no_graphs(is_requested=True, device="cuda", rollouts=rollouts) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_requested": False}, "generation.cuda_graphs is false"),
        ({"device": "cpu"}, "no CUDA graphs on a device of kind cpu"),
        ({"device": "npu"}, "no CUDA graphs on a device of kind npu"),
        ({"rollouts": NoiseSpec(operator_noise=NOISE)}, "the rollouts have noise or faults"),
        ({"rollouts": NoiseSpec(aqn=AQN)}, "the rollouts have noise or faults"),
        ({"rollouts": NoiseSpec(faults=(FAULT,))}, "the rollouts have noise or faults"),
        (
            {"rollouts": NoiseSpec(module_noise=MODULES)},
            "the rollouts have noise or faults",
        ),
    ],
)
def test_the_reason_against_graphs_is_one_line(changes, reason):
    found = why_no_graphs(**({"is_requested": True, "device": "cuda"} | changes))
    assert found is not None
    assert reason in found


@pytest.mark.parametrize("batch_size", [1, 3, 8, 80, 128, 513, 2000])
def test_a_batch_of_any_size_has_a_graph(batch_size):
    settings = graph_settings(batch_size)
    sizes = settings["cudagraph_capture_sizes"]
    assert (settings["mode"], settings["cudagraph_mode"]) == (0, "FULL_DECODE_ONLY")
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1]) == (1, batch_size)
    assert len(sizes) <= 36


class Mode(enum.Enum):
    NONE = 0
    FULL_DECODE_ONLY = 2


class Runner:
    """Stands in for vLLM's model runner with graphs of two batch sizes; the dispatcher decides what is replayed."""

    def __init__(self):
        self.module = nn.Linear(2, 2)
        self.replayed, self.computed = [], 0
        self.cudagraph_dispatcher = SimpleNamespace(cudagraph_mode=Mode.FULL_DECODE_ONLY)
        graph = SimpleNamespace(replay=lambda: self.replayed.append("graph"))
        entries = {size: SimpleNamespace(cudagraph=graph) for size in (1, 2)}
        self.model = SimpleNamespace(concrete_cudagraph_entries=entries | {4: SimpleNamespace(cudagraph=None)})

    def get_model(self):
        return self.module

    def decode(self):
        if self.cudagraph_dispatcher.cudagraph_mode is Mode.NONE:
            self.computed += 1
        else:
            self.model.concrete_cudagraph_entries[2].cudagraph.replay()


def test_graphs_are_replayed_only_where_they_are_allowed_and_counted():
    runner = Runner()
    graphs = WorkerGraphs(runner)
    assert graphs.number == 2
    for allowed in (None, True, False):
        if allowed is not None:
            graphs.allow(allowed)
        runner.decode()
    assert (runner.replayed, runner.computed, graphs.replays) == (["graph"], 2, 1)


def test_a_weight_that_moved_is_refused_and_one_that_changed_in_its_place_is_not():
    runner = Runner()
    graphs = WorkerGraphs(runner)
    runner.module.weight.data.fill_(3.0)
    graphs.refuse_moved(runner.module)
    runner.module.weight.data = runner.module.weight.data.double()
    with pytest.raises(ReceiptError, match=r"1 of 2 parameters moved, and CUDA graphs read their old memory: weight"):
        graphs.refuse_moved(runner.module)
    runner.model.concrete_cudagraph_entries = {}
    WorkerGraphs(runner).refuse_moved(nn.Linear(2, 2))


def passed(noise, steps=3):
    """Return the recorder of a pass whose prompts are read by Python and whose other steps the runner decodes."""
    runner = Runner()
    engine = SimpleNamespace(layers=[None] * 3, model=nn.Module())
    current = WorkerPass(engine, noise, WorkerGraphs(runner))
    with mock.patch.object(worker, "engine_noise", return_value=nullcontext({})):
        current.begin_batch(NoiseKey(seed=3, step=7))
    current.recorder.add(noise.phase, passes=1)
    for _ in range(steps):
        runner.decode()
    current.end_batch()
    runner.decode()
    assert runner.computed == (1 if noise.is_clean else steps + 1)
    return current


@pytest.mark.parametrize(("noise", "replays"), [(PassNoise(), 3), (PassNoise(operator_noise=EVALUATED), 0)])
def test_a_pass_without_noise_is_replayed_and_says_so(noise, replays):
    (record,) = passed(noise).recorder.state().phases
    assert (record.passes, record.graph_replays) == (1 + replays, replays)


def test_an_engine_with_graphs_that_replays_none_is_refused():
    replies = [passed(PassNoise(), steps).measured(0, 1) for steps in (3, 0)]
    (state,) = checked_measurements(replies[:1], 1, 4, 0, must_replay=True)
    assert state.phases[0].graph_replays == 3
    checked_measurements(replies[1:], 1, 1, 0, must_replay=False)
    with pytest.raises(ReceiptError, match="replayed no CUDA graph in 1 forward passes, which generation"):
        checked_measurements(replies[1:], 1, 1, 0, must_replay=True)


@pytest.mark.parametrize("noise", [NoiseSpec(operator_noise=EVALUATED), NoiseSpec(faults=(FAULT,)), NoiseSpec(aqn=AQN)])
def test_a_receipt_with_replays_under_noise_is_refused(noise):
    problems = []
    for spec in (noise, NoiseSpec()):
        recorder = ReceiptRecorder(spec, expected_phases=("evaluation",), num_layers=3, num_norms=7)
        recorder.add("evaluation", passes=1)
        recorder.count_replays("evaluation", 0, 5)
        problems.append([line for line in recorder.receipt().problems() if "CUDA graphs" in line])
    (line,), none = problems
    assert line == "evaluation: 5 of 6 forward passes replayed CUDA graphs, which have neither noise nor faults"
    assert not none


def test_receipts_without_graphs_are_as_before():
    recorder = ReceiptRecorder(NoiseSpec(), expected_phases=("evaluation",), num_layers=3, num_norms=7)
    recorder.add("evaluation", passes=1)
    recorder.count_replays("evaluation", 0, 0)
    assert "graph_replays" not in recorder.receipt().model_dump_json()
    recorder.count_replays("evaluation", 0, 2)
    assert '"graph_replays":2' in recorder.receipt().model_dump_json().replace(" ", "")


WORKER = {
    "rank": 0,
    "num_workers": 1,
    "tensor_parallel": 1,
    "plugin": None,
    "model": "Qwen2ForCausalLM",
    "num_layers": 3,
    "compiles": False,
    "cuda_graphs": 0,
}


@pytest.mark.parametrize(
    ("requested", "found", "message"),
    [
        (True, {"cuda_graphs": 12}, None),
        (False, {}, None),
        (True, {}, r"captured 0 CUDA graphs, generation\.cuda_graphs: true was requested"),
        (False, {"cuda_graphs": 3}, r"captured 3 CUDA graphs, generation\.cuda_graphs: false was requested"),
        (True, {"compiles": True, "cuda_graphs": 12}, "compiles the model"),
    ],
)
def test_an_engine_says_whether_it_has_graphs_and_is_believed_only_if_it_was_asked(requested, found, message):
    from importlib.metadata import version

    worker = WORKER | {"plugin": version("aqnpipe")} | found
    engine = SimpleNamespace(_cuda_graphs=requested, _folder="model", call_workers=lambda method: [worker])
    if message is None:
        assert VllmEngine._checked_workers(engine, 3, 1) == [worker]
        return
    with pytest.raises(ReceiptError, match=message):
        VllmEngine._checked_workers(engine, 3, 1)


@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")
def test_the_setting_reaches_vllm_which_has_no_graphs_on_a_cpu():
    with pytest.raises(ReceiptError, match=r"captured 0 CUDA graphs, generation\.cuda_graphs: true was requested"):
        VllmEngine(
            builtin_folder("tiny"),
            end_token=1,
            dtype="float32",
            max_tokens=32,
            batch_size=2,
            device="cpu",
            cuda_graphs=True,
        )


@pytest.mark.skipif(not is_vllm_installed(), reason="vLLM is not installed here: make test-vllm")
def test_vllms_dispatcher_and_wrapper_replay_what_they_are_allowed(monkeypatch):
    """vLLM's own classes, on a CPU: only the recorded graph and its memory pool stand in."""
    from vllm.compilation import cuda_graph
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig
    from vllm.forward_context import set_forward_context
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    monkeypatch.setattr(
        cuda_graph.current_platform.__class__, "get_global_graph_pool", lambda self: None, raising=False
    )
    config = VllmConfig(compilation_config=CompilationConfig(mode=0))
    settings = config.compilation_config
    settings.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
    settings.cudagraph_capture_sizes, settings.max_cudagraph_capture_size = [1, 2, 4], 4
    dispatcher, module = CudagraphDispatcher(config), nn.Linear(2, 2)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY)
    wrapper = cuda_graph.CUDAGraphWrapper(module, config, CUDAGraphMode.FULL)
    replayed = []
    for _, descriptors in dispatcher.get_capture_descs():
        for descriptor in descriptors:
            graph = SimpleNamespace(replay=lambda size=descriptor.num_tokens: replayed.append(size))
            entry = cuda_graph.CUDAGraphEntry(descriptor, cudagraph=graph, output=torch.zeros(4, 2))
            wrapper.concrete_cudagraph_entries[descriptor] = entry
    runner = SimpleNamespace(cudagraph_dispatcher=dispatcher, model=wrapper, get_model=lambda: module)
    graphs = WorkerGraphs(runner)
    assert graphs.number == 3
    computed = []
    module.register_forward_hook(lambda *_: computed.append(1))
    for allowed, uniform in ((True, True), (True, False), (False, True)):
        graphs.allow(allowed)
        mode, descriptor = dispatcher.dispatch(3, uniform_decode=uniform)
        with set_forward_context(None, config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor):
            wrapper(torch.zeros(3, 2))
    # A decode step where graphs are allowed; prompts and other passes are computed by Python.
    assert (replayed, graphs.replays, len(computed)) == ([4], 1, 2)
