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
    words = order["model"]["name"].split()
    if order["num_ranks"]:
        be_a_rank(order, words)
        return
    # The first device does what its model is called, the others are healthy and wait with it.
    words = [word for word in words if not word.startswith("rank-")]
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


def be_a_rank(order: dict, words: list[str]) -> None:
    """The second rank does what the words with rank- say, the others miss it."""
    say("all_reduce of 7 elements, call 1")
    if "rank-dies" in words or "rank-hangs" in words:
        while order["rank"] == 0 or "rank-hangs" in words:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    if "rank-errs" in words and order["rank"] == 1:
        say("ERROR: cpu: Connection closed by peer")
        sys.exit(2)
    shutil.copy(Path(os.environ["PRETENDED_REPORTS"]) / "rank.json", order["report"])


if __name__ == "__main__":
    main()
