"""The workflow, the studies and the profiles as parts of the package, so that a wheel is all that a study needs.

`Snakefile`, `workflow`, `config` and `profiles` beside this file are links into the repository; a wheel has copies.
"""

from pathlib import Path

SHIPPED = Path(__file__).parent
SNAKEFILE = SHIPPED / "Snakefile"
