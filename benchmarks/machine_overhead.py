"""Cost of a noisy machine (`aqnpipe.noisy`) on one CPU thread, audits included, as ratios measured alternately.

    OMP_NUM_THREADS=1 python benchmarks/machine_overhead.py

A model of width 128 with 6 layers and eager attention, with random weights. Prints, for training steps and generations,
the CPU time with 5 % noise relative to the same without noise: the median of the rounds, in which mostly nothing is
audited, and the ratio of the sums, with all audits. The first rounds are audited more than later ones.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from smallest import parse
from transformers import AutoModelForCausalLM, Qwen2Config

import aqnpipe

ROUNDS = 100


def seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    started = time.process_time()
    work()
    return time.process_time() - started


def main() -> None:
    """Measure and print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parse(options, rounds=2).rounds
    torch.set_num_threads(1)
    config = Qwen2Config(
        vocab_size=100,
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)

    def step(rows: int, length: int) -> None:
        ids = torch.randint(5, 100, (rows, length), generator=generator)
        model.train()
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    def generate(rows: int) -> None:
        ids = torch.randint(5, 100, (rows, 24), generator=generator)
        with torch.no_grad():
            model.eval().generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False, pad_token_id=0)

    works: dict[str, tuple[Callable[[], None], bool]] = {
        "training step, 8 x 24 tokens": (lambda: step(8, 24), True),
        "training step, 32 x 64 tokens": (lambda: step(32, 64), True),
        "generation, batch 8": (lambda: generate(8), False),
        "generation, batch 1": (lambda: generate(1), False),
    }
    console = Console(highlight=False, width=200)
    console.print("| what | median of rounds | ratio of sums, with audits |\n|---|---|---|")
    for name, (work, backward) in works.items():
        receipt = None
        clean, noisy = [], []
        work()
        for _ in range(rounds):
            clean.append(seconds(work))
            with aqnpipe.noisy(model, scale=0.05, backward=backward, receipt=receipt) as receipt:
                noisy.append(seconds(work))
        receipt.check()
        ratios = [after / before for before, after in zip(clean, noisy, strict=True)]
        console.print(f"| {name} | {statistics.median(ratios):.2f} | {sum(noisy) / sum(clean):.2f} |")


if __name__ == "__main__":
    main()
