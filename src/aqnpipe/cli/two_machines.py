"""Two machines or engines, compared: what every operator computes, and the same training step by step.

`aqnpipe capture` writes what a model computed into a file, `aqnpipe parity` compares two such files, and `aqnpipe
compare-runs` the metrics of trainings.
"""

import json as json_format
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from aqnpipe.artifacts.parities import WITHIN_ROUNDING, Backend, CaptureConfig, CaptureIdentity
from aqnpipe.cli.options import (
    CpuThreads,
    ModelArgument,
    aligned,
    check_writable,
    console_of,
    find_model,
    given_options,
    load,
    say_written,
    usable_device,
)
from aqnpipe.config.base import describe_validation_error, key_values
from aqnpipe.config.model import Attention, Dtype, read_model_config
from aqnpipe.device import DeviceKind, nvidia_capability
from aqnpipe.errors import ConfigError
from aqnpipe.generation.vllm.launch import BATCH_INVARIANT, check_vllm, why_not_batch_invariant

if TYPE_CHECKING:
    from aqnpipe.artifacts.parities import Substitution
    from aqnpipe.comparison.training_runs import MetricDifference, RunComparison
    from aqnpipe.parity.capture_file import Capture
    from aqnpipe.parity.compare import Sides


EXIT_BEYOND_ROUNDING = 3
_LIVE = "Without files"
_WITHOUT_EFFECT = {"vllm": ("attention", "padding"), "transformers": ("tensor_parallel", "batch_invariant")}
_KEYS = (
    *("backend", "dtype", "attention", "device", "batch_size", "padding", "decode", "threads"),
    *("tensor_parallel", "batch_invariant"),
)


def capture(
    context: typer.Context,
    model: ModelArgument,
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
    threads: CpuThreads = 1,
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
    _refuse_unused(f"--backend {backend}", backend, given)
    settings = {key: context.params[key] for key in _KEYS}
    side = _side("capture", settings | {"max_bytes": max_megabytes * 1_000_000, "max_rows": rows})
    other = None if replay is None else read_capture(replay)
    if other is None:
        ids = token_ids(data, folder_of(model), sequences, tokens, seed)
    else:
        for name in (name for name in given if name in ("data", "sequences", "tokens", "seed", "rows")):
            raise ConfigError(
                f"--{name}: found beside --replay, whose capture sets the token ids; expected one of the two"
            )
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
    threads: CpuThreads = 1,
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
        Path | None, typer.Option(help="text or .json with token ids, as for `aqnpipe capture`", rich_help_panel=_LIVE)
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="sequences, at most", rich_help_panel=_LIVE)] = 32,
    tokens: Annotated[int, typer.Option(min=2, help="tokens per sequence, at most", rich_help_panel=_LIVE)] = 32,
) -> None:
    """Compare what two machines or engines compute from the same weights and tokens, operator by operator.

    Exit code 0: they differ by rounding at most; 3: beyond rounding, or not shown to be within it; 2: the captures
    cannot be compared.
    """
    from aqnpipe.artifacts.files import write_json, write_text
    from aqnpipe.cli.parity_show import page_of, text_of
    from aqnpipe.parity.capture_file import read_capture
    from aqnpipe.parity.compare import parity_of

    live = [name for name in given_options(context) if name in ("first", "second", "data", "sequences", "tokens")]
    if captures and live:
        raise ConfigError(f"parity: found files and --{live[0]}, expected two files, or --model, --first and --second")
    if captures and len(captures) != 2:
        raise ConfigError(
            f"parity: found {len(captures)} file{'s' if len(captures) > 1 else ''}, expected two captures"
        )
    check_writable("--json", json)
    check_writable("--html", html)
    with console_of(stderr=True).status("comparing"):
        if captures:
            one, other = map(read_capture, captures)
        elif model is None or first is None or second is None:
            raise ConfigError("parity: expected two files of `aqnpipe capture`, or --model, --first and --second")
        else:
            one, other = _live(model, first, second, data, sequences, tokens)
        file = parity_of(one, other, None if model is None else lambda sides: _substituted(model, sides, threads))
    if json is not None:
        write_json(json, file)
    if html is not None:
        write_text(html, page_of(file))
    typer.echo("\n".join(text_of(file)))
    say_written(json, html)
    raise typer.Exit(0 if file.verdict in WITHIN_ROUNDING else EXIT_BEYOND_ROUNDING)


