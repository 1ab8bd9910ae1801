"""Detection of the faults that a study simulates: all combinations of type, site, sparsity and magnitude.

The faults of real machines are those of detection.py; this one shows what the diagnosis says of simulated faults (type,
magnitude, channels) and what the statistical scans find.

`OMP_NUM_THREADS=1 python benchmarks/detection_simulated.py` runs everything (its time is not measured) and writes
detection_simulated_faults.csv, detection_simulated_healthy.csv, detection_simulated.md and detection_simulated_roc.svg
to the folder of this file. Faults run in random order, so that an interrupted run is a sample of all combinations; it
resumes where it stopped. `--summarise` rewrites the page and the picture from the CSV files, also of such a sample.

Models, layers and mask seeds alternate. The models are the trained tiny model and small random models of four
architectures in three dtypes. A fault counts as observable, independently of any probe, if it changes a bit of the
logits on the prompts of the model.
"""

import argparse
import csv
import itertools
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import polars as pl
import torch
import torch.nn.functional as F
from detection import commit
from machine_faults.page import commits
from scipy import stats
from smallest import parse
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from aqnpipe.config.dataset import GeneratedDataset, PromptFormat
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.config.model import builtin_folder
from aqnpipe.config.noise import Fault
from aqnpipe.data.loader import load_problems
from aqnpipe.data.prompts import prompt_token_ids
from aqnpipe.diagnosis.exact_probes import ExactResult, run_exact
from aqnpipe.diagnosis.scans import run_scans
from aqnpipe.models.layout import decoder_layers, layer_sites, site_module
from aqnpipe.models.loading import load_model, load_tokenizer
from aqnpipe.noise.injection.faults import SPIKE_PROBABILITY, faulty_channels, simulated_faults
from aqnpipe.seeding import derive_seed

FOLDER = Path(__file__).parent
TYPES = ("dead_zone", "saturation", "noise", "bias", "spike")
SPARSITIES = {"100 %": 1.0, "10 %": 0.1, "1 %": 0.01, "0.1 %": 0.001, "one channel": 1e-9}
MAGNITUDES = (0.3, 0.03, 0.001, 0.00001)
SCANNED_SITES = ("layer_output", "attention_output", "mlp_output")
"""Sites at which scans are evaluated. Scans use layer outputs; only exact probes can detect faults deeper inside."""

CONFIG = DiagnosisConfig()
VOCABULARY = 100

ARCHITECTURES: Mapping[str, tuple[Any, Any]] = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
}
FAULT_MODELS = (
    ("tiny", "float32"),
    ("qwen2", "float32"),
    ("llama", "bfloat16"),
    ("qwen3", "float16"),
    ("gemma2", "bfloat16"),
    ("qwen3", "float32"),
)
HEALTHY_MODELS = tuple(itertools.product(ARCHITECTURES, ("float32", "bfloat16", "float16")))


@dataclass(frozen=True)
class Subject:
    """A model and its prompts [tokens]."""

    model: nn.Module
    prompt_ids: list[Tensor]


@cache
def subject(name: str, dtype: str, seed: int = 0) -> Subject:
    """Return the trained tiny model with word problems, or a random one (4 layers, 96 channels) with random tokens."""
    if name == "tiny":
        folder = builtin_folder("tiny")
        questions = load_problems(GeneratedDataset(num_train=CONFIG.num_prompts), "train")["question"].to_list()
        ids = prompt_token_ids(questions, PromptFormat(), load_tokenizer(folder))
        model = load_model(folder, dtype=dtype, attention="eager")  # type: ignore[arg-type]
        return Subject(model, [torch.tensor(tokens) for tokens in ids])
    make_config, make_model = ARCHITECTURES[name]
    torch.manual_seed(derive_seed(seed, "benchmark.model"))
    config = make_config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        attn_implementation="eager",
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    model = make_model(config).to(getattr(torch, dtype)).eval()
    return Subject(model, list(torch.randint(0, VOCABULARY, (CONFIG.num_prompts, 40))))


def cells() -> Iterator[tuple[str, str, str, float]]:
    """Yield (type, site, sparsity name, magnitude) for all combinations, with the sites of all architectures."""
    sites = {site: None for name, dtype in FAULT_MODELS for site in sites_of(name, dtype)}
    yield from itertools.product(TYPES, sites, SPARSITIES, MAGNITUDES)


