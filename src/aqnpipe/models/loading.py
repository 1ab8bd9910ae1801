"""Prepares models (built-in, local folder or hub id) in a folder, and loads them from it."""

import hashlib
import math
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from aqnpipe.artifacts.files import STAGED
from aqnpipe.artifacts.provenance import sha256_of_files
from aqnpipe.artifacts.runs import why_weights_are_gone
from aqnpipe.config.base import describe_validation_error
from aqnpipe.config.model import (
    Attention,
    Dtype,
    ModelConfig,
    builtin_folder,
    read_json_object,
    read_model_config,
    refuse_odd_file,
    source_kind,
)
from aqnpipe.errors import ModelError, first_line
from aqnpipe.models.prepared import (
    PREPARED_MODEL_FILE,
    PreparedModel,
    find_base,
    has_only_adapters,
    read_prepared_model,
    write_prepared_model,
)
from aqnpipe.models.untrusted import TEMPLATE_FILE, TRIED_TEXT, load_config, refuse_code, refuse_endless_texts

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", TEMPLATE_FILE),
)
CONFIG_FILES = ("config.json", "generation_config.json")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_TEXTS = frozenset({".json", ".jinja", ".txt"})
"""Endings of the files that transformers reads beside weights."""
_FREE_TEXT = (TEMPLATE_FILE, "merges.txt")
"""Files that are copied whatever they contain."""
# Tokenizer classes that use tokenizer.json unchanged.
_VERBATIM_TOKENIZERS = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})


def prepare_model(config: ModelConfig, output_dir: Path) -> PreparedModel:
    """Copy the model's files into `output_dir`, with a record of them; an older `output_dir` is replaced.

    Copies only safetensors weights, configuration and tokenizer. Raises ModelError if the source is missing, has only
    pickle weights, needs remote code, or is no model and tokenizer that transformers can make. A failure leaves no
    files behind.
    """
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(STAGED, f".{output_dir.name}.", output_dir.parent) as staging_name:
        staging = Path(staging_name) / output_dir.name
        staging.mkdir()
        for path in _model_files(source_folder(config), config):
            shutil.copyfile(path, staging / path.name)
        prepared = describe_model(staging, config.source, config.revision)
        if source_kind(config.source) != "builtin":
            _refuse_unusable_files(staging, config)
        write_prepared_model(staging, prepared)
        if output_dir.exists():
            output_dir.rename(Path(staging_name) / "replaced")
        staging.rename(output_dir)
    return prepared


def _refuse_unusable_files(folder: Path, config: ModelConfig) -> None:
    """Raise ModelError, with the model's source, if no model or tokenizer can be made from a folder's files."""
    try:
        create_model(folder, "meta", dtype=config.dtype, attention=config.attention)
        load_tokenizer(folder)
    except ModelError as error:
        raise ModelError(str(error).replace(str(folder), config.source)) from error


def source_folder(config: ModelConfig) -> Path:
    """Return the local folder of a model source. A hub model is downloaded first."""
    kind = source_kind(config.source)
    if kind == "builtin":
        return builtin_folder(config.source)
    if kind == "folder":
        return Path(config.source)
    return _download(config.source, config.revision)


def refuse_unusable(config: ModelConfig) -> None:
    """Raise ModelError if `prepare_model` could not use a built-in or local model: unsafe, incomplete or truncated."""
    folder = source_folder(config)
    _model_files(folder, config)
    num_parameters_in(folder)


def create_model(
    folder: Path,
    device: "torch.device | str",
    *,
    dtype: Dtype = "float32",
    attention: Attention = "eager",
    seed: int = 0,
) -> "PreTrainedModel":
    """Return a model of the shape in config.json with random weights; on the meta device it has none.

    Raises ModelError if no decoder-only model has this configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        config = load_config(folder)
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.manual_seed(seed)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(
                config, dtype=getattr(torch, dtype), attn_implementation=attention
            )
        _set_outputs(model, attention)
    except unreadable() as error:
        raise ModelError(f"model {str(folder)!r} cannot be created: {first_line(error)}") from error
    return model.eval()


def checked_folder(config: ModelConfig) -> Path:
    """Return the local folder of a model source that is a safe and complete model, or adapters of one.

    Raises ModelError as `prepare_model` does.
    """
    folder = source_folder(config)
    if not has_only_adapters(folder):
        _model_files(folder, config)
    num_parameters_in(folder)
    return folder


def _download(hub_id: str, revision: str | None) -> Path:
    """Download the data files of a hub model and return their folder; raises ModelError if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_WEIGHTS, *_TOKENIZER, *CONFIG_FILES]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at_revision = f" at revision {revision}" if revision else ""
        reason = first_line(error)
        raise ModelError(
            f"model {hub_id!r}{at_revision}: no such folder here, and not fetched from the hub ({reason})"
        ) from error