def _live(
    model: str, first: str, second: str, data: Path | None, sequences: int, tokens: int
) -> "tuple[Capture, Capture]":
    from aqnpipe.parity.capture_file import seal

    sides = _parsed_side("--first", first), _parsed_side("--second", second)
    ids = token_ids(data, folder_of(model), sequences, tokens, 0)
    one, _ = seal(make_capture(model, sides[0], ids))
    # The second has the results of the first beside its own.
    larger = sides[1].model_copy(update={"max_bytes": 10 * sides[1].max_bytes})
    return one, seal(make_capture(model, larger, ids, one))[0]


def _substituted(model: str, sides: "Sides", threads: int) -> "Substitution":
    import torch

    from aqnpipe.parity.effects import Substitutions

    identity = sides.first.identity
    _refuse_other_model("--model", model, identity)
    attention: Attention = "sdpa" if identity.attention == "sdpa" else "eager"
    source = find_model(model, identity.dtype, attention, random_weights=False)
    torch.set_num_threads(threads)
    return Substitutions(load(source, torch.device("cpu"), 0), sides).measured()


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


def _parsed_side(option: str, text: str) -> CaptureConfig:
    """Return the configuration in text such as `dtype=bfloat16,attention=sdpa`; ConfigError if it is none."""
    settings = key_values(option, text, _KEYS) if text.strip() else {}
    _refuse_unused(f"{option} {text!r}", settings.get("backend"), settings)
    # A refusal names the number, not its text.
    return _side(option, {key: int(value) if value.isdecimal() else value for key, value in settings.items()})


def _refuse_unused(option: str, backend: str | None, given: Iterable[str]) -> None:
    """Raise ConfigError for a setting that a user gave and the backend has no choice of."""
    for name in (name for name in given if name in _WITHOUT_EFFECT.get(backend or "transformers", ())):
        engine = "vLLM" if backend == "vllm" else "transformers"
        raise ConfigError(f"{option}: found {name}, which has no effect on {engine}, expected none")


def _side(option: str, settings: Mapping[str, Any]) -> CaptureConfig:
    """Return a configuration with these settings; ConfigError, with the name of the option, for a wrong value."""
    try:
        return CaptureConfig.model_validate(settings, strict=False)
    except ValidationError as error:
        raise ConfigError(f"{option}: {describe_validation_error(error)}") from error


def make_capture(
    model: str, config: CaptureConfig, sequences: list[list[int]], replay: "Capture | None" = None
) -> "Capture":
    """Return the capture of a model in one configuration; ConfigError or ModelError if it cannot be made."""
    from aqnpipe.parity.capture import capture

    device = usable_device(config.device)
    source = find_model(model, config.dtype, config.attention, random_weights=False)
    if config.backend == "vllm":
        kind: DeviceKind = device.type  # type: ignore[assignment] # torch has a str
        check_vllm(kind)
        from aqnpipe.parity.vllm.capture import capture_vllm

        config = config.model_copy(update={"batch_invariant": _requested_invariance(config.batch_invariant, kind)})
        return capture_vllm(source.folder, model, sequences, config, kind, replay)
    return capture(load(source, device, 0), source.folder, model, sequences, config, replay)


def folder_of(model: str) -> Path:
    """Return the folder of a model, which is refused if its family is none of a decoder."""
    return find_model(model, "float32", "eager", random_weights=False).folder