def sites_of(name: str, dtype: str) -> list[str]:
    """Return the names of the sites of a layer of a model."""
    return list(layer_sites(decoder_layers(subject(name, dtype).model)[0]).modules)


@torch.no_grad()
def logits_and_loss(of: Subject) -> tuple[list[Tensor], float]:
    """Return the logits of every prompt and the mean next-token loss in nats."""
    logits = [of.model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0] for ids in of.prompt_ids]
    losses = [F.cross_entropy(rows[:-1].float(), ids[1:]) for rows, ids in zip(logits, of.prompt_ids, strict=True)]
    return logits, float(torch.stack(losses).mean())


def fault_row(number: int, kind: str, site: str, sparsity: str, magnitude: float, seed: int) -> dict[str, Any]:
    """Simulate a fault in the next model and layer, diagnose it, and return the result."""
    having = [model for model in FAULT_MODELS if site in sites_of(*model)]
    name, dtype = having[(number + seed) % len(having)]
    of = subject(name, dtype)
    num_layers = len(decoder_layers(of.model))
    layer = (number // len(having) + seed) % num_layers
    fault = Fault(
        type=kind,  # type: ignore[arg-type]
        layer=layer,
        site=site,  # type: ignore[arg-type]
        magnitude=magnitude,
        sparsity=SPARSITIES[sparsity],
        seed=derive_seed(seed, "benchmark.mask", number) >> 20,
    )
    clean, clean_loss = clean_outputs(name, dtype)
    with simulated_faults(of.model, [fault]):
        faulty, faulty_loss = logits_and_loss(of)
    changed = any(not torch.equal(a, b) for a, b in zip(clean, faulty, strict=True))
    channels = true_channels(of.model, fault)
    with simulated_faults(of.model, [fault]):
        measured = measure(of, scan=site in SCANNED_SITES)
    found = measured["exact"].faults
    right = [located for located in found if (located.layer, located.site) == (layer, site)]
    return {
        "model": name,
        "dtype": dtype,
        "type": kind,
        "site": site,
        "layer": layer,
        "sparsity": sparsity,
        "magnitude": magnitude,
        "seed": seed,
        "channels": len(channels),
        "bits_change": changed,
        "loss_change": faulty_loss - clean_loss,
        "placed": bool(right),
        "elsewhere": len(found) - len(right),
        "type_right": bool(right) and right[0].type == kind,
        "channels_right": bool(right) and set(right[0].faulty_channel_indices) == channels,
        "magnitude_found": right[0].magnitude if right else None,
        "threshold_found": right[0].threshold if right else None,
        "chance_to_see": chance_to_see(fault, len(channels), measured["exact"]),
        **measured["scores"],
        **measured["costs"],
    }


@cache
def clean_outputs(name: str, dtype: str) -> tuple[list[Tensor], float]:
    """Return the logits and the loss of the healthy model."""
    return logits_and_loss(subject(name, dtype))


def true_channels(model: nn.Module, fault: Fault) -> set[int]:
    """Return the faulty channels of a fault, given the width of its site in a clean forward."""
    width: list[int] = []

    def look(module: nn.Module, args: Any, output: Any) -> None:
        width.append((output[0] if isinstance(output, tuple) else output).shape[-1])

    handle = site_module(model, fault.layer, fault.site).register_forward_hook(look)
    try:
        model(input_ids=torch.tensor([[1]]), use_cache=False)
    finally:
        handle.remove()
    return set(faulty_channels(width[0], fault.sparsity, fault.seed).nonzero().flatten().tolist())


def chance_to_see(fault: Fault, num_channels: int, exact: ExactResult) -> float:
    """Return the probability that the fault occurs during the exact probes; 1 for permanent faults."""
    if fault.type != "spike":
        return 1.0
    seen = sum(
        check.elements_per_channel
        for check in exact.checks
        if (check.layer, check.site) == (fault.layer, fault.site) and check.probe != "monomial"
    )
    return float(1 - (1 - SPIKE_PROBABILITY * fault.magnitude) ** (seen * num_channels))


def measure(of: Subject, *, scan: bool = True) -> dict[str, Any]:
    """Return the exact result, a score per method and the costs; None without scans."""
    started = time.perf_counter()
    exact = run_exact(of.model, CONFIG)
    between = time.perf_counter()
    scans = run_scans(of.model, of.prompt_ids, CONFIG) if scan else None
    ended = time.perf_counter()
    return {
        "exact": exact,
        "scores": {
            "score_exact": float(sum(fault.num_faulty_channels or 0 for fault in exact.faults)),
            **(scan_scores(scans[0]) if scans else dict.fromkeys(SCAN_SCORES)),
        },
        "costs": {
            "exact_forwards": exact.forward_equivalents,
            "scan_forwards": scans[2] if scans else None,
            "exact_seconds": between - started,
            "scan_seconds": ended - between if scans else None,
        },
    }


SCAN_SCORES = tuple(f"score_{name}" for name in ("ambient", "gain", "kurtosis", "kurtosis_both"))


def scan_scores(table: pl.DataFrame) -> dict[str, float]:
    """Return a score per scan, its maximum over layers; higher is more suspicious."""
    drops = table["log_kurtosis_drop_z"].drop_nulls()
    return {
        "score_ambient": float(np.max(table["instability_jump_z"].to_numpy())),
        "score_gain": float(np.max(-table["gain_z"].to_numpy())),
        "score_kurtosis": float(np.max(-drops.to_numpy())),
        "score_kurtosis_both": float(np.max(np.abs(drops.to_numpy()))),
    }


def healthy_row(name: str, dtype: str, seed: int) -> dict[str, Any]:
    """Diagnose a healthy model and return the result."""
    measured = measure(subject.__wrapped__(name, dtype, seed))
    return {
        "model": name,
        "dtype": dtype,
        "seed": seed,
        "exact_faults": len(measured["exact"].faults),
        **measured["scores"],
        **measured["costs"],
    }


Task = partial[dict[str, Any]]


def append_rows(path: Path, tasks: Sequence[Task], jobs: int) -> None:
    """Run the tasks without a row in `path` in `jobs` processes, and append their rows in order."""
    done = max(0, len(path.read_text().splitlines()) - 1) if path.exists() else 0
    code = commit()
    with path.open("a", newline="") as file, pool_of(jobs) as pool:
        for number, result in enumerate(pool.imap(run_task, tasks[done:]), start=done):
            row = result | {"commit": code}
            writer = csv.DictWriter(file, fieldnames=list(row))
            if number == 0:
                writer.writeheader()
            writer.writerow({key: f"{value:.6g}" if isinstance(value, float) else value for key, value in row.items()})
            file.flush()


def pool_of(jobs: int) -> Any:
    """Return processes for the tasks; one job needs no process of its own."""
    return ThreadPool(1) if jobs == 1 else get_context("spawn").Pool(jobs, torch.set_num_threads, (1,))


def run_task(task: Task) -> dict[str, Any]:
    """Run a task in a worker process."""
    return task()


def summarise(faults: pl.DataFrame, healthy: pl.DataFrame) -> str:
    """Return the content of detection_simulated.md."""
    permanent = faults.filter(pl.col("type") != "spike")
    visible = permanent.filter(pl.col("bits_change"))
    spikes = faults.filter(pl.col("type") == "spike")
    parts = [
        "# Detection of simulated faults",
        "",
        "Command: `OMP_NUM_THREADS=1 python benchmarks/detection_simulated.py`. "
        f"{faults.height} combinations of type x site x sparsity x magnitude, with models "
        "and layers in rotation, each with its own mask seed.",
        "",
        f"Faults measured at commit: {commits(faults)}. Healthy models: {commits(healthy)}. The exact probes "
        "before commit cfe814d were others, at a cost of 11 whole-model forwards. The faults of real machines are in "
        "[detection.md](detection.md).",
        "",
    ]
    alarms, machines = int((healthy["exact_faults"] > 0).sum()), healthy.height
    parts += [
        f"**Healthy models** ({machines}: {', '.join(sorted(set(healthy['model'])))}; three dtypes): exact probes "
        f"call {alarms} faulty (95 % upper bound {upper(alarms, machines):.2%}).",
        "",
        f"Healthy models with a z beyond 2 in some layer by the published scans, which do not decide: ambient "
        f"{share(healthy['score_ambient'] > 2)}, gain {share(healthy['score_gain'] > 2)}, kurtosis drop "
        f"{share(healthy['score_kurtosis'] > 2)}.",
        "",
        f"**Permanent faults** ({permanent.height}): {visible.height} change a bit of the logits on the model's "
        f"prompts. For these, exact probes find the layer and site of {share(visible['placed'])}, the type of "
        f"{share(visible['type_right'])} and exactly the faulty channels of {share(visible['channels_right'])}. "
        f"{permanent.height - visible.height} change no bit there; exact probes still find "
        f"{share(permanent.filter(~pl.col('bits_change'))['placed'])}. Faults reported at a wrong place: "
        f"{int(faults['elsewhere'].sum())} in {faults.height} runs.",
        "",
        f"**Spikes** ({spikes.height}, intermittent): {int(spikes['placed'].sum())} found; "
        f"{spikes['chance_to_see'].sum():.1f} are expected from their probability and the number of elements. Of those "
        f"missed with a probability under 0.1 %, {share(spikes.filter(pl.col('chance_to_see') > 0.999)['placed'])} "
        "were found.",
        "",
        f"**Cost**: exact {healthy['exact_forwards'].max():.1f} whole-model forwards, scans "
        f"{healthy['scan_forwards'].max():.1f}; median {healthy['exact_seconds'].median():.2f} s and "
        f"{healthy['scan_seconds'].median():.2f} s for four layers of 96 channels on one shared core.",
        "",
        "## Layer and site found by exact probes, of the faults that change a bit of the logits",
        "",
        *_table(faults.filter(pl.col("bits_change")), "placed"),
        "",
        "## Effect on the loss (median absolute change, nats), and faults found by exact probes, by magnitude",
        "",
        *_magnitudes(faults),
        "",
        "## Area under the ROC curve: faults at the three outputs that change a bit, against healthy models",
        "",
        *_areas(faults.filter(pl.col("bits_change") & pl.col("site").is_in(SCANNED_SITES)), healthy),
        "",
        "![ROC](detection_simulated_roc.svg)",
        "",
    ]
    return "\n".join(parts)


def upper(alarms: int, machines: int) -> float:
    """Return the exact one-sided 95 % upper bound of a rate."""
    return float(stats.beta.ppf(0.95, alarms + 1, machines - alarms))


def share(flags: pl.Series) -> str:
    """Return the number of true flags as `hits of all`."""
    return f"{int(flags.sum())} of {len(flags)}"


def _table(faults: pl.DataFrame, flag: str) -> list[str]:
    lines = ["| type | site | " + " | ".join(SPARSITIES) + " |", "|---" * (2 + len(SPARSITIES)) + "|"]
    groups = {"layer output": ["layer_output"], "attention, MLP output": ["attention_output", "mlp_output"]}
    groups["linears"] = [site for site in faults["site"].unique().sort() if site.endswith("_proj")]
    groups["norms"] = [site for site in faults["site"].unique().sort() if "norm" in site]
    present = set(faults["site"])
    for kind, (group, sites) in itertools.product(TYPES, groups.items()):
        if not present & set(sites):
            continue
        chosen = faults.filter((pl.col("type") == kind) & pl.col("site").is_in(sites))
        shares = [chosen.filter(pl.col("sparsity") == name)[flag] for name in SPARSITIES]
        lines.append(f"| {kind} | {group} | " + " | ".join(f"{int(s.sum())}/{len(s)}" for s in shares) + " |")
    return lines


def _magnitudes(faults: pl.DataFrame) -> list[str]:
    lines = ["| type | " + " | ".join(f"m = {m:g}" for m in MAGNITUDES) + " |", "|---" * (1 + len(MAGNITUDES)) + "|"]
    for kind in TYPES:
        cells = []
        for magnitude in MAGNITUDES:
            rows = faults.filter((pl.col("type") == kind) & (pl.col("magnitude") == magnitude))
            change = rows["loss_change"].abs().median()
            seen = rows.filter(pl.col("bits_change"))["placed"]
            cells.append("not run" if rows.is_empty() else f"{change:.1e}; {share(seen)}")
        lines.append(f"| {kind} | " + " | ".join(cells) + " |")
    return lines


def roc(positive: np.ndarray, negative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the false and true positive rates over all thresholds, from (0, 0) to (1, 1)."""
    thresholds = np.unique(np.concatenate([positive, negative]))[::-1]
    false = np.array([0.0, *((negative >= t).mean() for t in thresholds)])
    true = np.array([0.0, *((positive >= t).mean() for t in thresholds)])
    return false, true


def _areas(faults: pl.DataFrame, healthy: pl.DataFrame) -> list[str]:
    methods = [column for column in healthy.columns if column.startswith("score_")]
    lines = ["| method | all | " + " | ".join(TYPES) + " |", "|---" * (2 + len(TYPES)) + "|"]
    for method in methods:
        negative = healthy[method].to_numpy()
        areas = []
        for rows in [faults, *(faults.filter(pl.col("type") == kind) for kind in TYPES)]:
            false, true = roc(rows[method].to_numpy(), negative)
            areas.append(f"{np.trapezoid(true, false):.3f}")
        lines.append(f"| {method.removeprefix('score_').replace('_', ' ')} | " + " | ".join(areas) + " |")
    return lines


def draw_roc(faults: pl.DataFrame, healthy: pl.DataFrame, path: Path) -> None:
    """Draw one ROC curve per method over all fault types."""
    curves = []
    for method in (column for column in healthy.columns if column.startswith("score_")):
        false, true = roc(faults[method].to_numpy(), healthy[method].to_numpy())
        keep = np.unique(np.linspace(0, len(false) - 1, 120).astype(int))
        name = method.removeprefix("score_").replace("_", " ")
        curves.append(pl.DataFrame({"method": name, "false alarms": false[keep], "found": true[keep], "n": keep}))
    chart = (
        alt.Chart(pl.concat(curves))
        .mark_line()
        .encode(x="false alarms", y="found", color="method", strokeDash="method", order="n")
        .properties(
            width=360, height=360, title="Faults at outputs that change a bit of the logits, against healthy models"
        )
    )
    chart.save(str(path), format="svg")


def main() -> None:
    """Run the missing tasks and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the four files")
    parser.add_argument("--seeds", type=int, default=1, help="mask seeds per combination")
    parser.add_argument("--healthy", type=int, default=30, help="seeds per architecture and dtype")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes, each with one thread")
    parser.add_argument("--summarise", action="store_true", help="only rewrite the page and the picture")
    parser.add_argument("--cases", type=int, help="only so many faults and healthy models (default: all)")
    arguments = parse(parser, healthy=1, cases=2)
    torch.set_num_threads(1)
    if arguments.smallest:
        with tempfile.TemporaryDirectory() as folder:
            arguments.output = Path(folder)
            run_all(arguments)
            print((Path(folder) / "detection_simulated.md").read_text())  # noqa: T201
    else:
        run_all(arguments)


def run_all(arguments: argparse.Namespace) -> None:
    """Run the missing tasks and write the summary into the folder `arguments.output`."""
    faults_csv, healthy_csv = (arguments.output / f"detection_simulated_{name}.csv" for name in ("faults", "healthy"))
    if not arguments.summarise:
        seeds_and_models = itertools.product(range(arguments.healthy), HEALTHY_MODELS)
        chosen = itertools.islice(seeds_and_models, arguments.cases)
        append_rows(healthy_csv, [partial(healthy_row, *model, seed) for seed, model in chosen], arguments.jobs)
        seeds_and_cells = list(itertools.product(range(arguments.seeds), enumerate(cells())))
        random.Random(0).shuffle(seeds_and_cells)  # noqa: S311
        if arguments.cases:
            seeds_and_cells.sort(key=lambda found: found[1][1][1] not in SCANNED_SITES)
        append_rows(
            faults_csv,
            [partial(fault_row, number, *cell, seed) for seed, (number, cell) in seeds_and_cells[: arguments.cases]],
            arguments.jobs,
        )
    faults, healthy = (pl.read_csv(path, infer_schema_length=None) for path in (faults_csv, healthy_csv))
    (arguments.output / "detection_simulated.md").write_text(summarise(faults, healthy))
    scanned = faults.filter(pl.col("bits_change") & pl.col("site").is_in(SCANNED_SITES))
    draw_roc(scanned, healthy, arguments.output / "detection_simulated_roc.svg")


if __name__ == "__main__":
    main()
