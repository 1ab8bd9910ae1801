"""The diagnosis of one device in this process."""

from pathlib import Path
from typing import TYPE_CHECKING

from aqnpipe.cli.diagnose.loading import ModelSource, load, word_problems
from aqnpipe.config.diagnosis import DiagnosisConfig, DiagnosisMethod
from aqnpipe.config.noise import Fault

if TYPE_CHECKING:
    import torch

    from aqnpipe.artifacts.diagnoses import DiagnosisFile


def diagnose_here(
    source: ModelSource,
    device: "torch.device",
    method: DiagnosisMethod,
    config: DiagnosisConfig,
    faults: tuple[Fault, ...],
    json: Path | None,
) -> "DiagnosisFile":
    """Diagnose `device`, print what was found and write it to `json` if there is one."""
    import torch

    from aqnpipe.artifacts.files import write_json
    from aqnpipe.cli.diagnose.show import show_diagnosis
    from aqnpipe.cli.terminal import console_of
    from aqnpipe.diagnosis.api import diagnose

    torch.set_num_threads(config.threads)
    console = console_of(stderr=True)
    with console.status("loading") as status:
        file = diagnose(
            load(source, device, config.seed),
            method=method,
            prompt_ids=word_problems(source, config.num_prompts, device),
            faults=faults,
            name=source.name,
            weights=None if source.random_weights else source.folder,
            show_progress=status.update,
            **config.model_dump(),
        )
    if json is not None:
        write_json(json, file)
        console.print(f"written: {json}")
    show_diagnosis(file)
    return file
