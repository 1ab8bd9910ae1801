"""What is refused of a model folder before anything is made from it: keys, code, and texts that may never end.

transformers sets every key of config.json as an attribute of the configuration, unknown ones too. What a family
declares may be set. Any other key was added by a training tool, or is no longer read by this version: there are many of
them, and no code looks at them. Such a key must not name something that every configuration has for another purpose:
`attribute_map` would rename attributes, `sub_configs` would exchange the classes of parts.

A tokenizer and chat templates are programs: they are tried in a process of its own (`python -m` this module).
"""

import json
import os
import resource
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from subprocess import PIPE
from typing import TYPE_CHECKING, Any

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.model import read_json_object, read_model_config, refuse_odd_file
from aqnpipe.data.prompts import TEMPLATE_ERRORS, refuse_unusable_template
from aqnpipe.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_INERT = frozenset(
    {
        *("model_type", "_name_or_path", "_attn_implementation_internal", "_experts_implementation_internal"),
        *("base_model_tp_plan", "base_model_ep_plan", "base_model_pp_plan", "keys_to_ignore_at_inference"),
    }
)
"""Names of attributes that versions of transformers wrote into config.json; none is read back here."""

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
TRIED_TEXT = f"Anna has 12 red apples and buys 3 more.\n{string.printable}"
_TURNS = [{"role": "user", "content": "What is 77 plus 8?"}]
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_MOST_CHARACTERS = 1_000_000
_SECONDS, _MEGABYTES = 2, 4_000
"""Of processor and memory for one short text, which takes milliseconds: a busy machine must not refuse a model."""
_UNUSABLE = 4  # exit code of the trial where a question does not come through a template


def load_config(folder: Path) -> "PreTrainedConfig":
    """Return the configuration of a model folder; ModelError for keys, families and quantizations not allowed."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, GenerationConfig
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    content, path = read_model_config(folder), folder / "config.json"
    family = content.get("model_type")
    if isinstance(family, str) and family in CONFIG_MAPPING:
        # The configurations of other families (detectors with a backbone) may fetch from the hub.
        if CONFIG_MAPPING[family] not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ModelError(f"{path}: model_type is {family!r}, expected a decoder-only model")
        for key in _taken(CONFIG_MAPPING[family], content):
            raise ModelError(f"{path}: {key} is not a setting of {family}, but a part of transformers' code")
    generation = folder / "generation_config.json"
    for key in read_json_object(generation) if generation.exists() else ():
        if callable(getattr(GenerationConfig, key, None)):
            raise ModelError(f"{generation}: {key} is not a setting, but a part of transformers' code")
    quantization = content.get("quantization_config")
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method is not None and method not in (*AUTO_QUANTIZER_MAPPING, "bitsandbytes"):
        # transformers would load the weights without it. The mapping has bitsandbytes by its number of bits.
        raise ModelError(
            f"{path}: quantization_config.quant_method is {method!r}, expected one that transformers knows"
        )
    config: PreTrainedConfig = AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return config


def _taken(kind: "type[PreTrainedConfig]", content: Mapping[str, Any], prefix: str = "") -> "Iterator[str]":
    """Yield the keys, also of parts of a configuration, that no setting has and that name an attribute of its class."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    settable = {name for name in dir(kind) if getattr(getattr(kind, name, None), "fset", None) is not None}
    declared = settable | {field.name for field in fields(kind)} | {*kind.attribute_map}
    taken = {*dir(kind), *vars(PreTrainedConfig())} - declared - _INERT
    yield from (prefix + key for key in content if key in taken)
    for name, part in kind.sub_configs.items():
        inside = content.get(name)
        if isinstance(inside, Mapping):
            family = inside.get("model_type")
            known = CONFIG_MAPPING[family] if isinstance(family, str) and family in CONFIG_MAPPING else part
            yield from _taken(known if issubclass(known, PreTrainedConfig) else PreTrainedConfig, inside, f"{name}.")