def _model_files(folder: Path, config: ModelConfig) -> list[Path]:
    """Return the files of a model's folder to copy; raises ModelError if the folder is unsafe or incomplete."""
    refuse_removed(folder)
    model_config, tokenizer_config = read_model_config(folder), _read_json(folder / "tokenizer_config.json")
    refuse_code(folder / "config.json", model_config.get("auto_map"), str(model_config.get("model_type")))
    refuse_code(folder / "tokenizer_config.json", tokenizer_config.get("auto_map"), None)
    if has_only_adapters(folder):
        raise ModelError(
            f"model {str(folder)!r}: a checkpoint that holds only the adapters of another model, expected a whole model"
        )
    weights = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    if not any(path.suffix == ".safetensors" for path in weights):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        found = f"pickle weights ({', '.join(pickles[:3])}), which are never loaded" if pickles else "no weights"
        raise ModelError(f"model {str(folder)!r}: found {found}, expected *.safetensors")
    for index in (path for path in weights if path.name.endswith(".index.json")):
        _refuse_paths_outside(index)
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise ModelError(f"model {str(folder)!r}: found no tokenizer, expected tokenizer.json")
    others = [folder / name for name in (*CONFIG_FILES, *_TOKENIZER) if (folder / name).is_file()]
    for path in (path for path in others if path.name in _FREE_TEXT and not _is_inside(path, folder)):
        raise ModelError(f"{path}: a link to a file outside of its folder, expected the file itself")
    if source_kind(config.source) != "builtin":
        refuse_endless_texts(folder)
    return weights + others


def _is_inside(path: Path, folder: Path) -> bool:
    """Return whether a file, or what it is a link to, lies in a model folder, or in its part of the hub's cache."""
    root = folder.resolve()
    return path.resolve().is_relative_to(root.parents[1] if root.parent.name == "snapshots" else root)


def _refuse_paths_outside(index: Path) -> None:
    """Raise ModelError if a weights index names files outside its own folder."""
    shards = read_json_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelError(f"{index}: no weight_map, expected an index of safetensors files")
    for shard in shards.values():
        is_name = isinstance(shard, str) and Path(shard).name == shard and shard.endswith(".safetensors")
        if not is_name or not (index.parent / shard).is_file():
            raise ModelError(f"{index}: names the weights {shard!r}, expected safetensors files in the same folder")


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def describe_model(folder: Path, source: str, revision: str | None = None) -> PreparedModel:
    """Return the record of a model folder, from its files, without loading the model."""
    model_config = read_model_config(folder)
    missing = [key for key in ("architectures", "num_hidden_layers", "hidden_size") if not model_config.get(key)]
    if missing:
        raise ModelError(f"model {source!r}: config.json has no {', '.join(missing)}")
    if not isinstance(model_config["architectures"], list):
        raise ModelError(f"model {source!r}: architectures in config.json is not a list")
    try:
        return PreparedModel(
            source=source,
            revision=revision,
            architecture=model_config["architectures"][0],
            num_layers=model_config["num_hidden_layers"],
            hidden_size=model_config["hidden_size"],
            num_parameters=num_parameters_in(folder),
            **file_digests(folder),
        )
    except ValidationError as error:
        raise ModelError(f"model {source!r}: config.json: {describe_validation_error(error)}") from error


def file_digests(folder: Path) -> dict[str, str]:
    """Return the digests of a model folder's files, by their field names in the record."""
    tokenizer = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    config = [folder / name for name in CONFIG_FILES if (folder / name).is_file()]
    return {
        "weights_sha256": weights_sha256(folder),
        "tokenizer_sha256": _sha256_of(tokenizer),
        "config_sha256": _sha256_of(config),
    }


def refuse_removed(folder: Path) -> None:
    """Raise ModelError if `folder` is a checkpoint whose weights a study did not keep, or has files not to be read."""
    if gone := why_weights_are_gone(folder):
        raise ModelError(gone)
    for path in (path for path in sorted(folder.glob("*")) if path.suffix == ".safetensors"):
        refuse_odd_file(path, None)
    for path in (path for path in sorted(folder.glob("*")) if path.suffix in _TEXTS):
        refuse_odd_file(path)


def refuse_damaged(folder: Path) -> None:
    """Raise ModelError if the files of a model folder do not match its record. Folders without a record pass."""
    refuse_removed(folder)
    if not (folder / PREPARED_MODEL_FILE).is_file():
        return
    record, found = read_prepared_model(folder).model_dump(), file_digests(folder)
    for name, digest in found.items():
        if record[name] != digest:
            raise ModelError(
                f"model {str(folder)!r}: its {name.split('_')[0]} files changed after they were written (SHA-256 "
                "differs): damaged, edited or of another model; prepare it again"
            )


def num_parameters_in(folder: Path) -> int:
    """Return the number of values in the weights in a model folder, read from the headers of its files."""
    from safetensors import SafetensorError, safe_open

    total = 0
    for path in folder.glob("*.safetensors"):
        try:
            with safe_open(path, framework="numpy") as tensors:
                total += sum(math.prod(tensors.get_slice(name).get_shape()) for name in tensors.keys())  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{path.parent.name}/{path.name}: not a valid safetensors file ({error})") from error
    return total


