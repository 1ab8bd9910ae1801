"""`aqnpipe lm-eval`: the command line of lm-evaluation-harness, which finds no models of other packages by itself."""

import sys
from typing import Annotated

import typer

from aqnpipe.errors import ConfigError


def lm_eval(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS...", help="as of `lm_eval`, with --model aqnpipe")
    ] = None,
) -> None:
    """Evaluate a model under noise on tasks of lm-evaluation-harness.

    Example: `aqnpipe lm-eval --model aqnpipe --model_args pretrained=./model,noise=0.05,noise_seed=0 --tasks gsm8k`.
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise ConfigError("lm-evaluation-harness is not installed: pip install 'aqnpipe[lm-eval]'") from error
    import aqnpipe.integrations.lm_harness  # noqa: F401 - registers the model

    # The harness reads its arguments from there.
    sys.argv = ["lm-eval", *(arguments or ["--help"])]
    cli_evaluate()
