"""Methods for vLLM's workers that record operators. Arguments and results are plain data; tensors go through files."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aqnpipe.errors import AqnpipeError
from aqnpipe.generation.vllm.modules import EngineModel
from aqnpipe.generation.vllm.worker import NoiseExtension
from aqnpipe.parity.capture import Replay, score_rows
from aqnpipe.parity.identity import compare_with_files
from aqnpipe.parity.recorder import Recorder
from aqnpipe.parity.sample import Sample
from aqnpipe.parity.vllm.taps import EngineTaps


class CaptureExtension(NoiseExtension):
    """Mixin for vLLM's worker; `self` is the worker."""

    def aqnpipe_compare_with_files(self: Any, folder: str) -> dict[str, Any]:
        """Return how many parameters were compared with the files in `folder`, and which differ."""
        compared, stale = compare_with_files(EngineModel(self.get_model()).weights(), Path(folder))
        return {"compared": compared, "stale": list(stale)}

    def aqnpipe_begin_capture(
        self: Any, sequences: list[list[int]], lengths: list[int], replay: str | None, judges: bool
    ) -> dict[str, Any]:
        """Record the first `lengths` tokens of `sequences`; `replay`: file of values to feed to every operator."""
        self._aqnpipe_scores: dict[tuple[int, int], tuple[float, int]] = {}

        def score(logits: Tensor, places: list[tuple[int, int]]) -> None:
            self._aqnpipe_scores |= score_rows(logits, places, sequences)

        edits = None if replay is None else Replay(load_file(replay))
        self._aqnpipe_recorder = Recorder(Sample(tuple(lengths)), edits=edits, judges=judges, keeps_full=judges)
        try:
            self._aqnpipe_taps = EngineTaps(EngineModel(self.get_model()), self._aqnpipe_recorder, sequences, score)
        except AqnpipeError as error:
            return {"model_error": str(error)}
        return {}

    def aqnpipe_end_capture(self: Any, path: str) -> dict[str, Any]:
        """Write what was recorded to `path`; return the facts of each operator and the scores of the tokens."""
        self._aqnpipe_taps.stack.close()
        try:
            # The buffers were made in vLLM's passes, which run in inference mode.
            with torch.inference_mode():
                recorded = self._aqnpipe_recorder.finish()
        except AqnpipeError as error:
            return {"model_error": str(error)}
        tensors: dict[str, Tensor] = {}
        facts = []
        for name, found in recorded.items():
            for kind in ("output", "exact", "bound", "input_rms"):
                tensors[f"{kind}/{name}"] = getattr(found, kind).clone().contiguous()
            operator = found.operator
            facts.append(
                {
                    "name": name,
                    "kind": operator.kind,
                    "layer": operator.layer,
                    "is_wide": operator.is_wide,
                    "width": found.width,
                    "is_linked": found.is_linked,
                    "tally": asdict(found.tally),
                }
            )
        save_file(tensors, path)
        attention = EngineModel(self.get_model()).layers[0].attentions[0]
        kernel = type(attention.impl).__name__
        scores = [[*place, *score] for place, score in self._aqnpipe_scores.items()]
        return {"operators": facts, "scores": scores, "attention": kernel}