def weights_sha256(folder: Path) -> str:
    """Return the SHA-256 of the weights in a model folder."""
    return _sha256_of(folder.glob("*.safetensors"))


def _sha256_of(paths: Iterable[Path]) -> str:
    return sha256_of_digests(sha256_of_files({path.name: path for path in paths}))


def sha256_of_digests(digests: Mapping[str, str]) -> str:
    """Return the SHA-256 of one file, or of the names and digests of several files, from their digests."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


@contextmanager
def stored_weights(folder: Path) -> Iterator[Mapping[str, Any]]:
    """Open the safetensors files of a model folder; yield by the name of each weight the file that has it."""
    from safetensors import safe_open

    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in sorted(folder.glob("*.safetensors"))]
        yield {name: file for file in files for name in file.keys()}  # noqa: SIM118


def stored_tensors(folder: Path) -> "Iterator[tuple[str, Tensor]]":
    """Yield name and content of every tensor in the weights of a model folder."""
    with stored_weights(folder) as files:
        yield from ((name, file.get_tensor(name)) for name, file in files.items())


def load_model(
    folder: Path, *, dtype: Dtype, attention: Attention, device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """Return the causal language model in `folder`, in evaluation mode, with every weight from its safetensors files.

    A checkpoint of adapters is its base (see `find_base`) with the adapters applied. A checkpoint must compute what the
    trainer's model computed. Raises ModelError if it does not, if the folder is not a model, or if a weight is missing,
    unexpected or of another shape.
    """
    from aqnpipe.models.verification import refuse_other_outputs

    read_model_config(folder)
    refuse_damaged(folder)
    if has_only_adapters(folder):
        from aqnpipe.models.adapters import load_adapters

        model = _load_whole(find_base(folder), dtype, attention)
        load_adapters(model, folder)
    else:
        model = _load_whole(folder, dtype, attention)
    model = model.to(device).eval()
    refuse_other_outputs(model, folder)
    return model


def _load_whole(folder: Path, dtype: Dtype, attention: Attention) -> "PreTrainedModel":
    """Return the model whose weights are all in `folder`; transformers alone would fill gaps with random numbers."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    refuse_damaged(folder)
    if not sys.stderr.isatty():
        disable_progress_bar()  # a log would have a line of all its states
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            config=load_config(folder),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
        _set_outputs(model, attention)
    except unreadable() as error:
        raise ModelError(f"model {str(folder)!r} cannot be loaded: {first_line(error)}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            names = sorted(str(key) for key in info[problem])
            raise ModelError(
                f"model {str(folder)!r}: {problem.replace('_', ' ')} in its weights: {', '.join(names[:3])}"
            )
    return model


def _set_outputs(model: "PreTrainedModel", attention: Attention) -> None:
    """Set the attention kernel and what a pass returns; to transformers, what config.json names counts more."""
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
    model.config.return_dict = True
    model.config.output_attentions = model.config.output_hidden_states = False


def unreadable() -> tuple[type[Exception], ...]:
    """Return what transformers raises for malformed files, and where a number format needs another package."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    return (
        *(OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError),
        *(ArithmeticError, AssertionError, StrictDataclassError, SafetensorError),
    )


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in `folder`, with padding on the left for generation.

    Without a pad token, the end-of-text token is used for padding. Raises ModelError if there is neither.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer ignores tokenizer.json for qwen2 models and rebuilds the tokenizer with Unicode normalisation, so
    # that text does not round-trip.
    tokenizer_class = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    try:
        # A list or an object in the place of the name is a TypeError.
        loader = PreTrainedTokenizerFast if tokenizer_class in _VERBATIM_TOKENIZERS else AutoTokenizer
        tokenizer = loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, padding_side="left"
        )
        tokenizer.decode(tokenizer(TRIED_TEXT)["input_ids"])  # some settings are read only here
    except BaseException as error:
        # The tokenizers library raises plain Exception for malformed files, and panics of Rust, which are none.
        is_of_the_file = type(error) is Exception or type(error).__name__ == "PanicException"
        if not is_of_the_file and not isinstance(error, unreadable()):
            raise
        raise ModelError(f"tokenizer of {str(folder)!r} cannot be loaded: {first_line(error)}") from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"tokenizer of {str(folder)!r} has neither pad nor eos token, expected one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_untrained(checkpoint: Path, model: Path) -> bool:
    """Return whether every weight of a checkpoint is `model`'s, in the checkpoint's number format; False if it is gone.

    Adapters are untrained as long as their second factors are zero, because these start at zero.
    """
    import torch

    if has_only_adapters(checkpoint):
        return not any(tensor.any() for name, tensor in stored_tensors(checkpoint) if name.endswith(".lora_B.weight"))
    with stored_weights(model) as before, stored_weights(checkpoint) as after:
        return before.keys() == after.keys() != set() and all(
            torch.equal(before[name].get_tensor(name).to(tensor.dtype), tensor)
            for name, tensor in stored_tensors(checkpoint)
        )
