"""Loaded by torch in every process (entry point group `torch.backends`); does nothing unless a machine is asked for.

It imports nothing then, so `import torch` costs and risks nothing. With the variable set, a failure ends the process:
what was asked for must happen.
"""

import os

VARIABLE = "AQNPIPE_MACHINE"
"""Environment variable with the machine as JSON (`program.ProgramMachine`); `aqnpipe exec` sets it."""


def autoload() -> None:
    """Simulate the machine that the environment asks for."""
    if specification := os.environ.get(VARIABLE):
        from aqnpipe.noise.program import begin

        begin(specification)