def _requested_invariance(found: bool | None, device: DeviceKind) -> bool:
    """Return whether vLLM's batch-invariant mode is requested; ConfigError if the device does not have it."""
    place = "batch-invariant mode"
    if found is None:
        value, place = os.environ.get(BATCH_INVARIANT, "0"), f"the environment variable {BATCH_INVARIANT}"
        if value not in ("0", "1"):
            raise ConfigError(f"{place}: found {value!r}, expected 0 or 1")
        found = value == "1"
    capability = nvidia_capability(device)
    reason = why_not_batch_invariant(is_requested=True, device=device, capability=capability, noised_rollouts=False)
    if found and reason:
        raise ConfigError(f"{place}: found it on, expected off: {reason}")
    return found


def token_ids(data: Path | None, folder: Path, num_sequences: int, num_tokens: int, seed: int) -> list[list[int]]:
    """Return at most `num_sequences` sequences of at most `num_tokens` ids for the model in `folder`.

    Without `data` they are random. Raises ConfigError, in one line, if the file has none.
    """
    if data is None:
        return _random_ids(folder, num_sequences, num_tokens, seed)
    if not data.is_file():
        raise ConfigError(f"--data {data}: found {'a folder' if data.is_dir() else 'no such file'}, expected a file")
    try:
        text = data.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data}: cannot be read as text ({error})") from error
    rows = _stored_ids(data, text) if data.suffix == ".json" else _tokenised(data, text, folder, num_sequences)
    return [ids[:num_tokens] for ids in rows[:num_sequences]]


def _random_ids(folder: Path, num_sequences: int, num_tokens: int, seed: int) -> list[list[int]]:
    import torch

    from aqnpipe.seeding import keyed_generator

    vocabulary = read_model_config(folder).get("vocab_size")
    if not isinstance(vocabulary, int):
        raise ConfigError(f"{folder / 'config.json'}: no vocab_size for random token ids; expected --data FILE")
    generator = keyed_generator("cpu", seed, "parity.tokens")
    rows: list[list[int]] = torch.randint(vocabulary, (num_sequences, num_tokens), generator=generator).tolist()
    return rows


def _stored_ids(data: Path, text: str) -> list[list[int]]:
    try:
        rows = json_format.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--data {data}: not valid JSON ({error})") from error
    is_ids = isinstance(rows, list) and all(
        isinstance(ids, list) and ids and all(type(token) is int for token in ids) for ids in rows
    )
    if not is_ids or not rows:
        raise ConfigError(f"--data {data}: expected a list of lists of token ids")
    return rows


def _tokenised(data: Path, text: str, folder: Path, num_sequences: int) -> list[list[int]]:
    from aqnpipe.models.loading import load_tokenizer

    lines = [line for line in text.splitlines() if line.strip()][:num_sequences]
    if not lines:
        raise ConfigError(f"--data {data}: found no text, expected a text in each line")
    tokenizer = load_tokenizer(folder)
    return [list(tokenizer(line)["input_ids"]) for line in lines]


EXIT_DIFFERENT = 3
_PARITY = (
    "compare the operators of both machines on the checkpoint before that step (`aqnpipe capture` on each, then "
    "`aqnpipe parity`)."
)


def compare_runs(
    first: Annotated[Path, typer.Argument(help="runs of the first machine")],
    second: Annotated[Path, typer.Argument(help="runs of the second machine")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="metric or column to compare; may be repeated. Default: reward, loss, kl and others"),
    ] = None,
    alpha: Annotated[float, typer.Option(help="probability that equal machines are called different")] = 0.05,
    json: Annotated[Path | None, typer.Option(help="write the result to this file")] = None,
) -> None:
    """Compare the same training on two machines, engines or library versions, step by step.

    Each side is a run of a study, the folder of an arm with its seeds, a file of metrics (.parquet, .csv, .jsonl,
    trainer_state.json), or a folder of such files, one per seed.

    Exit code 0: no difference beyond that between seeds; 3: a difference beyond it; 2: the runs cannot be compared.
    """
    from aqnpipe.artifacts.files import write_json
    from aqnpipe.comparison import training_runs

    if not 0 < alpha < 1:
        raise ConfigError(f"--alpha: found {alpha:g}, expected above 0 and below 1")
    check_writable("--json", json)
    groups = training_runs.read_runs(first), training_runs.read_runs(second)
    found = training_runs.compare_runs(*groups, (str(first), str(second)), metric or (), alpha)
    typer.echo("\n".join(text_of(found)))
    if json is not None:
        write_json(json, found)
    say_written(json)
    raise typer.Exit(EXIT_DIFFERENT if found.differing else 0)


