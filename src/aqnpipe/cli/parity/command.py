"""`aqnpipe capture`: what every operator of a model computed, in a file; `aqnpipe parity`: two of them, compared."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from aqnpipe.artifacts.parities import WITHIN_ROUNDING, Backend, CaptureIdentity
from aqnpipe.cli.options import check_writable, console_of, find_model, given_options, load
from aqnpipe.cli.parity.running import folder_of, make_capture, parse_side, refuse_unused, token_ids, validated
from aqnpipe.config.base import MOST_THREADS
from aqnpipe.config.model import Attention, Dtype
from aqnpipe.errors import ConfigError

if TYPE_CHECKING:
    from aqnpipe.artifacts.parities import Substitution
    from aqnpipe.parity.capture_file import Capture
    from aqnpipe.parity.compare import Sides


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
    from aqnpipe.parity.capture_file import read_capture, write_capture

    given = given_options(context)
    check_writable("--output", output)
    refuse_unused(f"--backend {backend}", backend, given)
    side = validated(
        "capture",
        {"backend": backend, "dtype": dtype, "attention": attention, "device": device, "batch_size": batch_size}
        | {"padding": padding, "decode": decode, "threads": threads}
        | {"tensor_parallel": tensor_parallel, "batch_invariant": batch_invariant}
        | {"max_bytes": max_megabytes * 1_000_000, "max_rows": rows},
    )
    other = None if replay is None else read_capture(replay)
    if other is None:
        ids = token_ids(data, folder_of(model), sequences, tokens, seed)
    else:
        _refuse_token_options(given)
        _refuse_other_model("capture", model, other.identity)
        ids = other.sequences
    with console_of(stderr=True).status("capturing"):
        found = write_capture(output, make_capture(model, side, ids, other))
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


def _refuse_other_model(option: str, model: str, identity: CaptureIdentity) -> None:
    """Raise ConfigError before any work if the model is not the one of a capture."""
    from aqnpipe.parity.capture import model_facts

    facts = model_facts(folder_of(model), model)
    for name, what in (("weights_sha256", "weights"), ("tokenizer_sha256", "tokenizer")):
        if facts[name] != getattr(identity, name):
            raise ConfigError(
                f"{option} {model}: its {what} have SHA-256 {str(facts[name])[:12]}, those of the capture "
                f"{str(getattr(identity, name))[:12]} ({identity.model}); expected the same model"
            )


EXIT_BEYOND_ROUNDING = 3
_LIVE = "Without files"


def parity(
    context: typer.Context,
    captures: Annotated[list[Path] | None, typer.Argument(help="two files of `aqnpipe capture`")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="the model of the captures: puts operators in each other's place, to explain log-probabilities"
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with a picture over depth to this file")] = None,
    threads: Annotated[int, typer.Option(min=1, max=MOST_THREADS, help="CPU threads")] = 1,
    first: Annotated[
        str | None,
        typer.Option(
            help="first configuration of --model: key=value pairs with commas between them, keys backend, dtype, "
            "attention, device, batch_size, padding, decode, threads, tensor_parallel, batch_invariant",
            rich_help_panel=_LIVE,
        ),
    ] = None,
    second: Annotated[str | None, typer.Option(help="second configuration", rich_help_panel=_LIVE)] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="text or .json with token ids, as for `aqnpipe capture`", rich_help_panel=_LIVE),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="sequences, at most", rich_help_panel=_LIVE)] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="tokens per sequence, at most", rich_help_panel=_LIVE)] = 32,
) -> None:
    """Compare what two machines or engines compute from the same weights and tokens, operator by operator.

    Exit code 0: they differ by rounding at most; 3: beyond rounding, or not shown to be within it; 2: the captures
    cannot be compared.
    """
    from aqnpipe.artifacts.files import write_json, write_text
    from aqnpipe.cli.parity.page import page_of
    from aqnpipe.cli.parity.show import text_of
    from aqnpipe.parity.compare import parity_of

    _check_options(context, captures)
    check_writable("--json", json)
    check_writable("--html", html)
    with console_of(stderr=True).status("comparing"):
        if captures:
            from aqnpipe.parity.capture_file import read_capture

            pair = tuple(read_capture(path) for path in captures)
        elif model is None or first is None or second is None:
            raise ConfigError("parity: expected two files of `aqnpipe capture`, or --model, --first and --second")
        else:
            pair = _live(model, first, second, data, sequences, tokens)
        file = parity_of(pair[0], pair[1], None if model is None else lambda sides: _substituted(model, sides, threads))
    if json is not None:
        write_json(json, file)
    if html is not None:
        write_text(html, page_of(file))
    typer.echo("\n".join(text_of(file)))
    for path in (json, html):
        if path is not None:
            typer.echo(f"written: {path}", err=True)
    raise typer.Exit(0 if file.verdict in WITHIN_ROUNDING else EXIT_BEYOND_ROUNDING)


def _check_options(context: typer.Context, captures: list[Path] | None) -> None:
    live = [name for name in given_options(context) if name in ("first", "second", "data", "sequences", "tokens")]
    if captures and live:
        raise ConfigError(f"parity: found files and --{live[0]}, expected two files, or --model, --first and --second")
    if captures and len(captures) != 2:
        raise ConfigError(
            f"parity: found {len(captures)} file{'s' if len(captures) > 1 else ''}, expected two captures"
        )


def _live(
    model: str, first: str, second: str, data: Path | None, sequences: int, tokens: int
) -> "tuple[Capture, Capture]":
    from aqnpipe.parity.capture_file import seal

    sides = parse_side("--first", first), parse_side("--second", second)
    ids = token_ids(data, folder_of(model), sequences, tokens, 0)
    one, _ = seal(make_capture(model, sides[0], ids))
    # The second has the results of the first beside its own.
    larger = sides[1].model_copy(update={"max_bytes": 10 * sides[1].max_bytes})
    other, _ = seal(make_capture(model, larger, ids, one))
    return one, other


def _substituted(model: str, sides: "Sides", threads: int) -> "Substitution":
    import torch

    from aqnpipe.parity.effects import Substitutions

    identity = sides.first.identity
    _refuse_other_model("--model", model, identity)
    attention: Attention = "sdpa" if identity.attention == "sdpa" else "eager"
    source = find_model(model, identity.dtype, attention, random_weights=False)
    torch.set_num_threads(threads)
    return Substitutions(load(source, torch.device("cpu"), 0), sides).measured()
