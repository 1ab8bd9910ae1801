"""`aqnpipe capture`: run fixed tokens through a model and write what every operator computed into one file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from aqnpipe.artifacts.parities import Backend, CaptureIdentity
from aqnpipe.cli.options import check_writable
from aqnpipe.cli.parity.running import Bounds, folder_of, make_capture, refuse_unused, token_ids, validated
from aqnpipe.cli.terminal import given_options
from aqnpipe.config.base import MOST_THREADS
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.errors import ConfigError


def capture(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="model: a folder, a hub id, or `tiny`")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write, such as gpu.capture")],
    data: Annotated[
        Path | None,
        typer.Option(help="text, a sequence per line, or .json with lists of token ids; default: random ids"),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(help="capture of the other side: also feed its values to every operator here; sets the token ids"),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="number of sequences, at most")] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="tokens per sequence, at most")] = 32,
    decode: Annotated[int, typer.Option(min=0, help="last tokens of each sequence, run one at a time")] = 4,
    batch_size: Annotated[int, typer.Option(min=1, help="sequences per batch")] = 8,
    padding: Annotated[Literal["left", "right"], typer.Option(help="side of the padding")] = "left",
    backend: Annotated[Backend, typer.Option(help="what runs the model")] = "transformers",
    dtype: Annotated[Dtype, typer.Option(help="number format of the computation")] = "float32",
    attention: Annotated[Attention, typer.Option(help="attention kernel")] = "eager",
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1, npu, ...")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads")] = 1,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="workers of vLLM that share every layer, each on a separate device")
    ] = 1,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(help="vLLM's batch-invariant mode; default: its environment variable VLLM_BATCH_INVARIANT"),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="tokens whose operators are recorded, at most")] = 256,
    max_megabytes: Annotated[int, typer.Option(min=1, help="size of the file, at most")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="seed of random token ids")] = 0,
) -> None:
    """Run fixed tokens through one configuration of a model and write what every operator computed into one file.

    `aqnpipe parity` compares two such files. They name no folders or hosts, so they can be sent to another site.
    """
    from aqnpipe.cli.terminal import console_of
    from aqnpipe.parity.capture_file import read_capture, write_capture

    given = given_options(context)
    check_writable("--output", output)
    refuse_unused(f"--backend {backend}", backend, given)
    side = validated(
        "capture",
        {"backend": backend, "dtype": dtype, "attention": attention, "device": device, "batch_size": batch_size}
        | {"padding": padding, "decode": decode, "threads": threads}
        | {"tensor_parallel": tensor_parallel, "batch_invariant": batch_invariant},
    )
    bounds = Bounds(max_megabytes, rows)
    other = None if replay is None else read_capture(replay)
    if other is None:
        ids = token_ids(data, folder_of(model), sequences, tokens, seed)
    else:
        _refuse_token_options(given)
        _refuse_other_model(model, other.identity)
        ids = other.sequences
    with console_of(stderr=True).status("capturing"):
        found = write_capture(output, make_capture(model, side, ids, bounds, other))
    identity = found.identity
    typer.echo(
        f"{identity.model}, {identity.setting}: {len(found.operators)} operators on {found.sample.num_rows} of "
        f"{identity.num_tokens} tokens, {identity.num_compared_parameters} parameters compared with the files, "
        f"{identity.seconds:.1f} s"
    )
    if identity.stale_parameters:
        typer.echo(f"stale weights: {', '.join(identity.stale_parameters[:3])} are not those of the files", err=True)
    typer.echo(f"written: {output} ({output.stat().st_size / 1e6:.1f} MB)")


def _refuse_token_options(given: Sequence[str]) -> None:
    for name in given:
        if name in ("data", "sequences", "tokens", "seed", "rows"):
            raise ConfigError(
                f"--{name}: found beside --replay, whose capture sets the token ids; expected one of the two"
            )


def _refuse_other_model(model: str, identity: CaptureIdentity) -> None:
    """Raise ConfigError before any work if the model is not the one of the replayed capture."""
    from aqnpipe.parity.identity import model_facts

    facts = model_facts(folder_of(model), model)
    for name, what in (("weights_sha256", "weights"), ("tokenizer_sha256", "tokenizer")):
        if facts[name] != getattr(identity, name):
            raise ConfigError(
                f"--replay: its {what} have SHA-256 {str(getattr(identity, name))[:12]} ({identity.model}), those of "
                f"{model} {str(facts[name])[:12]}; expected the same model"
            )
