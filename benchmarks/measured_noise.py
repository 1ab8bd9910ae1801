"""How much of a measured machine's effect on log-probabilities its measured noise has, with and without that of norms.

`OMP_NUM_THREADS=1 python benchmarks/measured_noise.py` measures bfloat16 on the built-in models, on the first 16 test
questions of the default data set, at most 32 tokens of each. It prints, per model, the root mean square change of the
tokens' log-probabilities: in bfloat16; with measured noise, `multiple: 1`, as the root mean square over seeds; and with
the second side's operators in the place of the first's, by kind (`substitution.alone` of the parity).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from smallest import parse
from torch import Tensor, nn

import aqnpipe
from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.measured_errors import with_figures
from aqnpipe.artifacts.parities import ParityFile, is_norm, is_product
from aqnpipe.cli.two_machines import make_capture
from aqnpipe.config.measured_noise import MeasuredError
from aqnpipe.config.model import ModelConfig
from aqnpipe.models.loading import load_model, source_folder
from aqnpipe.parity.capture_file import Capture, seal
from aqnpipe.parity.compare import parity_of
from aqnpipe.parity.effects import Substitutions
from parity import CONSOLE, LOW, MODELS, config_of, token_ids_of


def main() -> None:
    """Print the effects for every built-in model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    parser.add_argument("--noise-seeds", type=int, default=20, help="default: %(default)s")
    arguments = parse(parser, models=["tiny"], noise_seeds=1)
    torch.set_num_threads(1)
    for name in arguments.models:
        ids = token_ids_of(name)
        first = sealed(name, ids, None)
        model = load_model(source_folder(ModelConfig(source=name)), dtype="float32", attention="eager")
        parity = parity_of(
            first, sealed(name, ids, first), lambda sides, model=model: Substitutions(model, sides).measured()
        )
        report(name, parity, model, first.sequences, arguments.noise_seeds)


def sealed(name: str, ids: list[list[int]], replay: Capture | None) -> Capture:
    """Return the capture of a model in float32, or its replay in bfloat16."""
    config = config_of({"decode": 0, **({} if replay is None else LOW)})
    return seal(make_capture(name, config, ids, replay))[0]


def report(name: str, parity: ParityFile, model: nn.Module, sequences: list[list[int]], num_seeds: int) -> None:
    """Print the effects of one model."""
    machine = parity.log_probabilities.rms
    CONSOLE.print(f"{name}: bfloat16 {machine:.4g} nats on {parity.log_probabilities.num_tokens} tokens")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "parity.json"
        write_json(path, parity)
        both = with_figures(MeasuredError(source=str(path)))
    products = {place: one for place, one in (both.figures or {}).items() if not is_norm(place.rpartition(".")[2])}
    for title, figures in (("linear modules and attention", products), ("these and norms", both.figures)):
        effect = noise_effect(model, both.model_copy(update={"figures": figures}), sequences, num_seeds)
        CONSOLE.print(f"  measured noise on {title}: {effect:.4g} nats, {effect / machine:.2f} of it")
    if parity.substitution is None:
        raise RuntimeError("nothing was substituted")
    squares: dict[str, float] = {}
    for row in parity.substitution.alone:
        kind = row.kinds[0]
        group = "linear modules and attention" if is_product(kind) else "norms" if is_norm(kind) else kind
        squares[group] = squares.get(group, 0.0) + row.rms**2
    for group, square in sorted(squares.items(), key=lambda found: -found[1]):
        share = square / sum(squares.values())
        CONSOLE.print(f"  substituted: {group} {square**0.5:.4g} nats, {share:.0%} of the sum of squares")


def noise_effect(model: nn.Module, error: MeasuredError, sequences: list[list[int]], num_seeds: int) -> float:
    """Return the root mean square change of log-probabilities, over tokens and seeds; receipts are checked."""
    clean = torch.cat([scores(model, ids) for ids in sequences])
    squares = []
    for seed in range(num_seeds):
        with aqnpipe.noisy(model, error=error, seed=seed) as receipt:
            noised = torch.cat([scores(model, ids) for ids in sequences])
        receipt.check()
        squares.append(float((noised - clean).square().mean()))
    return (sum(squares) / len(squares)) ** 0.5


@torch.no_grad()
def scores(model: nn.Module, ids: list[int]) -> Tensor:
    """Return the log-probabilities of the tokens of a sequence but the first, in float64."""
    tokens = torch.tensor([ids])
    logits = model(input_ids=tokens).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]


if __name__ == "__main__":
    main()
