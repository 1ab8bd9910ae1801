"""`aqnpipe verify`: every file is compared with its record, and damage is one line each."""

import errno
import os
import shutil

import pytest
from tiny_tokenizer import build_tokenizer
from typed import typed

from aqnpipe.artifacts.files import digests_of, read_json, write_json
from aqnpipe.artifacts.provenance import sha256_of_file
from aqnpipe.artifacts.runs import REMOVED_WEIGHTS_FILE, RemovedWeights, RunRecord
from aqnpipe.errors import ConfigError, DataError, RunLockedError
from aqnpipe.models.loading import describe_model
from aqnpipe.models.prepared import write_prepared_model
from aqnpipe.runtime.job_records import JobRecord
from aqnpipe.runtime.locks import FileLock

CHECKPOINT = "runs/base/E5/seed0/checkpoints/step2"


@pytest.fixture
def results(tmp_path, make_model):
    """Results of two jobs, a table and a run with a checkpoint, and a prepared model."""
    folder = tmp_path / "results"
    (folder / "eval").mkdir(parents=True)
    (folder / "eval" / "table.parquet").write_bytes(b"answers")
    checkpoint = folder / CHECKPOINT
    make_model().save_pretrained(checkpoint)
    build_tokenizer().save_pretrained(checkpoint)
    write_prepared_model(checkpoint, describe_model(checkpoint, "base/E5 seed 0 step 2"))
    shutil.copytree(checkpoint, folder / "models/base")
    run = folder / "runs/base/E5/seed0"
    record = RunRecord(
        stage="train", identity={}, config={}, code_digest="", inputs_sha256={}, versions={}, device="cpu",
        outputs_sha256=digests_of(run),
    )  # fmt: skip
    write_json(run / "run.json", record)
    for name in ("eval/table.parquet", "runs/base/E5/seed0/run.json"):
        write_record(folder, name)
    return folder


def write_record(results, name, inputs=(), **changes):
    """Write the record of a job that read `inputs` and wrote `name`."""
    digests = [{each: sha256_of_file(results / each) for each in names} for names in (inputs, [name])]
    record = JobRecord(parameters="", script=None, inputs=digests[0], outputs=digests[1])
    write_json(results / "jobs" / f"{name}.json", record.model_copy(update=changes))


def run(results, *options):
    found = typed("verify", str(results), *options, catch_exceptions=False)
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
    assert lines[0] == f"{CHECKPOINT}/model.safetensors: changed after it was written (SHA-256 differs)"
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
    (results / "claims.json").write_text("{}")
    (results / "config").mkdir()
    (results / "config/published.yaml").write_text("")
    write_record(results, "claims.json", ["eval/table.parquet", "config/published.yaml"])
    assert run(results)[0] == 0
    (results / "jobs/eval/table.parquet.json").unlink()
    assert run(results)[1][0] == "eval/table.parquet: the record of the job that wrote it is gone"


def test_a_file_that_was_changed_with_its_record_is_not_what_the_next_job_read(results):
    (results / "claims.json").write_text("{}")
    write_record(results, "claims.json", ["eval/table.parquet"])
    (results / "eval/table.parquet").write_bytes(b"better answers")
    write_record(results, "eval/table.parquet")
    assert run(results)[1][0] == "claims.json: made from another eval/table.parquet than the one that is there"


@pytest.mark.parametrize("name", ["../precious", "/tmp/precious"])
def test_a_record_that_names_a_file_elsewhere_is_none_and_the_file_stays(results, name):
    precious = results / name
    precious.write_text("precious")
    write_record(results, "eval/table.parquet", outputs={"eval/table.parquet": "0", name: "0"})
    line = f"jobs/eval/table.parquet.json: no valid record of a job: it names {name}, which is not in the results"
    assert run(results, "--repair")[1][0] == line
    assert precious.read_text() == "precious"
    precious.unlink()


@pytest.mark.parametrize("name", ["../../../../../precious", "/tmp/precious-of-a-run"])
def test_a_run_that_names_a_file_elsewhere_is_none_and_the_file_stays(results, name):
    run_json = "runs/base/E5/seed0/run.json"
    precious = (results / run_json).parent / name
    precious.write_text("precious")
    record = read_json(results / run_json, RunRecord)
    write_json(results / run_json, record.model_copy(update={"outputs_sha256": record.outputs_sha256 | {name: "0"}}))
    write_record(results, run_json)
    line = f"{run_json}: no valid record of a run: it names {name}, which is not in the run"
    assert run(results, "--repair")[1][0] == line
    assert precious.read_text() == "precious"
    precious.unlink()


def test_a_record_without_its_own_output_is_none(results):
    write_record(results, "eval/table.parquet", outputs={})
    assert run(results)[1][0].endswith("no valid record of a job: it does not name eval/table.parquet")


