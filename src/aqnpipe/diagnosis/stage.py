"""The stages srdd_diagnose and generate_layer_sigmas: files in, files out."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from aqnpipe.artifacts import (
    LayerTable,
    ProblemTable,
    Verdict,
    read_json,
    read_table,
    write_json,
    write_table,
    write_yaml,
)
from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig, SigmaRule
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.config.noise import Machine
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.diagnosis.scans import run_scans
from aqnpipe.diagnosis.sigmas import layer_sigmas
from aqnpipe.diagnosis.verdict import judge
from aqnpipe.errors import DataError, ReceiptError
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.faults import FaultRecord, simulated_fault

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYERS_FILE = "layers.parquet"
VERDICT_FILE = "verdict.json"


def diagnose(
    model_dir: Path,
    problems: Path,
    prompt: PromptFormat,
    machine: Machine,
    config: DiagnosisConfig,
    output_dir: Path,
    *,
    dtype: Dtype = "float32",
    attention: Attention = "eager",
    device: str = "cpu",
) -> None:
    """Scan the model on `machine` with the first num_prompts questions; write layers.parquet and verdict.json.

    Each file is written whole or not at all. Raises DataError if there are too few questions, ModelError if the fault's
    layer does not exist or a layer puts out no numbers, ReceiptError if a simulated fault changed nothing.
    """
    torch.set_num_threads(config.threads)
    tokenizer = load_tokenizer(model_dir)
    prompt_ids = [ids.to(device) for ids in read_prompts(problems, prompt, tokenizer, config.num_prompts)]
    model = load_model(model_dir, dtype=dtype, attention=attention, device=device)
    with simulated_fault(model, machine.fault) if machine.fault else nullcontext() as record:
        table, findings, forward_equivalents = run_scans(model, prompt_ids, config)
    verdict = judge(table, findings, forward_equivalents, describe_fault(record) if record else None)
    write_table(output_dir / LAYERS_FILE, table, LayerTable)
    write_json(output_dir / VERDICT_FILE, verdict)


def generate_layer_sigmas(
    layers: Path,
    verdict: Path,
    rule: SigmaRule,
    output: Path,
    model: str,
    machine: str,
    schedule_kind: str = "epoch_aware",
) -> None:
    """Turn a diagnosis into sigmas.yaml; DataError if the two files are not of one diagnosis.

    The published rule works on the metrics alone; the verdict is recorded beside them.
    """
    table = read_table(layers, LayerTable)
    judged = read_json(verdict, Verdict)
    if judged.num_layers != table.height:
        raise DataError(f"{verdict}: num_layers is {judged.num_layers}, but {layers} has {table.height} rows")
    metadata: dict[str, int | float | str] = {"model": model, "machine": machine, "verdict": judged.verdict}
    if judged.layer is not None and judged.type is not None:
        metadata |= {"fault_layer": judged.layer, "fault_type": judged.type}
    write_yaml(output, layer_sigmas(table, rule, schedule_kind, metadata=metadata))


def read_prompts(
    problems: Path, prompt: PromptFormat, tokenizer: "PreTrainedTokenizerBase", num_prompts: int
) -> list[Tensor]:
    """Return the token ids [tokens] of the first questions of a ProblemTable; DataError if it has fewer."""
    questions = read_table(problems, ProblemTable)["question"].head(num_prompts).to_list()
    if len(questions) < num_prompts:
        raise DataError(f"{problems}: {len(questions)} questions, expected at least num_prompts = {num_prompts}")
    return [torch.tensor(ids) for ids in prompt_token_ids(questions, prompt, tokenizer)]


def describe_fault(record: FaultRecord) -> dict[str, object]:
    """Return the simulated fault with its measured reach; ReceiptError if it changed nothing."""
    fault = record.fault
    if not record.affected_elements:
        raise ReceiptError(
            f"simulated {fault.type} in layer {fault.layer} changed none of {record.elements} values in "
            f"{record.calls} calls, expected some: raise magnitude ({fault.magnitude}) or sparsity ({fault.sparsity})"
        )
    return {
        **fault.model_dump(mode="json"),
        "faulty_channels": record.num_faulty_channels,
        "elements": record.elements,
        "affected_elements": record.affected_elements,
    }
