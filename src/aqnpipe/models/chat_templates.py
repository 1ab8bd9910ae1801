"""Tries a model's chat template in a process of its own: a template is a program, which may never end."""

import json
import resource
import subprocess
import sys
from pathlib import Path

from aqnpipe.config.model import read_json_object
from aqnpipe.errors import ModelError

TEMPLATE_FILE = "chat_template.jinja"
_SECONDS = 30
_MEGABYTES = 4_000
_MOST_CHARACTERS = 1_000_000
_TOO_LARGE = 3


def refuse_endless_templates(folder: Path) -> None:
    """Raise ModelError if a chat template of a model folder does not end within half a minute and 4 GB of memory.

    Templates that cannot be rendered pass: they are refused where a prompt needs them.
    """
    for where, template in _templates(folder).items():
        if len(template) > _MOST_CHARACTERS:
            found = f"{len(template):,} characters, expected {_MOST_CHARACTERS:,} at most"
            raise ModelError(f"{where}: a chat template of {found}")
        what = f"{where}: the chat template of one short question takes"
        try:
            done = subprocess.run(
                [sys.executable, "-m", "aqnpipe.models.chat_templates"],
                input=json.dumps(template),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                timeout=_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ModelError(f"{what} more than {_SECONDS} s") from error
        if done.returncode == _TOO_LARGE:
            raise ModelError(f"{what} more than {_MEGABYTES:,} MB")
        if done.returncode:
            raise RuntimeError(f"{where}: the process that tries a chat template failed: {done.stderr}")


def _templates(folder: Path) -> dict[str, str]:
    """Return the chat templates in a model folder, by where they are; a tokenizer may have several with names."""
    found: dict[str, str] = {}
    if (own := folder / TEMPLATE_FILE).is_file():
        found[str(own)] = own.read_text(encoding="utf-8")
    settings = folder / "tokenizer_config.json"
    stored = read_json_object(settings).get("chat_template") if settings.is_file() else None
    named = stored if isinstance(stored, list) else [{"name": "chat_template", "template": stored}]
    for entry in named:
        if isinstance(entry, dict) and isinstance(entry.get("template"), str):
            found[f"{settings}: {entry.get('name')}"] = entry["template"]
    return found


def _main() -> None:
    """Render the template on standard input for one question, as the tokenizers of transformers do."""
    from jinja2 import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    template = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (_MEGABYTES * 10**6,) * 2)
    turns = [{"role": "user", "content": "What is 77 plus 8?"}]
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    try:
        render_jinja_template([turns], chat_template=template, add_generation_prompt=True, **tokens)
    except MemoryError:
        sys.exit(_TOO_LARGE)
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError):
        # Whatever a template can raise; a prompt that needs it is refused with its words.
        return


if __name__ == "__main__":
    _main()
