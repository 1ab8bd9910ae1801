"""vLLM as a generation backend: starts an engine for one model folder, checks its workers and calls their methods."""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import psutil
from torch import Tensor

from aqnpipe.config.model import Dtype, read_model_config
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ModelError, ReceiptError, first_line
from aqnpipe.generation.backend import END_TOKEN, STOP_TEXTS, Completion, Sampling, StopText
from aqnpipe.generation.noisy_passes import PassMeasurements, PassNoise
from aqnpipe.generation.vllm.launch import (
    check_model,
    check_tensor_parallel,
    check_vllm,
    graph_settings,
    kv_cache_bytes,
    refuse_too_large,
    start,
    vllm_version,
)
from aqnpipe.generation.vllm.weights import Digests, WeightBuffer, in_buffers, refuse_other_weights
from aqnpipe.generation.vllm.worker import NoiseExtension, checked_reply
from aqnpipe.generation.vllm.worker_merge import checked_measurements, merged_workers, shares_of
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.models.untrusted import load_config
from aqnpipe.noise.injection.faults import ActiveFaultState
from aqnpipe.seeding import derive_seed

WORKER_EXTENSION = f"{NoiseExtension.__module__}.{NoiseExtension.__qualname__}"
STOP_TEXT_PROCESSOR = "aqnpipe.generation.vllm.stop_processor:StopTextProcessor"