def text_of(found: "RunComparison") -> list[str]:
    """Return the lines that the command prints; the last one answers."""

    runs = " and ".join(f"{number} run{'s' if number > 1 else ''}" for number in found.runs)
    head = f"{found.first} and {found.second}: {runs}{', paired by name' if found.paired else ''}; "
    head += f"{found.num_steps} steps, {found.steps[0]} to {found.steps[1]}"
    head += f", {found.only_one_side} more on one side only" if found.only_one_side else ""
    header = ["metric", "first", "second", "difference", "of first", "interval"]
    header += ["p (adjusted)", "unequal", "beyond seeds"]
    note = (
        "unequal: first step at which runs of one seed have other numbers; beyond seeds: first step whose difference "
        "is larger than seeds explain. Intervals of mean differences and p-values are adjusted for steps and metrics."
    )
    return [head, "", *aligned([header, *map(_cells, found.metrics)]), "", note, "", answer_of(found)]


def _cells(row: "MetricDifference") -> list[str]:
    interval = "" if row.ci_low is None or row.ci_high is None else f"{row.ci_low:+.3g} to {row.ci_high:+.3g}"
    return [
        row.metric,
        f"{row.mean_first:.4g}",
        f"{row.mean_second:.4g}",
        f"{row.difference:+.3g}",
        "" if row.relative is None else _percent(row.relative, "+"),
        interval,
        "" if row.p_adjusted is None else f"{row.p_adjusted:.2g}",
        "" if row.first_unequal is None else f"step {row.first_unequal}",
        "" if row.first_beyond is None else f"step {row.first_beyond}",
    ]


def answer_of(found: "RunComparison") -> str:
    """Return one sentence: yes, no or not known, whether the two sides differ by more than seeds explain."""
    if found.differing:
        parts = [_difference(row) for row in found.differing]
        return f"Yes, they differ by more than seeds explain: {'; '.join(parts)}. Where it begins: {_PARITY}"
    if (found.paired or found.runs == (1, 1)) and all(row.first_unequal is None for row in found.metrics):
        return f"No: all numbers of all {found.num_steps} steps are equal."
    if not found.has_band:
        sizes = [f"{row.metric} {_percent(row.relative, '+')}" for row in found.metrics if row.relative is not None]
        return (
            "Not known whether seeds explain the difference: each side has one run, and one side needs two at least. "
            f"Mean differences: {', '.join(sizes)} (verl accepts an NPU whose mean loss differs by less than 2 %)."
        )
    widest = max((row for row in found.metrics if row.relative is not None), key=_reach, default=None)
    limit = "" if widest is None else f"; mean differences of up to {_percent(_reach(widest))} ({widest.metric}) remain"
    return f"No difference beyond that between seeds was found in {found.num_steps} steps{limit} possible."


def _percent(fraction: float, sign: str = "") -> str:
    return f"{100 * fraction:{sign},.{0 if abs(fraction) >= 1 else 2}f} %"


def _reach(row: "MetricDifference") -> float:
    """Return the largest relative difference of means that the interval holds."""
    if row.ci_low is None or row.ci_high is None or not row.relative or not row.difference:
        return 0.0
    return max(abs(row.ci_low), abs(row.ci_high)) * abs(row.relative / row.difference)


def _difference(row: "MetricDifference") -> str:
    if row.first_beyond is None:
        return f"{row.metric} by {row.difference:+.3g} on average over the steps"
    if row.difference_beyond is None:
        return f"{row.metric} is no number on one side from step {row.first_beyond} on"
    return (
        f"{row.metric} from step {row.first_beyond} on, by {row.difference_beyond:+.3g} where seeds explain "
        f"{row.band_beyond:.3g}"
    )
