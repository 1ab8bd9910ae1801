"""Why evaluations are not submitted as Slurm arrays: what the pinned plugin does with a batch that is not full.

When this fails, the plugin has changed: try arrays again, and correct docs/how-to/thousands-of-runs.md.
"""

import logging
from types import SimpleNamespace

import pytest

slurm = pytest.importorskip("snakemake_executor_plugin_slurm")


def submitted(arrays: set[str], num_selected: int, num_still_ready: int) -> int:
    """Return how many of the jobs that the scheduler selected are submitted, while others stay ready."""
    jobs = [
        SimpleNamespace(rule=SimpleNamespace(name="evaluate"), name="evaluate", is_group=lambda: False)
        for _ in range(num_selected + num_still_ready)
    ]
    executor = object.__new__(slurm.Executor)
    executor.array_jobs, executor.max_array_size = arrays, 1000
    executor.logger, executor._main_event_loop = logging.getLogger(__name__), None
    executor.workflow = SimpleNamespace(dag=SimpleNamespace(ready_jobs=jobs[num_selected:]))
    found = []
    executor._submit_job, executor._submit_array_jobs = found.append, found.extend
    executor.run_jobs(jobs[:num_selected])
    return len(found)


@pytest.mark.parametrize(("num_selected", "num_still_ready"), [(2, 4), (1, 2)])
def test_jobs_of_a_batch_that_is_not_full_are_submitted_only_without_arrays(num_selected, num_still_ready):
    assert submitted(set(), num_selected, num_still_ready) == num_selected
    assert submitted({"evaluate"}, num_selected, num_still_ready) == 0


def test_a_batch_of_all_ready_jobs_is_submitted():
    assert submitted({"evaluate"}, 6, 0) == 6
