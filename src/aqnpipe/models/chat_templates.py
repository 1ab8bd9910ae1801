"""Tries a model's chat template in a process of its own: a template is a program, which may never end."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

from aqnpipe.config.model import read_json_object, refuse_odd_file
from aqnpipe.data.prompts import TEMPLATE_ERRORS
from aqnpipe.errors import ModelError

TEMPLATE_FILE = "chat_template.jinja"
_MOST_CHARACTERS = 1_000_000
_SECONDS, _MEGABYTES = 2, 4_000
"""Of processor and memory for one short question, which takes milliseconds: a busy machine must not refuse a model."""
_TOO_LARGE = 3


def refuse_endless_templates(folder: Path) -> None:
    """Raise ModelError if a chat template of a model folder takes more than 2 s or 4 GB for one short question.

    Templates that cannot be rendered pass: they are refused where a prompt needs them.
    """
    for where, template in templates_in(folder).items():
        if len(template) > _MOST_CHARACTERS:
            found = f"{len(template):,} characters, expected {_MOST_CHARACTERS:,} at most"
            raise ModelError(f"{where}: a chat template of {found}")
        done = subprocess.run(
            [sys.executable, "-m", "aqnpipe.models.chat_templates"],
            input=json.dumps(template),
            capture_output=True,
            text=True,
            check=False,
        )
        too_much = {_TOO_LARGE: f"{_MEGABYTES:,} MB", -signal.SIGXCPU: f"{_SECONDS} s"}.get(done.returncode)
        if too_much is not None:
            raise ModelError(f"{where}: the chat template of one short question takes more than {too_much}")
        if done.returncode:
            raise RuntimeError(f"{where}: the process that tries a chat template failed: {done.stderr}")


def templates_in(folder: Path) -> dict[str, str]:
    """Return the chat templates in a model folder, by where they are; a tokenizer may have several with names."""
    found: dict[str, str] = {}
    for path in (folder / TEMPLATE_FILE, *sorted((folder / "chat_templates").glob("*.jinja"))):
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
    """Render the template on standard input for one question, as the tokenizers of transformers do."""
    from transformers.utils.chat_template_utils import render_jinja_template

    template = json.load(sys.stdin)
    used = resource.getrusage(resource.RUSAGE_SELF)
    # The kernel counts whole seconds, and sends SIGXCPU at the first limit.
    seconds = int(used.ru_utime + used.ru_stime) + 1 + _SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (_MEGABYTES * 10**6,) * 2)
    turns = [{"role": "user", "content": "What is 77 plus 8?"}]
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    try:
        render_jinja_template([turns], chat_template=template, add_generation_prompt=True, **tokens)
    except MemoryError:
        sys.exit(_TOO_LARGE)
    except TEMPLATE_ERRORS:
        # A prompt that needs it is refused with its words.
        return


if __name__ == "__main__":
    _main()
