"""Tries a model's tokenizer and chat templates in a process of its own: both are programs, which may never end."""

import json
import os
import resource
import signal
import string
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE

from aqnpipe.config.dataset import PromptFormat
from aqnpipe.config.model import read_json_object, refuse_odd_file
from aqnpipe.data.prompts import TEMPLATE_ERRORS, refuse_unusable_template
from aqnpipe.errors import ModelError

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
TRIED_TEXT = f"Anna has 12 red apples and buys 3 more.\n{string.printable}"
_TURNS = [{"role": "user", "content": "What is 77 plus 8?"}]
_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
_MOST_CHARACTERS = 1_000_000
_SECONDS, _MEGABYTES = 2, 4_000
"""Of processor and memory for one short text, which takes milliseconds: a busy machine must not refuse a model."""
_UNUSABLE = 4  # exit code of the trial where a question does not come through a template


def refuse_endless_texts(folder: Path, prompt_format: PromptFormat | None = None) -> None:
    """Raise ModelError if the tokenizer or a chat template of a model folder takes more than 2 s or 4 GB for a text.

    Those that fail pass: they are refused where they are needed. With `prompt_format`, of style chat, a question in it
    must come through the tokenizer's template instead; ModelError if it does not.
    """
    for where, template in templates_in(folder).items():
        if (found := len(template)) > _MOST_CHARACTERS:
            raise ModelError(f"{where}: a chat template of {found:,} characters, expected {_MOST_CHARACTERS:,} at most")
    given: str | None = json.dumps([str(folder), prompt_format and prompt_format.model_dump(mode="json")])
    command = [sys.executable, "-u", "-m", "aqnpipe.models.trial"]
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
