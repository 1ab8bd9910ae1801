"""Apply noise, AQN and the diagnosis to a tiny random model of every decoder family, and write docs/architectures.md.

OMP_NUM_THREADS=1 python benchmarks/architectures.py

With --check the page is not written; exit code 1 if it differs. Exit code 1 also if a family is neither refused in one
line nor at its share. Any other exception is a bug and ends the command with a traceback.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from decoder_families import FAMILIES, tiny_model_of
from noised_products import ProductCount
from smallest import parse
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from aqnpipe.config.arm import Arm
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.model import Attention
from aqnpipe.config.noise import (
    AdaptiveNoise,
    ConstantSigma,
    ModuleNoise,
    NoiseSpec,
    OperatorNoise,
    RelativeGaussian,
)
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.errors import AqnpipeError, ReceiptError
from aqnpipe.generation.backend import Sampling
from aqnpipe.generation.noisy_passes import PassNoise, TransformersPasses, pass_receipt
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers
from aqnpipe.models.loading import load_model
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.noise.receipts.recorder import ReceiptRecorder

PAGE = Path(__file__).parents[1] / "docs" / "architectures.md"
_LONGEST = 200
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ERROR = RelativeGaussian(scale=0.05)
KEY = NoiseKey(seed=0, step=0)
ARMS: dict[str, tuple[Arm, Attention]] = {
    "matmul": (Arm(description="", operator_noise=OperatorNoise(error=ERROR)), "eager"),
    "all": (Arm(description="", operator_noise=OperatorNoise(error=ERROR, operators="all")), "eager"),
    "matmul, sdpa": (Arm(description="", operator_noise=OperatorNoise(error=ERROR, attention="fused")), "sdpa"),
}
OTHERS: dict[str, Arm] = {
    "AQN": Arm(description="", aqn=AdaptiveNoise(schedule=ConstantSigma(sigma=0.05))),
    "module noise": Arm(description="", module_noise=ModuleNoise(modules="linear", error=ERROR)),
}
"""Operands with a gradient by operator; the others have 2."""


@dataclass
class Row:
    """One family: the text of each column, and the line of each refusal, by column."""

    family: str
    model: str
    cells: dict[str, str] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def measured(family: str) -> Row:
    """Try everything on one family."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny = tiny_model_of(family)
        tiny.save_pretrained(folder)
        row = Row(family, type(tiny).__name__)

        def attempt(column: str, attention: Attention, measure: Callable[[PreTrainedModel], str]) -> None:
            try:
                row.cells[column] = measure(load_model(folder, dtype="float32", attention=attention))
            except AqnpipeError as error:
                row.cells[column] = "unsupported"
                row.refusals[column] = str(error).replace(str(folder), family)

        for column, (arm, attention) in ARMS.items():
            attempt(column, attention, lambda model, arm=arm, column=column: _shares(model, arm, column, row))
        for column, arm in OTHERS.items():
            attempt(column, "eager", lambda model, arm=arm: _measure(model, arm))
        # With four layers or more the diagnosis can tell a probe that does not fit from a fault.
        tiny_model_of(family, doubled=True).save_pretrained(folder)
        attempt("diagnosis", "eager", _diagnosis)
    return row


def _shares(model: PreTrainedModel, arm: Arm, column: str, row: Row) -> str:
    """Return the shares of forward, decode and backward by the receipt, and in brackets by the count if they differ."""
    measure_arm(model, arm, batch=2, prompt_tokens=12).check()
    tokens = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    found = {**_forward_and_backward(model, arm, tokens), "decode": _decode(model, arm, tokens)}
    texts = []
    for name in ("forward", "decode", "backward"):
        receipt, count = (f"{share:.3f}" for share in found[name])
        texts.append(receipt if receipt == count else f"{receipt} ({count})")
        if receipt != "1.000" or (count != receipt and arm.operator_noise.attention != "fused"):
            row.failures.append(f"{row.family}, {column}, {name}: the receipt gives {receipt}, the count {count}")
    return texts[0] if len(set(texts)) == 1 else ", ".join(texts)


def _recorder(model: PreTrainedModel, spec: NoiseSpec, *phases: Any) -> ReceiptRecorder:
    return ReceiptRecorder(spec, expected_phases=phases, num_layers=len(decoder_layers(model)), num_norms=0)


def _forward_and_backward(model: PreTrainedModel, arm: Arm, tokens: Tensor) -> dict[str, tuple[float, float]]:
    spec = NoiseSpec(operator_noise=arm.operator_noise)
    recorder = _recorder(model, spec, "actor_forward", "backward")
    with ProductCount() as count:
        count.section = "forward"
        with phase_noise(model, spec, "actor_forward", KEY, recorder, backward=True):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            count.section = "backward"
            loss.backward()
    model.zero_grad(set_to_none=True)
    receipt = recorder.receipt()
    return {
        "forward": (_share_of(receipt), count.share("forward")),
        "backward": (_share_of_gradients(receipt), count.share("backward")),
    }


def _share_of(receipt: Receipt) -> float:
    return next(record.noised_share for record in receipt.phases if record.passes) or 0.0


def _share_of_gradients(receipt: Receipt) -> float:
    """Return the share of the products of the backward pass that have noise."""
    record = next(record for record in receipt.phases if record.phase == "backward")
    return record.calls / (record.calls + record.escaped)


