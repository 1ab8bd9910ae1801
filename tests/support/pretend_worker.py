"""A process that takes the place of `aqnpipe.cli.diagnose.worker` in tests: what it does is the name of its model.

It imports nothing that is slow. Reports are copied from the folder PRETENDED_REPORTS.
"""

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    stopped = []
    signal.signal(signal.SIGINT, lambda *_: stopped.append(True))
    order = json.loads(Path(sys.argv[1]).read_text())
    # The first device does what its model is called, the others are healthy and wait with it.
    words = order["model"]["name"].split()
    if Path(order["report"]).stem != "0":
        words = ["healthy", *(word for word in words if word == "wait")]
    for name in ("fault", "healthy"):
        if name in words:
            shutil.copy(Path(os.environ["PRETENDED_REPORTS"]) / f"{name}.json", order["report"])
    say(f"process {os.getpid()}")
    if "crash" in words:
        say("CUDA error: an illegal memory access was encountered")
        os.kill(os.getpid(), signal.SIGKILL)
    if "refuse" in words:
        say("ERROR: --device cuda:9: not usable here (no such device)")
        sys.exit(2)
    while "wait" in words and not stopped:
        time.sleep(0.02)
    if stopped and "deaf" in words:
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