def refuse_code(path: Path, auto_map: Any, family: str | None) -> None:
    """Raise ModelError if `auto_map` names classes that transformers lacks; `family` None: of a tokenizer.

    A model that was published before transformers had its family still names its own files (Phi-3, DeepSeek-V3). They
    are not read: the class of transformers with this name is used.
    """
    if auto_map is None:
        return
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    own = {"AutoConfig": CONFIG_MAPPING_NAMES, "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for loader, found in (auto_map if isinstance(auto_map, Mapping) else {"AutoTokenizer": auto_map}).items():
        for reference in found if isinstance(found, list) else [found]:
            name = str(reference).rpartition(".")[2]
            if loader in own:
                is_known = name.replace("_", "").lower() == str(own[loader].get(family or "")).replace("_", "").lower()
            else:
                is_known = loader != "AutoTokenizer" or reference is None or bool(tokenizer_class_from_name(name))
            if not is_known:
                raise ModelError(f"{path}: auto_map asks for code from the model, which is never run: {reference}")


def refuse_endless_texts(folder: Path, prompt_format: PromptFormat | None = None) -> None:
    """Raise ModelError if the tokenizer or a chat template of a model folder takes more than 2 s or 4 GB for a text.

    Those that fail pass: they are refused where they are needed. With `prompt_format`, of style chat, a question in it
    must come through the tokenizer's template instead; ModelError if it does not.
    """
    for where, template in templates_in(folder).items():
        if (found := len(template)) > _MOST_CHARACTERS:
            raise ModelError(f"{where}: a chat template of {found:,} characters, expected {_MOST_CHARACTERS:,} at most")
    given: str | None = json.dumps([str(folder), prompt_format and prompt_format.model_dump(mode="json")])
    command = [sys.executable, "-u", "-m", "aqnpipe.models.untrusted"]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True) as process:  # noqa: S603 - own code
        while True:
            try:
                said, errors = process.communicate(given, timeout=0.05)
                break
            except subprocess.TimeoutExpired:
                given = None
            # Seen from outside: within a limit, Jinja leaves out constants that there is no memory for, and ends well.
            pages = int(Path(f"/proc/{process.pid}/statm").read_text(encoding="ascii").split()[1])
            if pages * resource.getpagesize() > _MEGABYTES * 10**6:
                process.kill()
    last = said.rpartition("\n")[2]
    if process.returncode in (-signal.SIGKILL, -signal.SIGABRT, -signal.SIGXCPU):
        most = f"{_SECONDS} s" if process.returncode == -signal.SIGXCPU else f"{_MEGABYTES:,} MB"
        raise ModelError(f"{last} takes more than {most} for one short text")
    if process.returncode:
        is_refused = process.returncode == _UNUSABLE
        raise ModelError(last) if is_refused else RuntimeError(f"{folder}: trying texts failed: {errors}")


def templates_in(folder: Path) -> dict[str, str]:
    """Return the chat templates in a model folder, by where they are; a tokenizer may have several with names."""
    found: dict[str, str] = {}
    for path in (folder / TEMPLATE_FILE, *sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))):
        if path.exists():
            refuse_odd_file(path)
            try:
                found[str(path)] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise ModelError(f"{path}: not UTF-8 ({error.reason})") from error
    for path in (folder / "tokenizer_config.json", folder / "chat_template.json"):
        stored = read_json_object(path).get("chat_template") if path.exists() else None
        named = stored if isinstance(stored, list) else [{"name": "chat_template", "template": stored}]
        for entry in named:
            if isinstance(entry, dict) and isinstance(entry.get("template"), str):
                found[f"{path}: {entry.get('name')}"] = entry["template"]
    return found


def _main() -> None:
    """Try the folder on standard input; the last line of standard output is what is tried, or the refusal."""
    folder, prompt = json.load(sys.stdin)
    try:
        _tokenize_and_render(Path(folder)) if prompt is None else _ask(Path(folder), PromptFormat(**prompt))
    except MemoryError:
        os.abort()  # as libraries in Rust do where there is no memory
    except ModelError as error:
        sys.stdout.write(f"\n{error}")
        sys.exit(_UNUSABLE)


def _begin(what: str) -> None:
    """Limit the processor time of this process from now on: what it took to import and load is not counted."""
    sys.stdout.write(f"\n{what}")
    # The kernel counts whole seconds, and sends SIGXCPU at the first limit; the second stays, as it cannot be raised.
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(sum(os.times()[:2])) + 1 + _SECONDS, hard))


def _tokenize_and_render(folder: Path) -> None:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        _begin(f"{folder / 'tokenizer.json'}: the tokenizer")
        tokenizer.decode(tokenizer.encode(TRIED_TEXT).ids)
    except BaseException as error:
        # The library raises plain Exception for malformed files and texts, and panics of Rust, which are none.
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
    for where, template in templates_in(folder).items():
        from transformers.utils.chat_template_utils import render_jinja_template

        _begin(f"{where}: the chat template")
        with suppress(*TEMPLATE_ERRORS):
            render_jinja_template([_TURNS], chat_template=template, add_generation_prompt=True, **_TOKENS)


def _ask(folder: Path, prompt_format: PromptFormat) -> None:
    import transformers.utils.chat_template_utils  # noqa: F401 - else imported within the limit

    from aqnpipe.models.loading import load_tokenizer

    tokenizer = load_tokenizer(folder)
    _begin(f"{folder}: the chat template")
    refuse_unusable_template(prompt_format, tokenizer)


if __name__ == "__main__":
    _main()
