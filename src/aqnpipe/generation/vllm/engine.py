"""An engine of vLLM as a generation backend: started for one model folder, its workers checked and called by name."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Self

import psutil

from aqnpipe.config.model import Dtype, read_model_config
from aqnpipe.device import DeviceKind
from aqnpipe.errors import ModelError, ReceiptError, first_line
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import PassMeasurements, PassNoise, RolloutNoise
from aqnpipe.generation.stop_text import END_TOKEN, STOP_TEXT, StopText
from aqnpipe.generation.vllm.launch import kv_cache_bytes, refuse_too_large, start, vllm_version
from aqnpipe.generation.vllm.requirements import check_model, check_vllm
from aqnpipe.generation.vllm.worker import NoiseExtension
from aqnpipe.models.loading import load_tokenizer
from aqnpipe.noise.injection.faults import ActiveFaultState
from aqnpipe.noise.injection.phase_state import NoiseKey
from aqnpipe.noise.receipts.merge import WorkerMeasurements, merge_states
from aqnpipe.noise.receipts.recorder_state import RecorderState
from aqnpipe.seeding import derive_seed

WORKER_EXTENSION = f"{NoiseExtension.__module__}.{NoiseExtension.__qualname__}"
ENDS_AT_TEXT = "aqnpipe.generation.vllm.stop_processor:EndsAtText"


class VllmEngine:
    """vLLM with its engine and workers in processes of their own; a context manager that ends them.

    Greedy or sampled completions come from `generate`; `begin_pass` to `end_pass` put noise around it, inside the
    workers. Requests are queued before the first is scheduled, so that batches do not depend on timing. What prompts of
    a batch begin with is computed once (vLLM's prefix cache) in passes without noise alone, as it would be noise that
    all rows have in common; nothing is kept from one batch for the next.
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
    ) -> None:
        """Start the engine for prompts and responses of up to `max_tokens` together, `batch_size` of them at a time.

        One that `sleeps` can give its memory on a GPU back between calls. Raises ModelError if vLLM is missing, cannot
        load the model, or shall sleep on a CPU, ReceiptError if a worker is not prepared for
        noise.
        """
        check_vllm(device)
        if sleeps and device == "cpu":
            raise ModelError("generation.rollout_sleep: vLLM has no sleep mode on a CPU; expected false")
        config = read_model_config(folder)
        check_model(folder, config, device)
        self._folder, self._end_token = folder, end_token
        self._stops: dict[str, StopText] = {}
        self._noise: PassNoise | None = None
        self._forwards_due = 0
        arguments: dict[str, Any] = {
            "model": str(folder),
            "dtype": dtype,
            "max_model_len": max_tokens,
            "max_num_seqs": batch_size,
            "max_num_batched_tokens": max(2048, max_tokens),
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "async_scheduling": False,
            "skip_tokenizer_init": True,
            # Those of the draws themselves, after the temperature.
            "logprobs_mode": "processed_logprobs",
            "enable_sleep_mode": sleeps,
            # What a model's folder suggests for generation has no part.
            "generation_config": "vllm",
            "seed": 0,
            "trust_remote_code": False,
            "load_format": "safetensors",
            "worker_extension_cls": worker_extension,
            "logits_processors": [ENDS_AT_TEXT],
            "disable_log_stats": True,
        }
        if device == "cpu":
            cache_bytes = kv_cache_bytes(config, dtype, max_tokens, batch_size)
            refuse_too_large(folder, cache_bytes, psutil.virtual_memory().available)
            arguments["kv_cache_memory_bytes"] = cache_bytes
        else:
            arguments["gpu_memory_utilization"] = gpu_memory_utilization
        self._llm = start(folder, arguments, device, threads)
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

    def load_weights(self, path: Path, sha256: str) -> None:
        """Let every worker take the weights in a safetensors file, whose digest is `sha256`.

        Nothing that was computed with other weights is read any more. Raises ReceiptError if any parameter of a
        worker's model is not, bit for bit, what was sent.
        """
        answers = self._call("aqnpipe_load_weights", str(path), sha256)
        if [answer.get("sha256") for answer in answers] != [sha256] * len(self._workers):
            raise ReceiptError(f"weight sync: not every one of {len(self._workers)} vLLM workers took the weights")

    def begin_pass(self, noise: PassNoise) -> None:
        """Start a pass under `noise`. Raises ModelError if vLLM's model cannot be given it."""
        self._call("aqnpipe_begin_pass", noise.model_dump(mode="json"))
        self._noise, self._forwards_due = noise, 0

    def begin_rollout(self, noise: RolloutNoise) -> None:
        """Start a rollout under `noise`, a pass of one batch. Raises ModelError if vLLM's model cannot be given it."""
        self._call("aqnpipe_begin_rollout", noise.model_dump(mode="json"))
        # No pass any more, of which one that failed may have been left.
        self._noise, self._forwards_due = None, 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, key: NoiseKey | None = None
    ) -> list[Completion]:
        """Return one completion per prompt, in order; with a key, under the noise of the pass, which the key names."""
        if not prompts:
            return []
        if key is None:
            return self._generate(prompts, sampling, reads_beginning_once=False)
        reads_beginning_once = self._noise is not None and self._noise.is_clean
        self._call("aqnpipe_begin_batch", asdict(key))
        try:
            completions = self._generate(prompts, sampling, reads_beginning_once)
        finally:
            self._call("aqnpipe_end_batch")
        # Each token of a response takes a forward pass of its own.
        self._forwards_due += max(len(one.token_ids) for one in completions)
        return completions

    def end_pass(self) -> PassMeasurements:
        """Return the account of all workers. Raises ReceiptError if one is missing or short."""
        noise, self._noise = self._noise, None
        if noise is None:
            raise RuntimeError("no pass has begun; this is a bug")
        accounts, _ = self._accounts()
        states = tuple(account.state for account in accounts)
        return PassMeasurements(self._num_layers, self._workers[0]["num_norms"], states)

    def end_rollout(self) -> tuple[RecorderState, tuple[ActiveFaultState, ...]]:
        """Return what all workers recorded in a rollout, for the receipt of its run, and the states of its faults.

        Raises ReceiptError if an account is missing or short.
        """
        accounts, fault_states = self._accounts()
        return merge_states([account.state for account in accounts], per_worker_draws=False), fault_states

    def fall_asleep(self) -> None:
        """Give back the memory of weights and cache on a GPU; the weights are sent anew before they are needed."""
        self._llm.sleep(level=2)

    def wake_up(self, what: Literal["weights", "kv_cache"]) -> None:
        """Take that memory again."""
        self._llm.wake_up(tags=[what])

    def _accounts(self) -> tuple[list[WorkerMeasurements], tuple[ActiveFaultState, ...]]:
        """End the pass; return what each worker recorded, by rank, and the fault states of the first."""
        answers = self._call("aqnpipe_end_pass")
        if sorted(answer["rank"] for answer in answers) != list(range(len(self._workers))):
            raise ReceiptError(
                f"receipt refused: accounts of workers {sorted(answer['rank'] for answer in answers)}, expected "
                f"{len(self._workers)}"
            )
        answers.sort(key=lambda answer: int(answer["rank"]))
        accounts = [
            WorkerMeasurements(answer["rank"], answer["num_workers"], RecorderState.from_json(answer["state"]))
            for answer in answers
        ]
        for account in accounts:
            forwards = sum(phase.forwards for phase in account.state.phases)
            if forwards < self._forwards_due:
                raise ReceiptError(
                    f"receipt refused: vLLM's {account.label} accounts for {forwards} forward passes, the responses "
                    f"took at least {self._forwards_due}"
                )
        return accounts, tuple(ActiveFaultState(**state) for state in answers[0]["fault_states"])

    def close(self) -> None:
        """End the processes of the engine."""
        self._llm.llm_engine.engine_core.shutdown()

    def _generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, reads_beginning_once: bool
    ) -> list[Completion]:
        from vllm import SamplingParams

        # What was cached before may carry noise, or come from other weights.
        if reads_beginning_once and not self._llm.reset_prefix_cache():
            raise ModelError("vLLM did not empty its prefix cache, though no request is under way")
        first, stop_text = sampling.first_row, sampling.stop_text
        extra = None if stop_text is None else {STOP_TEXT: stop_text, END_TOKEN: self._end_token}
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_response_tokens,
                temperature=0.0 if sampling.temperature is None else sampling.temperature,
                seed=None if sampling.temperature is None else derive_seed(sampling.seed, "vllm.sampling", first + row),
                stop_token_ids=[self._end_token],
                ignore_eos=True,
                detokenize=False,
                logprobs=0 if sampling.log_probabilities else None,
                skip_reading_prefix_cache=not reads_beginning_once,
                extra_args=extra,
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
        cached = [one.num_cached_tokens for one in outputs]
        if None in cached:
            raise ReceiptError("receipt refused: vLLM does not say how many tokens of prompts it took from its cache")
        if any(cached) and not reads_beginning_once:
            raise ReceiptError(
                f"receipt refused: vLLM took {sum(cached)} tokens of prompts from its cache, where every prompt is to "
                "be read under noise of its own"
            )
        # Requests are numbered as they were queued.
        in_order = [one.outputs[0] for one in sorted(outputs, key=lambda one: int(one.request_id))]
        stop = None if stop_text is None else self._stop(stop_text)
        return [self._completion(output, stop) for output in in_order]

    def _stop(self, text: str) -> StopText:
        if text not in self._stops:
            self._stops[text] = StopText(load_tokenizer(self._folder), text)
        return self._stops[text]

    def _completion(self, output: Any, stop: StopText | None) -> Completion:
        token_ids = list(output.token_ids)
        if stop is not None and stop.is_complete(token_ids[:-1]):
            # The end token behind the text is no choice of the model's.
            del token_ids[-1]
        log_probabilities = None
        if output.logprobs is not None:
            chosen = zip(token_ids, output.logprobs[: len(token_ids)], strict=True)
            log_probabilities = [by_id[one].logprob for one, by_id in chosen]
        has_ended = token_ids[-1] == self._end_token or (stop is not None and stop.is_complete(token_ids))
        return Completion(token_ids, "stop" if has_ended else "length", log_probabilities)

    def _call(self, method: str, *args: object) -> list[Mapping[str, Any]]:
        answers: list[Mapping[str, Any]] = self._llm.collective_rpc(method, args=args)
        for answer in answers:
            if "refused" in answer:
                raise ModelError(answer["refused"])
            if "unproven" in answer:
                raise ReceiptError(answer["unproven"])
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


def _described(call: Callable[[], list[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    try:
        return call()
    except Exception as error:
        # vLLM passes on what fails in another process as a bare Exception; anything else is not about the extension.
        if type(error) is not Exception:
            raise
        reason = first_line(error)
        raise ReceiptError(f"vLLM's workers run without aqnpipe's extension ({reason[:200]})") from error
