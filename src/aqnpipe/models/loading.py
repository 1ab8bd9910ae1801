"""Models by built-in name, local folder or hub id: made ready in a folder, and loaded from it."""

import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aqnpipe.config.model import (
    Attention,
    Dtype,
    ModelConfig,
    builtin_folder,
    read_json_object,
    read_model_config,
    source_kind,
)
from aqnpipe.errors import ModelError
from aqnpipe.models.prepared import PREPARED_MODEL_FILE, PreparedModel

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja"),
)
_CONFIG = ("config.json", "generation_config.json")
_PICKLE_SUFFIXES = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
# Classes that stand for "tokenizer.json as it is written".
_VERBATIM_TOKENIZERS = frozenset({"TokenizersBackend", "PreTrainedTokenizerFast"})


def prepare_model(config: ModelConfig, output_dir: Path) -> PreparedModel:
    """Put the model's files into `output_dir`, with a record of what they are; an older `output_dir` is replaced.

    Takes safetensors weights, configuration and tokenizer alone. Raises ModelError if the source is missing, keeps
    its weights as pickle only, or needs remote code. Nothing is left behind on failure.
    """
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output_dir.parent, prefix=f".{output_dir.name}.") as staging_name:
        staging = Path(staging_name) / output_dir.name
        staging.mkdir()
        for path in _model_files(source_folder(config)):
            shutil.copyfile(path, staging / path.name)
        prepared = describe_model(staging, config)
        (staging / PREPARED_MODEL_FILE).write_text(prepared.model_dump_json(indent=2) + "\n", encoding="utf-8")
        if output_dir.exists():
            output_dir.rename(Path(staging_name) / "replaced")
        staging.rename(output_dir)
    return prepared


def source_folder(config: ModelConfig) -> Path:
    """Return the local folder of a model source, downloaded first if it is a hub id."""
    kind = source_kind(config.source)
    if kind == "builtin":
        return builtin_folder(config.source)
    if kind == "folder":
        return Path(config.source)
    return _download(config.source, config.revision)


def _download(hub_id: str, revision: str | None) -> Path:
    """Fetch the files of a hub model that are data and return their folder; raises ModelError if that fails."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = [*_WEIGHTS, *_TOKENIZER, *_CONFIG]
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        at_revision = f" at revision {revision}" if revision else ""
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {hub_id!r}{at_revision}: no such folder here, and not fetched from the hub ({reason})"
        ) from error


def _model_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that are taken; raises ModelError if it is unsafe or incomplete."""
    model_config = read_model_config(folder)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    for name, content in (("config.json", model_config), ("tokenizer_config.json", tokenizer_config)):
        if "auto_map" in content:
            raise ModelError(f"{folder / name}: auto_map asks for code from the model, which is never run")
    weights = sorted({path for pattern in _WEIGHTS for path in folder.glob(pattern)})
    if not any(path.suffix == ".safetensors" for path in weights):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLE_SUFFIXES)
        found = f"pickle weights ({', '.join(pickles[:3])}), which are never loaded" if pickles else "no weights"
        raise ModelError(f"model {str(folder)!r}: found {found}, expected *.safetensors")
    if not (folder / "tokenizer.json").is_file() and not (folder / "vocab.json").is_file():
        raise ModelError(f"model {str(folder)!r}: found no tokenizer, expected tokenizer.json")
    others = [folder / name for name in (*_CONFIG, *_TOKENIZER) if (folder / name).is_file()]
    return weights + others


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, empty if there is no such file."""
    return read_json_object(path) if path.is_file() else {}


def describe_model(folder: Path, config: ModelConfig) -> PreparedModel:
    """Return the record of a model folder, read from its files without loading it."""
    model_config = read_model_config(folder)
    missing = [key for key in ("architectures", "num_hidden_layers", "hidden_size") if not model_config.get(key)]
    if missing:
        raise ModelError(f"model {config.source!r}: config.json has no {', '.join(missing)}")
    weights = sorted(folder.glob("*.safetensors"))
    tokenizer_files = [folder / name for name in _TOKENIZER if (folder / name).is_file()]
    return PreparedModel(
        source=config.source,
        revision=config.revision,
        architecture=model_config["architectures"][0],
        num_layers=model_config["num_hidden_layers"],
        hidden_size=model_config["hidden_size"],
        num_parameters=sum(_count_parameters(path) for path in weights),
        weights_sha256=sha256_of(weights),
        tokenizer_sha256=sha256_of(sorted(tokenizer_files)),
    )


def _count_parameters(path: Path) -> int:
    """Return the number of values in a safetensors file, from its header."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as tensors:
            shapes = [tensors.get_slice(name).get_shape() for name in tensors.keys()]  # noqa: SIM118
    except SafetensorError as error:
        raise ModelError(f"{path.name}: no valid safetensors file ({error})") from error
    total = 0
    for shape in shapes:
        count = 1
        for size in shape:
            count *= size
        total += count
    return total


def sha256_of(paths: list[Path]) -> str:
    """Return the SHA-256 of one file, or of the names and digests of several."""
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if len(digests) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for path, digest in zip(paths, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def load_model(
    folder: Path, *, dtype: Dtype, attention: Attention, device: "torch.device | str" = "cpu"
) -> "PreTrainedModel":
    """Return the causal language model in `folder`, in evaluation mode, every weight from its safetensors files.

    Raises ModelError if the folder is no model or a weight is missing, left over or of another shape: transformers
    alone would fill such weights with random numbers and go on.
    """
    import torch
    from transformers import AutoModelForCausalLM

    read_model_config(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ModelError(f"model {str(folder)!r} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[problem]:
            names = sorted(str(key) for key in info[problem])
            raise ModelError(
                f"model {str(folder)!r}: {problem.replace('_', ' ')} in its weights: {', '.join(names[:3])}"
            )
    return model.to(device).eval()


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Return the tokenizer in `folder`, padding on the left, as generation needs it.

    Without a pad token the end-of-text token pads; without either ModelError is raised.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # AutoTokenizer rebuilds the tokenizer of every qwen2 model in its own way (with Unicode normalisation, so that
    # text does not round-trip), whatever tokenizer.json says.
    tokenizer_class = _read_json(folder / "tokenizer_config.json").get("tokenizer_class")
    loader = PreTrainedTokenizerFast if tokenizer_class in _VERBATIM_TOKENIZERS else AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False, padding_side="left"
        )
    except (OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise ModelError(f"tokenizer of {str(folder)!r} cannot be loaded: {first_line}") from error
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"tokenizer of {str(folder)!r} has neither pad nor eos token, expected one")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