def test_files_of_a_checkpoint_that_are_gone_or_exchanged_are_found(results):
    (results / CHECKPOINT / "aqnpipe_model.json").unlink()
    (results / CHECKPOINT / "config.json").write_text("{}")
    assert sorted(run(results)[1][:2]) == [
        f"{CHECKPOINT}/aqnpipe_model.json: missing",
        f"{CHECKPOINT}/config.json: changed after it was written (SHA-256 differs)",
    ]


def test_weights_that_the_study_removed_are_not_missing(results):
    weights = results / CHECKPOINT / "model.safetensors"
    removed = RemovedWeights(keep="last", files_sha256={weights.name: sha256_of_file(weights)}, untrained=False)
    write_json(results / CHECKPOINT / REMOVED_WEIGHTS_FILE, removed)
    weights.unlink()
    assert run(results)[0] == 0


@pytest.mark.parametrize("name", ["eval/table.parquet", "jobs/eval/table.parquet.json"])
def test_a_pipe_or_a_folder_in_the_place_of_a_file_is_a_line(results, name):
    (results / name).unlink()
    os.mkfifo(results / name)
    assert run(results)[1][0].startswith(f"{name}: ")
    (results / name).unlink()
    (results / name).mkdir()
    assert run(results, "--repair")[1][0].startswith(f"{name}: ")
    assert (results / name).is_dir()


def test_a_damaged_prepared_model_is_found(results):
    (results / "models/base/config.json").write_text("{}")
    lines = run(results)[1]
    assert lines[0].startswith("models/base/aqnpipe_model.json: its config files changed")
    assert lines[-1].endswith("; remove them by --repair, then start the workflow again to make them")


def test_results_that_a_process_works_on_are_not_repaired(results):
    (results / "eval/table.parquet").unlink()
    (results / "logs").mkdir()
    with FileLock(results / "logs/study.lock") as lock:
        assert lock.acquire()
        with pytest.raises(RunLockedError, match="works on this study"):
            run(results, "--repair")
        assert (results / "jobs/eval/table.parquet.json").exists()
        assert run(results)[0] == 1
    assert run(results, "--repair")[1][-1].endswith("removed; start the workflow again to make them")


def test_a_file_of_another_user_is_no_damage(results, monkeypatch):
    """As root every file can be read."""

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("aqnpipe.artifacts.provenance.sha256_of_file", refused)
    with pytest.raises(DataError, match=r"table\.parquet: cannot be read \(Permission denied\)"):
        run(results, "--repair")
    assert (results / "eval/table.parquet").exists()


def test_a_name_with_control_characters_is_one_line(results):
    (results / "jobs/a\nb\x1b.json").write_text("{}")
    assert run(results)[1][0] == "jobs/a\\nb\\x1b.json: no valid record of a job"


def test_what_is_being_written_and_other_studies_are_not_looked_at(results):
    for place in ("models/.base.x.staged/base", "smoke/models/base", "scratch/E5"):
        folder = results / place
        folder.mkdir(parents=True)
        (folder / "aqnpipe_model.json").write_text("{")
    assert run(results)[0] == 0


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no records in jobs/, expected the results folder of a study"):
        run(tmp_path)
    with pytest.raises(ConfigError, match=r"nowhere: no such folder, expected the results folder of a study"):
        run(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["eval/" + "n" * 300, "eval/" + "a/" * 2000, "eval/a\0b", ""])
def test_a_record_of_a_name_that_no_file_can_have_is_one_line(results, name):
    write_record(results, "eval/table.parquet", outputs={"eval/table.parquet": "0" * 64, name: "0" * 64})
    code, lines = run(results, "--repair")
    assert code == 1
    assert lines[0].startswith("jobs/eval/table.parquet.json: no valid record of a job: it names ")
    assert (results / "eval/table.parquet").exists()


def test_a_link_in_results_from_elsewhere_cannot_have_other_files_removed(results, tmp_path):
    """Nor a link to itself; a link in the place of a file is removed, not what it leads to."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years")
    (results / "srdd").symlink_to(mine)
    (results / "data").symlink_to(results / "data")
    for name in ("srdd/thesis.tex", "data/train.parquet"):
        record = JobRecord(parameters="", script=None, inputs={}, outputs={name: "0" * 64})
        write_json(results / "jobs" / f"{name}.json", record)
    (results / "eval/table.parquet").unlink()
    (results / "eval/table.parquet").symlink_to(mine / "thesis.tex")
    code, lines = run(results, "--repair")
    assert (code, lines[-2:]) == (
        1,
        [
            "srdd/thesis.tex: not removed: a folder, or a link leads to it; remove it yourself",
            "verify: 3 damaged or missing files; start the workflow again to make them",
        ],
    )
    assert (mine / "thesis.tex").read_text() == "years"
    assert not os.path.lexists(results / "eval/table.parquet")


def test_results_behind_a_link_are_repaired(results, tmp_path):
    (tmp_path / "linked").symlink_to(results)
    (results / "eval/table.parquet").write_bytes(b"answerz")
    assert run(tmp_path / "linked", "--repair")[0] == 1
    assert not (results / "eval/table.parquet").exists()
