"""Two worker processes on a CPU, connected by gloo: training runs, and gradients of one forward and backward pass.

`run_together(jobs, folder)` starts both and waits for them. As a program this is one of the workers.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

NOISE = {"operators": "matmul", "error": {"kind": "relative_gaussian", "scale": 0.05}}


def run_together(jobs, folder: Path, timeout=900) -> list[int]:
    """Run `jobs` one after the other in two processes; return their exit codes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        ),
    }
    workers = []
    for rank in ("0", "1"):
        log = (folder / f"worker{rank}.log").open("w")
        command = [sys.executable, __file__, str(folder / "jobs.json")]
        workers.append(
            subprocess.Popen(
                command, env={**environment, "RANK": rank, "LOCAL_RANK": rank}, stdout=log, stderr=subprocess.STDOUT
            )
        )
    try:
        return [worker.wait(timeout) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def logs(folder: Path) -> str:
    """Return the end of what the workers wrote."""
    return "".join((folder / f"worker{rank}.log").read_text()[-4000:] for rank in (0, 1))


def train(job) -> None:
    """Run one training job, from its newest resume point; `kill_after`: worker 0 is killed after that step.

    `teach` false: rewards are those of the answers. `errs`: an operator of one worker errs in every third
    call.
    """
    from contextlib import nullcontext
    from itertools import count

    import pytest
    from erring_kernels import erring
    from tiny_training import inputs_in, teach
    from torch import distributed

    from aqnpipe.config.run import TrainingSpec
    from aqnpipe.training import run
    from aqnpipe.training.resume import prepare_resume
    from aqnpipe.training.workspace import Workspace

    if job.get("teach", True):
        teach(pytest.MonkeyPatch())
    patch = pytest.MonkeyPatch()
    workspace, point = Workspace(Path(job["folder"])), [None]
    if distributed.get_rank() == 0:
        workspace.folder.mkdir(parents=True, exist_ok=True)
        point = [prepare_resume(workspace, print)]
    distributed.broadcast_object_list(point)
    if job.get("kill_after") and distributed.get_rank() == 0:
        plain = run.NoisyGRPOTrainer._save_checkpoint

        def save_and_die(self, model, trial):
            plain(self, model, trial)
            if self.state.global_step == job["kill_after"]:
                os.kill(os.getpid(), signal.SIGKILL)

        run.NoisyGRPOTrainer._save_checkpoint = save_and_die
    built = []
    plain_build = run._build_trainer
    run._build_trainer = lambda *args: built.append(plain_build(*args)) or built[0]
    errs = job.get("errs", {})
    calls = count()
    is_here = errs.get("rank") == distributed.get_rank()
    try:
        with erring(errs["operator"], lambda: next(calls) % 3 == 0) if is_here else nullcontext():
            run.run_worker(
                TrainingSpec.model_validate(job["spec"]), inputs_in(Path(job["inputs"])), workspace, point[0]
            )
    finally:
        run._build_trainer = plain_build
        patch.undo()
    held = workspace.folder / f"held{distributed.get_rank()}.json"
    held.write_text(json.dumps({"resumed": point[0] is not None, "bytes": held_bytes(built[0])}))
    distributed.barrier()


def held_bytes(trainer) -> dict[str, int]:
    """Return the bytes that this worker holds of weights, of gradients, of moments, and of the reference."""
    from aqnpipe.models.sharding import local

    optimizer, weights = trainer._plain_optimizer, list(trainer.policy.parameters())
    moments = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    reference = list(trainer.ref_model.parameters()) if hasattr(trainer.ref_model, "parameters") else []
    parts = {"weights": weights, "moments": moments, "reference": reference}
    return {name: sum(local(t).untyped_storage().nbytes() for t in tensors) for name, tensors in parts.items()}


def gradients(job) -> None:
    """Write the gradients of one noised forward and backward pass, with shares or with data parallelism."""
    import torch
    from safetensors.torch import save_file
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from aqnpipe.config.noise import NoiseSpec
    from aqnpipe.machine.machine import NoiseKey
    from aqnpipe.models.sharding import average_whole_gradients, gathered_weights, shard_model
    from aqnpipe.noise.injection.phase import phase_noise
    from aqnpipe.noise.receipts.recorder import ReceiptRecorder
    from conftest import random_qwen2

    rank = distributed.get_rank()
    network = random_qwen2(num_layers=3, tie_word_embeddings=job["tied"]).train()
    if job["checkpointing"]:
        network.gradient_checkpointing_enable({"use_reentrant": False})
    if job["sharded"]:
        shard_model(network, torch.device("cpu"))
    model = network if job["sharded"] else DistributedDataParallel(network)
    spec = NoiseSpec.model_validate({"operator_noise": NOISE if job["noisy"] else None})
    recorder = ReceiptRecorder(
        spec,
        expected_phases=("actor_forward", "backward") if job["noisy"] else ("actor_forward",),
        num_layers=3,
        num_norms=7,
        norms_watched=True,
    )
    recorder.note_clean_norms(network)
    ids = torch.randint(network.config.vocab_size, (2, 12), generator=torch.Generator().manual_seed(rank))
    with phase_noise(network, spec, "actor_forward", NoiseKey(seed=0, step=0, rank=rank), recorder, backward=True):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
    recorder.add("backward", passes=1)
    recorder.settle()
    if job["sharded"]:
        average_whole_gradients(network)
    found = {name: weight.grad for name, weight in network.named_parameters()}
    found = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().contiguous() for name, grad in found.items()}
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**found, "loss": loss.detach()}, folder / f"{rank}.safetensors")
    receipt = recorder.receipt()
    (folder / f"{rank}.json").write_text(receipt.model_dump_json(include={"rows"}))
    if job["sharded"]:
        with gathered_weights(network), torch.no_grad():
            # Workers that compute different numbers of passes do not wait for each other.
            for _ in range(1 + 2 * rank):
                network(input_ids=ids, use_cache=False)
        assert all(hasattr(w, "to_local") or "norm" in name for name, w in network.named_parameters())


