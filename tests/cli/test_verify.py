"""`aqnpipe verify`: every file is compared with its record, and damage is one line each."""

import pytest
from typer.testing import CliRunner

from aqnpipe.artifacts.files import write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.cli.main import app
from aqnpipe.errors import ConfigError
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import write_prepared_model
from aqnpipe.models.tokenizer import build_tokenizer
from aqnpipe.runtime.job_records import JobRecord

CHECKPOINT = "runs/base/E5/seed0/checkpoints/step2"


@pytest.fixture
def results(tmp_path, make_model):
    """Results of two jobs: a table, and a run with a checkpoint."""
    folder = tmp_path / "results"
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "table.parquet").write_bytes(b"answers")
    checkpoint = folder / CHECKPOINT
    make_model().save_pretrained(checkpoint)
    build_tokenizer().save_pretrained(checkpoint)
    write_prepared_model(checkpoint, describe_model(checkpoint, "base/E5 seed 0 step 2"))
    (folder / "runs/base/E5/seed0/run.json").write_text("{}")
    for name in ("eval/table.parquet", "runs/base/E5/seed0/run.json"):
        outputs = {name: sha256_of_file(folder / name)}
        write_json(folder / "jobs" / f"{name}.json", JobRecord(parameters="", script=None, inputs={}, outputs=outputs))
    return folder


def run(results, *options):
    found = CliRunner().invoke(app, ["verify", str(results), *options], catch_exceptions=False)
    return found.exit_code, found.stdout.replace(f"{results}/", "").splitlines()


def test_sound_results_have_no_damage(results):
    assert run(results) == (0, ["verify: 2 files of 2 jobs and 1 models are as they were written"])


def test_one_changed_byte_and_a_missing_file_are_a_line_each(results):
    (results / "eval/table.parquet").write_bytes(b"answerz")
    (results / "runs/base/E5/seed0/run.json").unlink()
    assert run(results) == (
        1,
        [
            "eval/table.parquet: changed after it was written (SHA-256 differs)",
            "runs/base/E5/seed0/run.json: missing",
            "verify: 2 damaged or missing files; start the workflow again to make them",
        ],
    )
    assert (results / "eval/table.parquet").exists()


def test_damaged_weights_are_found_and_their_run_is_made_again_after_repair(results):
    weights = results / CHECKPOINT / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, lines = run(results, "--repair")
    assert code == 1
    assert lines[0].startswith(f"{CHECKPOINT}/aqnpipe_model.json: its weights files changed after they were written")
    assert lines[1] == "verify: 1 damaged or missing files; removed; start the workflow again to make them"
    assert not (results / "jobs/runs/base/E5/seed0/run.json.json").exists()
    assert (results / "jobs/eval/table.parquet.json").exists()


def test_a_damaged_record_is_a_line_and_goes_with_repair(results):
    record = results / "jobs/eval/table.parquet.json"
    record.write_text(record.read_text()[:-30])
    assert run(results, "--repair")[1][0] == "jobs/eval/table.parquet.json: no valid record of a job"
    assert not record.exists()


def test_a_file_that_a_job_read_needs_the_record_of_the_job_that_wrote_it(results):
    """Files of the study's own folders and files outside of the results have none."""
    read = {"eval/table.parquet": "1", "config/published.yaml": "2"}
    record = JobRecord(parameters="", script=None, inputs=read, outputs={})
    write_json(results / "jobs" / "claims.json.json", record)
    assert run(results)[0] == 0
    (results / "jobs/eval/table.parquet.json").unlink()
    assert run(results)[1][0] == "eval/table.parquet: the record of the job that wrote it is gone"


def test_what_is_being_written_and_other_studies_are_not_looked_at(results):
    for place in ("models/.base.x.staged/base", "smoke/models/base", "scratch/E5"):
        folder = results / place
        folder.mkdir(parents=True)
        (folder / "aqnpipe_model.json").write_text("{")
    assert run(results)[0] == 0


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no records in jobs/, expected the results folder of a study"):
        run(tmp_path)
