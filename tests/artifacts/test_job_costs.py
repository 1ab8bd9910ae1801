import pytest

from aqnpipe.artifacts.runs import Cost, read_cost
from aqnpipe.errors import DataError

HEADER = "s\tmax_rss\tcpu_time\n"


def test_the_costs_of_a_job_are_read(tmp_path):
    path = tmp_path / "job.tsv"
    path.write_text(HEADER + "27.54\t640.19\t12.23\n")
    assert read_cost(path) == Cost(27.54, 12.23, 640.19)
    assert read_cost(tmp_path / "none.tsv") is None


@pytest.mark.parametrize("text", ["", HEADER, "x\ty\n1\t2\n", HEADER + "fast\n", HEADER + "1\tNA\t2\n"])
def test_a_file_of_another_kind_is_refused(tmp_path, text):
    path = tmp_path / "job.tsv"
    path.write_text(text)
    with pytest.raises(DataError, match=r"job\.tsv: expected columns s, cpu_time and max_rss"):
        read_cost(path)