def _decode(model: PreTrainedModel, arm: Arm, tokens: Tensor) -> tuple[float, float]:
    """Return the shares of a forward that reads one token: by a receipt of it alone, and counted in a generation."""
    spec = PassNoise(operator_noise=arm.operator_noise, phase="rollout")
    recorder = _recorder(model, spec, "rollout")
    with torch.no_grad():
        cache = model(input_ids=tokens, use_cache=True).past_key_values
        with phase_noise(model, spec, "rollout", KEY, recorder):
            model(input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
    with ProductCount() as count:
        handle = model.register_forward_pre_hook(
            lambda module, args, kwargs: setattr(count, "section", f"{min(kwargs['input_ids'].shape[1], 2)}"),
            with_kwargs=True,
        )
        _generate(model, spec)
        handle.remove()
    if count.share("2") < 0.9995 and arm.operator_noise.attention != "fused":
        raise ReceiptError(f"reading prompts: {count.share('2'):.3f} of the operations have noise")
    return _share_of(recorder.receipt()), count.share("1")


def _generate(model: PreTrainedModel, noise: PassNoise) -> None:
    """Generate under `noise` with prompts of several lengths; raises ReceiptError if the receipt is refused."""
    passes = TransformersPasses(model, SimpleNamespace(eos_token_id=2, pad_token_id=0))
    passes.begin_pass(noise)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (length,), generator=generator).tolist() for length in (12, 9, 12, 7)]
    passes.generate(prompts, Sampling(temperature=None, max_response_tokens=3), KEY)
    pass_receipt(noise, [passes.end_pass()]).check()


def _measure(model: PreTrainedModel, arm: Arm) -> str:
    receipt = measure_arm(model, arm, batch=2, prompt_tokens=12).check()
    if arm.aqn is not None:
        return f"{receipt.weight_syncs[0].targets} norms"
    return f"{receipt.num_noised_modules} modules"


def _diagnosis(model: PreTrainedModel) -> str:
    config = DiagnosisConfig(exact_repeats=2, intermittent_rate=0.05, miss_probability=0.1)
    verdict = diagnose_model(model, [torch.arange(3, 15)], config, method="exact").verdict
    # Norms that ran with one mean square only are one entry: their names would fill the table.
    parts = (re.sub(r"^.+(?= outside a mean square of )", "norms", gap.part) for gap in verdict.untested if gap.layers)
    sites = dict.fromkeys(parts)
    uncovered = f", without {', '.join(sites)}" if sites else ""
    return {"abstain": "abstains", "healthy": f"works{uncovered}", "fault": "wrong"}[verdict.verdict]


COLUMNS = [*ARMS, *OTHERS, "diagnosis"]


def line_of(row: Row) -> str:
    """Return the table row of a family."""
    return f"| {row.family} | {row.model} | {' | '.join(row.cells[column] for column in COLUMNS)} |"


def shortened(text: str) -> str:
    """Return a message that fits a table."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def refusal_lines(row: Row) -> list[str]:
    """Return a table row for each different refusal of a family."""
    columns_of: dict[str, list[str]] = {}
    for column, text in row.refusals.items():
        columns_of.setdefault(shortened(text), []).append(column)
    return [
        f"| {row.family} | {'every column' if len(columns) == len(COLUMNS) else '; '.join(columns)} | {text} |"
        for text, columns in columns_of.items()
    ]


Lines = dict[str, list[str]]
"""Lines of the page by family: its row first, then its refusals."""


def table_of(lines: Lines) -> str:
    """Return counts, the table of families and the table of refusals as Markdown."""
    columns = list(zip(*(found[0].strip("| ").split(" | ")[2:] for found in lines.values()), strict=True))
    without = [cells.count("unsupported") for cells in columns]
    counts = [f"{name}: {len(lines) - number}" for name, number in zip(COLUMNS, without, strict=True)]
    header = ["family", "model", *COLUMNS]
    return "\n".join(
        [
            f"{len(lines)} families. Supported: {'; '.join(counts)}.",
            "",
            f"| {' | '.join(header)} |",
            "|" + "---|" * len(header),
            *(found[0] for found in lines.values()),
            "",
            "## What is not supported",
            "",
            "| family | column | line |",
            "|---|---|---|",
            *(line for found in lines.values() for line in found[1:]),
        ]
    )


def lines_of_page() -> Lines:
    """Return the lines that the page has now."""
    table = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()
    found = {family: [line for line in table if line.startswith(f"| {family} | ")] for family in FAMILIES}
    return {family: lines for family, lines in found.items() if lines}


def page_with(lines: Lines) -> str:
    """Return the page with these lines in place of its own, in the order of the families."""
    page = PAGE.read_text(encoding="utf-8")
    ordered = {family: lines[family] for family in FAMILIES if family in lines}
    return f"{page.split(BEGIN)[0]}{BEGIN}\n{table_of(ordered)}\n{END}{page.split(END)[1]}"


def rows_of(families: Iterable[str], show: Callable[[str], object] = lambda line: None) -> list[Row]:
    """Return the rows of some families."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    rows = []
    for family in families:
        rows.append(measured(family))
        show(f"{line_of(rows[-1])}\n")
    return rows


def main() -> int:
    """Measure all families and write or check the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="families to measure again (default: all)")
    parser.add_argument("--check", action="store_true", help="compare with the page in place of writing it")
    arguments = parse(parser, families=["llama"], check=True)
    unknown = set(arguments.families) - FAMILIES.keys()
    if unknown:
        parser.error(f"unknown families {', '.join(sorted(unknown))}, expected some of {', '.join(FAMILIES)}")
    rows = rows_of(arguments.families or FAMILIES, sys.stdout.write)
    kept = lines_of_page() if arguments.families else {}
    page = page_with(kept | {row.family: [line_of(row), *refusal_lines(row)] for row in rows})
    failures = [failure for row in rows for failure in row.failures]
    if arguments.check and page != PAGE.read_text(encoding="utf-8"):
        failures.append(f"{PAGE.name} is not current: run the command without --check")
    elif not arguments.check:
        PAGE.write_text(page, encoding="utf-8")
    for failure in failures:
        sys.stdout.write(f"{failure}\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