def weights(job) -> None:
    """Write the weights that an engine would load, from shares (or not), before and after an update of them."""
    import torch
    from safetensors.torch import save_file
    from torch import distributed

    from aqnpipe.config.training import LoraConfig
    from aqnpipe.generation.vllm.weights import Digests, for_engine
    from aqnpipe.models.adapters import MergedForEngine, add_adapters
    from aqnpipe.models.sharding import local, shard_model
    from aqnpipe.training.ranks import gathered
    from conftest import random_qwen2

    network = random_qwen2(num_layers=2, tie_word_embeddings=job["tied"])
    if job["adapters"]:
        add_adapters(network, LoraConfig(rank=3, alpha=6, target_modules=("q_proj", "down_proj")), seed=0)
        with torch.no_grad():
            for name, weight in network.named_parameters():
                if "lora_B" in name:
                    weight.normal_(generator=torch.Generator().manual_seed(1))
    trained = dict(network.named_parameters())
    if job["sharded"]:
        shard_model(network, torch.device("cpu"))
        trained = dict(network.named_parameters())
    source = MergedForEngine(torch.bfloat16)
    norms = {f"{name}.weight" for name, _ in network.named_modules() if "norm" in name}
    folder = Path(job["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for when in ("before", "after"):
        if when == "after":
            # Leaves the embedding gathered, as it was before the update.
            with torch.no_grad():
                network(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
                for weight in trained.values():
                    local(weight).mul_(1.5)
        found = {name: tensor.clone() for name, tensor in for_engine(source(network), norms, torch.bfloat16)}
        save_file(found, folder / f"{when}{distributed.get_rank()}.safetensors")
    digests = gathered({name: Digests(1).of(tensor) for name, tensor in found.items()})
    assert digests[0] == digests[1]


def main(path: str) -> None:
    """Be one of the two workers."""
    from torch import distributed

    distributed.init_process_group("gloo")
    for job in json.loads(Path(path).read_text()):
        {"train": train, "gradients": gradients, "weights": weights}[job["kind"]](job)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
