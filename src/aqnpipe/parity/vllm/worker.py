"""Methods for vLLM's workers that record operators. Arguments and results are plain data; tensors go through files."""

from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aqnpipe.errors import AqnpipeError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.worker import NoiseExtension
from aqnpipe.models.loading import stored_tensors
from aqnpipe.parity.identity import compare_with_files
from aqnpipe.parity.recorder import Recorder, replaying
from aqnpipe.parity.sample import Sample, Score, Token, score
from aqnpipe.parity.vllm.shares import gather, shares_of_weights
from aqnpipe.parity.vllm.taps import EngineTaps
from aqnpipe.parity.vllm.tokens import GivenTokens, requests_of


class CaptureExtension(NoiseExtension):
    """Mixin for vLLM's worker; `self` is the worker."""

    def aqnpipe_compare_with_files(self: Any, folder: str) -> dict[str, Any]:
        """Return how many parameters were compared with the files in `folder`, and which differ."""
        engine = EngineModel(self.get_model())
        compared, stale = compare_with_files(engine.weights(), Path(folder), shares_of_weights(engine))
        return {"compared": compared, "stale": list(stale)}

    def aqnpipe_load_for_capture(self: Any, folder: str) -> dict[str, Any]:
        """Load the weights in `folder`, and compare every value of the model with them."""
        engine, source = EngineModel(self.get_model()), Path(folder)
        with torch.no_grad():
            engine.model.load_weights(stored_tensors(source))  # type: ignore[operator] # every vLLM model has it
        held = engine.weights()
        compared, stale = compare_with_files(held, source, shares_of_weights(engine), every_value=True)
        if stale or compared != len(held):
            wrong = stale[0] if stale else f"{len(held) - compared} of {len(held)} parameters"
            return {"receipt_error": f"vLLM's {type(engine.model).__name__} did not load {wrong} of {source.name}"}
        return {}

    def aqnpipe_begin_capture(
        self: Any,
        sequences: list[list[int]],
        num_decoded: int,
        lengths: list[int],
        replay: str | None,
        judges: bool,
    ) -> dict[str, Any]:
        """Record the first `lengths` tokens of `sequences`, the last `num_decoded` of each in decode.

        `replay`: file of values to feed to every operator.
        """
        self._aqnpipe_scores: dict[tuple[int, int], Score] = {}

        def keep(logits: Tensor, tokens: list[Token]) -> None:
            self._aqnpipe_scores |= score(logits, tokens, sequences)

        edit = None if replay is None else replaying(load_file(replay))
        self._aqnpipe_recorder = Recorder(Sample(tuple(lengths)), edit=edit, judges=judges, gather=gather)
        self._aqnpipe_given = given = GivenTokens(sequences, num_decoded)
        try:
            requests_of(self.model_runner)
            engine = EngineModel(self.get_model())
            self._aqnpipe_taps = EngineTaps(engine, given, lambda: requests_of(self.model_runner), keep)
            self._aqnpipe_taps.of(self._aqnpipe_recorder).__enter__()
        except AqnpipeError as error:
            return {"model_error": str(error)}
        return {}

    def aqnpipe_end_capture(self: Any, path: str) -> dict[str, Any]:
        """Return the facts of each operator, the scores of the tokens, and a digest of what was recorded.

        The first of tensor-parallel workers, all of which record the same, writes it to `path`.
        """
        self._aqnpipe_taps.stack.close()
        try:
            self._aqnpipe_given.check()
            # What was recorded was made in vLLM's passes, which run in inference mode.
            with torch.inference_mode():
                found = self._aqnpipe_recorder.finish()
        except AqnpipeError as error:
            return {"model_error": str(error)}
        tensors = {name: tensor.clone().contiguous() for name, tensor in found.tensors.items()}
        digest = sha256()
        for name in sorted(tensors):
            digest.update(tensors[name].view(torch.uint8).numpy().tobytes())
        if not self.rank:
            save_file(tensors, path)
        attention = EngineModel(self.get_model()).layers[0].attentions[0]
        kernel = type(attention.impl).__name__
        scores = [[*place, *found_score] for place, found_score in self._aqnpipe_scores.items()]
        return {"operators": found.operators, "scores": scores, "attention": kernel, "sha256": digest.hexdigest()}
