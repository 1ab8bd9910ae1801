"""The stage measure_parity: compares the operators of the device as a counterpart with those of the study."""

from collections.abc import Callable
from pathlib import Path

from aqnpipe.artifacts.files import read_table, write_json
from aqnpipe.artifacts.parities import CaptureConfig
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.config.run import ParitySpec
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.device import resolve_device, torch_device
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.parity.capture import capture
from aqnpipe.parity.capture_file import Capture, seal
from aqnpipe.parity.compare import parity_of

_NUM_PROMPTS, _MOST_TOKENS = 32, 64
_REPLAY_BYTES = 2_000_000_000
"""Size of the second side in memory, which has the results of the first beside its own; nothing of it is written."""


def measure_parity(
    spec: ParitySpec, model_dir: Path, problems: Path, output: Path, say: Callable[[str], None] = print
) -> None:
    """Write the parity of the model in `model_dir` between the device and its counterpart, on prompts of `problems`.

    Every operator of the counterpart gets the inputs of the device. Raises ModelError for a model whose operators
    cannot be mapped.
    """
    questions = read_table(problems, ProblemTable)["question"].head(_NUM_PROMPTS)
    prompts = prompt_token_ids(questions, spec.prompt, load_tokenizer(model_dir))
    sequences = [ids[-_MOST_TOKENS:] for ids in prompts]
    target = torch_device(resolve_device(spec.device).kind)

    def captured(config: CaptureConfig, replay: Capture | None = None) -> Capture:
        model = load_model(model_dir, dtype=config.dtype, attention=config.attention, device=target)
        return seal(capture(model, model_dir, str(model_dir), sequences, config, replay))[0]

    config = CaptureConfig(dtype=spec.dtype, attention=spec.attention)
    changed = spec.counterpart.model_dump(exclude_none=True) | {"max_bytes": _REPLAY_BYTES}
    first = captured(config)
    parity = parity_of(first, captured(config.model_copy(update=changed), first))
    write_json(output, parity)
    say(f"{spec.model_role} on {spec.machine}: {parity.verdict}: {parity.summary}")
