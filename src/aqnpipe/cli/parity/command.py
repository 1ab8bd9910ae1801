"""`aqnpipe parity`: compare two captures, or two configurations of a model live."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aqnpipe.artifacts.parities import WITHIN_ROUNDING
from aqnpipe.cli.options import check_writable
from aqnpipe.cli.parity.running import Bounds, folder_of, make_capture, parse_side, token_ids
from aqnpipe.cli.terminal import given_options
from aqnpipe.config.base import MOST_THREADS
from aqnpipe.config.model import Attention
from aqnpipe.errors import ConfigError

if TYPE_CHECKING:
    from aqnpipe.artifacts.parities import Substitution
    from aqnpipe.parity.capture_file import Capture
    from aqnpipe.parity.compare import Sides

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
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.cli.parity.show import text_of
    from aqnpipe.cli.terminal import console_of
    from aqnpipe.parity.parity import parity_of

    _check_options(context, captures)
    if json is not None:
        check_writable("--json", json)
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
    typer.echo("\n".join(text_of(file)))
    if json is not None:
        typer.echo(f"written: {json}", err=True)
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

    sides, bounds = (parse_side("--first", first), parse_side("--second", second)), Bounds(200, 256)
    ids = token_ids(data, folder_of(model), sequences, tokens, 0)
    one, _ = seal(make_capture(model, sides[0], ids, bounds))
    # The second has the results of the first beside its own.
    other, _ = seal(make_capture(model, sides[1], ids, Bounds(10 * bounds.max_megabytes, bounds.rows), one))
    return one, other


def _substituted(model: str, sides: "Sides", threads: int) -> "Substitution":
    import torch

    from aqnpipe.cli.options import find_model, load
    from aqnpipe.parity.effects import Substitutions
    from aqnpipe.parity.identity import model_facts

    identity = sides.first.identity
    attention: Attention = "sdpa" if identity.attention == "sdpa" else "eager"
    source = find_model(model, identity.dtype, attention, random_weights=False)
    found = model_facts(source.folder, model)["weights_sha256"]
    if found != identity.weights_sha256:
        raise ConfigError(
            f"--model {model}: its weights have SHA-256 {found[:12]}, expected those of the captures, "
            f"{identity.weights_sha256[:12]}"
        )
    torch.set_num_threads(threads)
    return Substitutions(load(source, torch.device("cpu"), 0), sides, threads).measured()
