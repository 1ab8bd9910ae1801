"""Two workers of one run as processes that know of the sabotage; the product starts its workers with Ray.

python worker_processes.py FOLDER RANK: one of the workers, with its arguments in FOLDER.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

NUM_WORKERS = 2
_SECONDS, _SECONDS_AFTER_A_FAILURE = 300.0, 10.0
sabotage_name: list[str] = []
"""Name of the sabotage that is being tried; empty for none."""


def launch(spec: Any, inputs: Any, workspace: Any, resume_from: Path | None, say: Any = print) -> None:
    """Take the place of `runtime.training.launch_workers`; raises the error of the first worker that failed."""
    from hold import took_effect

    from aqnpipe.errors import AqnpipeError

    folder = (workspace.folder.parent / "workers").absolute()
    folder.mkdir()
    arguments = (spec, inputs, workspace, resume_from, sabotage_name)
    (folder / "arguments").write_bytes(pickle.dumps(arguments))
    command = [sys.executable, __file__, str(folder)]
    # A relative PYTHONPATH does not hold here: the current folder is that of the study.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    workers = [
        subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.DEVNULL)
        for rank in range(NUM_WORKERS)
    ]
    results: list[Any] = []
    deadline = time.monotonic() + _SECONDS
    with contextlib.ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.kill)
        while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
            time.sleep(0.2)
            results = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("result?"))]
            # A worker whose peer was refused waits for it in vain.
            if any(error is not None for _, error in results):
                deadline = min(deadline, time.monotonic() + _SECONDS_AFTER_A_FAILURE)
        results = [pickle.loads(path.read_bytes()) for path in sorted(folder.glob("result?"))]
    for effects, _ in results:
        for _ in range(effects):
            took_effect()
    errors = [error for _, error in results if error is not None]
    for error in errors:
        if isinstance(error, AqnpipeError):
            raise error
    if errors or len(results) < NUM_WORKERS:
        raise RuntimeError(f"a worker failed: {errors}")


def _work(folder: Path, rank: int) -> None:
    import torch
    from attack_list import SABOTAGES
    from hold import effects
    from torch import distributed

    from aqnpipe.errors import AqnpipeError
    from aqnpipe.training.run import run_worker

    torch.set_num_threads(1)
    *arguments, names = pickle.loads((folder / "arguments").read_bytes())
    chosen = [sabotage for sabotage in SABOTAGES if sabotage.name in names]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_WORKERS)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=NUM_WORKERS)
    error: Any = None
    try:
        with contextlib.ExitStack() as stack:
            for sabotage in chosen:
                stack.enter_context(sabotage.apply(None))  # type: ignore[arg-type]
            run_worker(*arguments, say=lambda _: None)
    except AqnpipeError as refused:
        error = refused
    except Exception:  # noqa: BLE001 - the launching process raises it
        error = traceback.format_exc()
    (folder / f"unfinished{rank}").write_bytes(pickle.dumps((effects(), error)))
    (folder / f"unfinished{rank}").rename(folder / f"result{rank}")
    # Another worker may wait for this one in a collective operation.
    os._exit(0)


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
