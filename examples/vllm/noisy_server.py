"""A vLLM server that answers under noise: the noise is in a file, and the receipt is fetched from the server.

The server is the one that `vllm serve MODEL` starts, with one environment variable and one more option.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

from aqnpipe.config.model import builtin_folder

NOISE = "error: {kind: relative_gaussian, scale: 0.05}\nseed: 0\n"
QUESTION = "Tom buys 5 eggs. Tom sells 2 eggs. How many eggs does Tom have now?\n"
COLUMNS = ("passes", "recomputed")
START_SECONDS = 400


@contextmanager
def server(folder, noise, more_options=()):
    """Start the server and yield its address when it answers; ends it."""
    (folder / "noise.yaml").write_text(noise)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {
        "AQNPIPE_VLLM_NOISE": str(folder / "noise.yaml"),
        "VLLM_SERVER_DEV_MODE": "1",  # has the endpoint of the receipt; never on an open network
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    # `vllm serve MODEL` where vLLM has its own name; the command of the CPU build does not find its version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(builtin_folder("tiny"))]
    options = ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "4"]
    needed = ["--enforce-eager", "--no-enable-prefix-caching"]
    extension = ["--worker-extension-cls", "aqnpipe.generation.vllm.serving.ServedNoise"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *options, *needed, *extension, *more_options, "--host", "127.0.0.1", "--port", port],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            wait_for(address, process, folder / "server.log")
            yield address
        finally:
            process.terminate()
            process.wait(60)


def wait_for(address, process, log):
    """Return when the server answers; RuntimeError with the end of its log if it ends."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended:\n{log.read_text()[-20000:]}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(1)
    raise RuntimeError(f"the server does not answer:\n{log.read_text()[-20000:]}")


def post(address, content):
    """Return the answer of the server to `content`, as JSON."""
    request = urllib.request.Request(
        address, json.dumps(content).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, server(Path(folder), NOISE) as address:
        question = {"model": "tiny", "prompt": QUESTION, "max_tokens": 16, "temperature": 0}
        print(post(f"{address}/v1/completions", question)["choices"][0]["text"])
        for worker in post(f"{address}/collective_rpc", {"method": "aqnpipe_receipt"})["results"]:
            if worker["problems"]:
                raise SystemExit("receipt invalid: " + "; ".join(worker["problems"]))
            passes, numbers = (sum(row.get(what, 0) for row in worker["receipt"]["rows"]) for what in COLUMNS)
            print(f"{passes} forwards with noise; {numbers} numbers were recomputed")
