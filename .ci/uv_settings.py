"""The settings of pip as environment variables of uv, which reads neither pip's configuration nor its variables."""

import ast
import os
import re
import subprocess

_VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def uv_environment(python: str) -> dict[str, str]:
    """Return this process's environment with the places of packages that a Python's pip uses; variables of uv stay."""
    command = [python, "-m", "pip", "config", "list"]
    listing = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - an interpreter
    settings: dict[str, str] = {}
    # Variables of the environment take precedence over files.
    found = re.findall(r"^(global|install|:env:)\.([a-z-]+)=(.*)$", listing.stdout, re.MULTILINE)
    for _, key, value in sorted(found, key=lambda setting: setting[0] == ":env:"):
        if key in _VARIABLES:
            settings[_VARIABLES[key]] = " ".join(str(ast.literal_eval(value)).split())
    if "UV_FIND_LINKS" in settings:
        settings["UV_FIND_LINKS"] = settings["UV_FIND_LINKS"].replace(" ", ",")
    # As pip, which takes the best version of all indexes.
    return {"UV_INDEX_STRATEGY": "unsafe-best-match", **settings, **os.environ}
