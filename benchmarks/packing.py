"""Padding that micro-batches by tokens leave on GSM8K's lengths, and what packing would gain in place of them.

Shares are of 15 rollouts of 640 sequences on 8 devices, with 4 steps of 20 sequences a device, divided as the trainer
divides them. Times are of one such step of one device, in float32 on one thread: forward and backward pass through a
layer with the sizes of Qwen2.5-1.5B. Packed, a micro-batch is one row without padding, whose positions start again at
each sequence; transformers then builds a mask that keeps sequences apart. `--questions`: a folder with GSM8K's
train.jsonl.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from ragged_batches import lengths_of
from rich.console import Console
from rich.table import Table
from smallest import parse
from torch import Tensor
from transformers import Qwen2Config, Qwen2Model

from aqnpipe.config.model import KNOWN_CONFIGS
from aqnpipe.training import micro_batches
from aqnpipe.training.micro_batches import Group, groups_by_tokens

_DEVICES, _STEPS, _ROWS, _LIMIT = 8, 4, 20, 1024
Lengths = Sequence[tuple[int, int]]


def draw(lengths: Lengths, at_limit: float, rng: np.random.Generator) -> list[list[tuple[int, int]]]:
    """Return the lengths of prompts and responses of one step, by device; five responses share a prompt."""
    found = []
    for _ in range(_DEVICES):
        prompts = [lengths[rng.integers(len(lengths))][0] for _ in range(_ROWS // 5) for _ in range(5)]
        responses = [min(lengths[rng.integers(len(lengths))][1], _LIMIT) for _ in prompts]
        found.append(
            [(prompt, _LIMIT if rng.random() < at_limit else n) for prompt, n in zip(prompts, responses, strict=True)]
        )
    return found


def groups_of(devices: Sequence[Lengths], most: int) -> list[list[Group]]:
    """Return each device's micro-batches, which have the same numbers of rows on all devices."""
    in_order = [sorted(rows, key=lambda row: (-row[1], -row[0])) for rows in devices]
    with patch.object(micro_batches, "gathered", lambda _: in_order):
        return [groups_by_tokens(*zip(*rows, strict=True), most) for rows in devices]


def padding(lengths: Lengths, at_limit: float, most: int | None, rollouts: int) -> float:
    """Return the share of computed tokens that are padding; `most` is None for padded rollouts."""
    rng, real, computed = np.random.default_rng(0), 0, 0
    for _ in range(rollouts):
        steps = [draw(lengths, at_limit, rng) for _ in range(_STEPS)]
        for device in range(_DEVICES):
            rows = [row for step in steps for row in step[device]]
            real += sum(map(sum, rows))
            computed += len(rows) * sum(map(max, zip(*rows, strict=True))) if most is None else 0
        for step in steps if most is not None else ():
            for groups in groups_of(step, most):
                computed += sum(len(group.rows) * (group.prompt + group.completion) for group in groups)
    return 1 - real / computed


def layer_of(attention: str, is_smallest: bool) -> Qwen2Model:
    """Return a layer of Qwen2.5-1.5B with random weights and a small vocabulary."""
    sizes = {**KNOWN_CONFIGS["Qwen/Qwen2.5-1.5B-Instruct"], "num_hidden_layers": 1, "vocab_size": 512}
    if is_smallest:
        sizes |= {"hidden_size": 48, "intermediate_size": 96}
    torch.manual_seed(0)
    return Qwen2Model(Qwen2Config(**sizes, attn_implementation=attention))


def by_tokens(layer: Qwen2Model, rows: Sequence[Tensor], lengths: Lengths, most: int) -> list[Tensor]:
    """Return the sum of each sequence's outputs; micro-batches by tokens, with a backward pass each."""
    found: dict[int, Tensor] = {}
    for group in groups_by_tokens(*zip(*lengths, strict=True), most):
        width = group.prompt + group.completion
        ids, mask = torch.zeros(len(group.rows), width, dtype=torch.long), torch.zeros(len(group.rows), width)
        for place, row in enumerate(group.rows):
            start = group.prompt - lengths[row][0]
            ids[place, start : start + len(rows[row])], mask[place, start : start + len(rows[row])] = rows[row], 1
        positions = (mask.cumsum(1) - 1).clamp_min(0).long()
        output = layer(ids, attention_mask=mask.long(), position_ids=positions, use_cache=False).last_hidden_state
        sums = (output * mask[..., None]).sum(1)
        sums.square().mean().backward()
        found |= dict(zip(group.rows, sums.detach(), strict=True))
    return [found[row] for row in range(len(rows))]


def packed(layer: Qwen2Model, rows: Sequence[Tensor], lengths: Lengths, most: int) -> list[Tensor]:
    """Return the sum of each sequence's outputs; rows of at most `most` tokens without padding."""
    packs: list[list[Tensor]] = [[]]
    for row in rows:
        if sum(map(len, packs[-1])) + len(row) > most:
            packs.append([])
        packs[-1].append(row)
    found: list[Tensor] = []
    for pack in packs:
        positions = torch.cat([torch.arange(len(row)) for row in pack])[None]
        output = layer(torch.cat(pack)[None], position_ids=positions, use_cache=False).last_hidden_state[0]
        sums = torch.stack([part.sum(0) for part in output.split([len(row) for row in pack])])
        sums.square().mean().backward()
        found += list(sums.detach())
    return found


def main() -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="folder with GSM8K as train.jsonl")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per micro-batch (default: 2048)")
    parser.add_argument("--rollouts", type=int, default=15, help="simulated batches of rollouts (default: 15)")
    parser.add_argument("--repeats", type=int, default=3, help="of every time (default: 3)")
    parser.add_argument("--attention", nargs="+", default=["sdpa", "eager"], help="(default: sdpa and eager)")
    options = parse(parser, rollouts=1, repeats=1)
    torch.set_num_threads(1)
    console = Console(width=110)
    answers, longer = lengths_of(options.questions, 1.0), lengths_of(options.questions, 1.7)
    shares = Table("share of padding", "answers as they are", "1.7 times", "1.7 times, 1 % at the limit")
    for most in (None, options.tokens, 2 * options.tokens):
        found = [padding(*drawn, most, options.rollouts) for drawn in ((answers, 0.0), (longer, 0.0), (longer, 0.01))]
        name = "padded" if most is None else f"by {most:,} tokens"
        shares.add_row(name, *(f"{share:.1%}" for share in found))
    console.print(shares)
    rng = np.random.default_rng(0)
    lengths = draw(longer, 0.0, rng)[0]
    rows = [torch.from_numpy(rng.integers(0, 512, sum(pair))) for pair in lengths]
    times = Table("attention", "by tokens, s", "packed, s", "ratio", "largest difference of an output")
    for attention in options.attention:
        layer, seconds, outputs = layer_of(attention, options.smallest), {}, {}
        for way in (by_tokens, packed) * options.repeats:
            layer.zero_grad()
            started = time.process_time()
            outputs[way] = torch.stack(way(layer, rows, lengths, options.tokens))
            seconds.setdefault(way, []).append(time.process_time() - started)
        padded, dense = (float(np.median(seconds[way])) for way in (by_tokens, packed))
        difference = float((outputs[by_tokens] - outputs[packed]).abs().max() / outputs[packed].abs().max())
        times.add_row(attention, f"{padded:.2f}", f"{dense:.2f}", f"{padded / dense:.2f}", f"{difference:.1e}")
    console.print(f"One step: {len(rows)} sequences, {sum(map(len, rows)):,} tokens.")
    console.print(times)


if __name__ == "__main__":
    main()