class VllmEngine:
    """vLLM with its engine and workers in separate processes; a context manager that ends them.

    `generate` returns greedy or sampled completions. Between `begin_pass` and `end_pass` the workers apply noise to it.
    All requests of a batch are queued before the first is scheduled, so that batches do not depend on timing. Only in
    passes without noise is the common prefix of a batch computed once (vLLM's prefix cache); under noise all rows would
    share the noise of the prefix. Nothing is cached from one batch to the next.
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
        sleeps: bool = False,
        worker_extension: str = WORKER_EXTENSION,
        batch_invariant: bool | None = None,
        tensor_parallel: int = 1,
        cuda_graphs: bool = False,
    ) -> None:
        """Start the engine for batches of `batch_size` prompts.

        `max_tokens`: limit of a prompt and its response together. With `sleeps` the engine can free its GPU memory
        between calls. `batch_invariant`: vLLM's batch-invariant mode, which every worker must report as requested; None
        leaves it to the environment. `tensor_parallel`: number of workers that share every layer, each on a device of
        its own. `cuda_graphs`: passes without noise are replayed, see `graphs`. Raises ModelError if vLLM is missing,
        cannot load the model or share its layers, or `sleeps` is set on a CPU; DeviceError if there are fewer devices
        than workers; ReceiptError if a worker is not prepared for noise, or its mode or graphs are not as requested.
        """
        check_vllm(device)
        if sleeps and device == "cpu":
            raise ModelError("generation.rollout_sleep: vLLM has no sleep mode on a CPU; expected false")
        config = check_model(folder, read_model_config(folder), device)
        load_config(folder)  # vLLM reads the file itself: only what it may contain is of interest here
        check_tensor_parallel(folder, config, device, tensor_parallel)
        self._folder, self._end_token = folder, end_token
        self._stops: dict[str, StopText] = {}
        self._noise: PassNoise | None = None
        self._at_end = ExitStack()
        self._min_forwards = self._longest_batch = 0
        self._cuda_graphs, self._must_replay = cuda_graphs, False
        self._batch_size, self._batch_tokens = batch_size, max(2048, max_tokens)
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_tokens,
            "max_num_seqs": batch_size,
            "max_num_batched_tokens": self._batch_tokens,
            "enforce_eager": not cuda_graphs,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "skip_tokenizer_init": True,
            # Log-probabilities of the distribution that is sampled: after the temperature.
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": sleeps,
            # Ignore generation_config.json in the model folder.
            "generation_config": "vllm",
            "seed": 0,
            "trust_remote_code": False,
            "load_format": "safetensors",
            "worker_extension_cls": worker_extension,
            "logits_processors": [STOP_TEXT_PROCESSOR],
            "disable_log_stats": True,
            "tensor_parallel_size": tensor_parallel,
        }
        if cuda_graphs:
            arguments["compilation_config"] = graph_settings(batch_size)
        if tensor_parallel > 1:
            # In an actor of Ray vLLM would start its workers as further actors, on devices that others have.
            arguments["distributed_executor_backend"] = "mp"
        if device == "cpu":
            cache_bytes = kv_cache_bytes(config, dtype, max_tokens, batch_size, tensor_parallel)
            refuse_too_large(folder, tensor_parallel * cache_bytes, psutil.virtual_memory().available)
            arguments["kv_cache_memory_bytes"] = cache_bytes
            # After a part of a prompt vLLM sets a request's random numbers back, which those of a CPU cannot be.
            arguments["enable_chunked_prefill"] = False
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._llm = start(folder, arguments, device, threads, batch_invariant, tensor_parallel)
        try:
            self._workers = self._checked_workers(int(config["num_hidden_layers"]), tensor_parallel)
            self._check_invariance(batch_invariant)
        except (ModelError, ReceiptError):
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def description(self) -> dict[str, str | int | bool]:
        """The engine for run.json."""
        first = self._workers[0]
        return {
            "backend": "vllm",
            "vllm": vllm_version(),
            "enforce_eager": first["enforce_eager"],
            **({"cuda_graphs": first["cuda_graphs"]} if self._cuda_graphs else {}),
            "workers": len(self._workers),
            "model_class": first["model"],
        }

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that the model has logits of, as vLLM read it from config.json."""
        size: int = self._llm.model_config.get_vocab_size()
        return size

    @property
    def worker_processes(self) -> list[int]:
        """The process ids of the workers."""
        return [worker["process"] for worker in self._workers]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Make the worker load `weights`, by their names in transformers; they are read once, one after the other.

        Later calls use nothing that was computed with other weights. Raises ReceiptError if any parameter of the
        worker's model then differs from them in a bit, and ModelError if there is no memory to send them.
        """
        key = secrets.randbits(62)
        digests = Digests(key)
        sent: dict[str, str] = {}
        for some in in_buffers(weights):
            with WeightBuffer(some) as buffer:
                self.call_workers("aqnpipe_load_weights", buffer.shared(), buffer.index)
            sent |= {name: digests.of(tensor) for name, tensor in some}
        held = [reply.get("digests") for reply in self.call_workers("aqnpipe_digests", key)]
        if len(held) != len(self._workers) or not all(held):
            raise ReceiptError(f"weight sync: not every one of {len(self._workers)} vLLM workers says what it holds")
        for digest in held:
            refuse_other_weights(f"vLLM's {self._workers[0]['model']}", sent, digest or {})

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`. Raises ModelError if vLLM's model does not support the noise."""
        self.call_workers("aqnpipe_begin_pass", noise.model_dump(mode="json"))
        self._noise, self._min_forwards, self._longest_batch, self._must_replay = noise, 0, 0, False

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey | None = None
    ) -> list[Completion]:
        """Return one completion per prompt, in order; with `key`, under the noise of the pass, keyed by `key`."""
        if not prompts:
            return []
        from vllm import SamplingParams

        first, stop_text = sampling.first_row, sampling.stop_text
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_response_tokens,
                temperature=0.0 if sampling.temperature is None else sampling.temperature,
                seed=None if sampling.temperature is None else derive_seed(sampling.seed, "vllm.sampling", first + row),
                stop_token_ids=[self._end_token],
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if sampling.log_probabilities else None,
                extra_args=None if stop_text is None else self.ended_at(stop_text),
            )
            for row in range(len(prompts))
        ]
        stop = None if stop_text is None else self._stop(stop_text)
        return [self._completion(output.outputs[0], stop) for output in self.complete(prompts, parameters, key)]

    def ended_at(self, *stop_texts: str) -> dict[str, Any]:
        """Return the `extra_args` of a request that the worker ends behind any of these texts, with the end token."""
        return {STOP_TEXTS: list(stop_texts), END_TOKEN: self._end_token}

    def complete(
        self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any], key: NoiseKey | None = None
    ) -> list[Any]:
        """Return vLLM's `RequestOutput` of every prompt, in order, for its `SamplingParams`.

        Under the noise of the pass with `key`, which keys it. Parameters may have no `stop`: vLLM looks for these texts
        in another process, so how much is computed would depend on timing.
        """
        if key is None:
            return self._outputs(prompts, parameters, share_prefix=False)
        # In a rollout every row reads its own prompt.
        is_clean = self._noise is not None and self._noise.is_clean
        share_prefix = is_clean and self._noise is not None and self._noise.clean_norms is None
        self.call_workers("aqnpipe_begin_batch", key._asdict())
        try:
            outputs = self._outputs(prompts, parameters, share_prefix)
        finally:
            self.call_workers("aqnpipe_end_batch")
        # Each token of a response takes one forward pass.
        longest = max(len(output.outputs[0].token_ids) for output in outputs)
        self._min_forwards += longest
        self._longest_batch = max(self._longest_batch, longest)
        # Where all prompts are read in the first pass, every other one has a token of each row: those have graphs.
        together = len(prompts) <= self._batch_size and sum(map(len, prompts)) <= self._batch_tokens
        self._must_replay |= self._cuda_graphs and is_clean and together and longest > 1
        return outputs

    def end_pass(self) -> PassMeasurements:
        """End the pass; return the measurements of all workers, and the states of the faults.

        Raises ReceiptError if the measurements of a worker are missing or do not cover all forward passes.
        """
        noise, self._noise = self._noise, None
        if noise is None:
            raise RuntimeError("no forward pass has begun; this is a bug")
        replies = self.call_workers("aqnpipe_end_pass")
        num_norms = self._workers[0]["num_norms"]
        audited = self._longest_batch if noise.operator_noise_in(noise.phase) is not None else 0
        number, forwards = len(self._workers), self._min_forwards
        states = checked_measurements(replies, number, forwards, audited, must_replay=self._must_replay)
        merged = merged_workers(states, shares_of(replies), noise.recorder(self._num_layers, num_norms))
        faults = tuple(ActiveFaultState(**state) for state in replies[0]["fault_states"])
        return PassMeasurements(self._num_layers, num_norms, merged, faults)

    def fall_asleep(self) -> None:
        """Free the GPU memory of weights and cache; the caller sends the weights again before they are used."""
        self._llm.sleep(level=2)

    def wake_up(self, what: Literal["weights", "kv_cache"]) -> None:
        """Allocate that memory again."""
        self._llm.wake_up(tags=[what])

    def close(self) -> None:
        """End the processes of the engine."""
        self._llm.llm_engine.engine_core.shutdown()
        self._at_end.close()

    def when_closed(self, callback: Callable[[], None]) -> None:
        """Call `callback` once the engine's processes have ended."""
        self._at_end.callback(callback)

    def _outputs(self, prompts: Sequence[Sequence[int]], parameters: Sequence[Any], share_prefix: bool) -> list[Any]:
        # Earlier cache entries may contain noise, or come from other weights.
        if share_prefix and not self._llm.reset_prefix_cache():
            raise ModelError("vLLM did not empty its prefix cache, although no request is running")
        for each in parameters:
            # A prompt that is read from the cache has no log-probabilities.
            each.skip_reading_prefix_cache = not share_prefix or each.prompt_logprobs is not None
        # Pause until all requests are queued: which of them share a forward pass must not depend on timing.
        self._llm.sleep(level=0)
        self._llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], list(parameters), use_tqdm=False)
        self._llm.wake_up(tags=["scheduling"])
        outputs = self._llm.wait_for_completion(use_tqdm=False)
        if len(outputs) != len(prompts):
            raise ModelError(f"vLLM returned responses to {len(outputs)} of {len(prompts)} prompts")
        cached = [output.num_cached_tokens for output in outputs]
        if None in cached:
            raise ReceiptError("receipt invalid: vLLM does not report how many prompt tokens it read from its cache")
        if any(cached) and not share_prefix:
            raise ReceiptError(
                f"receipt invalid: vLLM read {sum(cached)} prompt tokens from its cache, expected 0: each prompt needs "
                "separate noise"
            )
        # Request ids are numbers in the order of the queue.
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _stop(self, text: str) -> StopText:
        if text not in self._stops:
            self._stops[text] = StopText(load_tokenizer(self._folder), text)
        return self._stops[text]

    def _completion(self, output: Any, stop: StopText | None) -> Completion:
        token_ids = list(output.token_ids)
        if stop is not None and stop.is_complete(token_ids[:-1]):
            # The stop text processor forced this end token; the model did not choose it.
            del token_ids[-1]
        log_probabilities = None
        if output.logprobs is not None:
            chosen = zip(token_ids, output.logprobs[: len(token_ids)], strict=True)
            log_probabilities = [by_id[token].logprob for token, by_id in chosen]
        has_ended = token_ids[-1] == self._end_token or (stop is not None and stop.is_complete(token_ids))
        return Completion(token_ids, "stop" if has_ended else "length", log_probabilities)

    def call_workers(self, method: str, *args: object) -> list[Mapping[str, Any]]:
        """Call a method of the worker extension on every worker; arguments and replies are plain data.

        Raises ModelError or ReceiptError for what a worker reports in one line.
        """
        return [checked_reply(reply) for reply in self._llm.collective_rpc(method, args=args)]

    def _check_invariance(self, requested: bool | None) -> None:
        found = [worker["batch_invariant"] for worker in self._workers]
        if requested is not None and found != [requested] * len(found):
            raise ReceiptError(f"vLLM's batch-invariant mode: requested {requested}, its workers report {found}")

    def _checked_workers(self, num_layers: int, tensor_parallel: int) -> list[Mapping[str, Any]]:
        self._num_layers = num_layers
        try:
            workers = self.call_workers("aqnpipe_describe")
        except Exception as error:
            # vLLM raises an error of another process as a bare Exception; other types are not about the extension.
            if type(error) is not Exception:
                raise
            reason = first_line(error)[:200]
            raise ReceiptError(f"vLLM's workers run without aqnpipe's extension ({reason})") from error
        for worker in workers:
            label = f"vLLM's worker {worker['rank']} of {worker['num_workers']}"
            if worker["plugin"] != version("aqnpipe"):
                raise ReceiptError(
                    f"{label} runs without aqnpipe's plugin (found {worker['plugin']}, VLLM_PLUGINS is "
                    f"{os.environ.get('VLLM_PLUGINS', 'not set')}): unset VLLM_PLUGINS or add aqnpipe to it, and "
                    "reinstall aqnpipe in the environment of vLLM (pip install -e .)"
                )
            if worker["model"].startswith("Transformers"):
                raise ModelError(
                    f"{self._folder / 'config.json'}: vLLM has no model class for it and would run "
                    "transformers' code on vLLM's attention, which gave other responses (GPT-NeoX); "
                    "generation.backend: transformers runs without vLLM"
                )
            if worker["compiles"]:
                raise ReceiptError(f"{label} compiles the model; noise needs enforce_eager")
            if bool(worker["cuda_graphs"]) is not self._cuda_graphs:
                raise ReceiptError(
                    f"{label} captured {worker['cuda_graphs']} CUDA graphs, generation.cuda_graphs: "
                    f"{str(self._cuda_graphs).lower()} was requested"
                )
            if not worker["num_workers"] == worker["tensor_parallel"] == tensor_parallel:
                raise ModelError(f"{label}: expected {tensor_parallel} workers, which share every layer")
            if worker["num_layers"] != num_layers:
                raise ReceiptError(f"{label} has {worker['num_layers']} decoder layers, the model has {num_layers}")
        if sorted(worker["rank"] for worker in workers) != list(range(workers[0]["num_workers"])):
            raise ReceiptError(f"vLLM: {len(workers)} of {workers[0]['num_workers']} workers replied")
        return workers
