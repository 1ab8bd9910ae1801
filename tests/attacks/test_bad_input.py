"""Bad input of every kind: one clear line of an AqnpipeError or a sound result, and nothing left behind.

`AQNPIPE_FUZZ_EXAMPLES` sets how many examples each property gets: 20 as part of the tests, thousands in a long run.
"""

import copy
import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import polars as pl
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aqnpipe.artifacts.diagnoses import DiagnosisOrigin, Verdict
from aqnpipe.artifacts.files import read_json, read_table, read_yaml, write_json, write_table, write_yaml
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.cli.score import read_transcripts, score_transcripts
from aqnpipe.config.dataset import LocalDataset
from aqnpipe.config.fault_spec import parse_fault
from aqnpipe.config.model import ModelConfig, builtin_folder
from aqnpipe.config.study import load_study_file
from aqnpipe.data.loader import load_problems
from aqnpipe.data.scoring import SCORERS, grade
from aqnpipe.errors import EXIT_USER_ERROR, AqnpipeError, DataError, ModelError
from aqnpipe.models.loading import prepare_model, refuse_damaged
from aqnpipe.published.check import check_published_file

ROOT = Path(__file__).parents[2]
EXAMPLES = int(os.environ.get("AQNPIPE_FUZZ_EXAMPLES", "20"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.dates().map(str),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
hostile = st.sampled_from(
    [
        "\x1b[2J\x1b]0;owned\x07",
        "<script>alert(1)</script>",
        "\u202eevil",
        "a\r\nERROR: forged",
        "x" * 100_000,
        "\ud800",
    ]
) | st.text(max_size=40)


_MEMORY_BOUND = 512 * 2**20


@pytest.fixture(autouse=True)
def _bounded_memory():
    """No input makes the process grow by more than 512 MiB at any moment of a test."""
    status = Path("/proc/self/status")
    if not status.exists():
        yield
        return

    def kilobytes(name):
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1])

    Path("/proc/self/clear_refs").write_text("5")  # The peak is counted from here.
    before = kilobytes("VmRSS")
    yield
    assert (kilobytes("VmHWM") - before) * 1024 < _MEMORY_BOUND


@contextmanager
def one_clear_line():
    """Let the body end well or by an AqnpipeError of one printable line; anything else fails the test."""
    refusals: list[AqnpipeError] = []
    try:
        yield refusals
    except AqnpipeError as error:
        refusals.append(error)
    for refusal in refusals:
        text = str(refusal)
        assert text.isprintable(), repr(text)
        assert 0 < len(text) < 5000
        assert refusal.exit_code == EXIT_USER_ERROR


def damaged(draw, content: bytes) -> bytes:
    """Cut, flip, overwrite, double or insert some range of bytes."""
    start = draw(st.integers(0, len(content) - 1))
    length = draw(st.integers(1, max(1, len(content) - start)))
    match draw(st.sampled_from(["truncate", "flip", "zero", "drop", "double", "insert"])):
        case "truncate":
            return content[:start]
        case "flip":
            return content[:start] + bytes([content[start] ^ (1 << draw(st.integers(0, 7)))]) + content[start + 1 :]
        case "zero":
            return content[:start] + bytes(length) + content[start + length :]
        case "drop":
            return content[:start] + content[start + length :]
        case "double":
            return content[: start + length] + content[start:]
        case _:
            return content[:start] + draw(st.binary(min_size=1, max_size=8)) + content[start:]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    """One artifact of every format, and how it is read."""
    folder = tmp_path_factory.mktemp("artifacts")
    problems = {name: [f"{name} {row}" for row in range(50)] for name in ("question_id", "question", "answer")}
    write_table(folder / "table.parquet", pl.DataFrame(problems | {"gold_answer": ["1"] * 50}), ProblemTable)
    origin = DiagnosisOrigin(model="base", machine="device", weights_sha256="0" * 64, layers_sha256="1" * 64)
    write_json(folder / "origin.json", origin)
    write_yaml(folder / "origin.yaml", origin)
    return folder


READERS = {
    "table.parquet": lambda path: read_table(path, ProblemTable),
    "origin.json": lambda path: read_json(path, DiagnosisOrigin),
    "origin.yaml": lambda path: read_yaml(path, DiagnosisOrigin),
}


@pytest.mark.parametrize("name", READERS)
@given(data=st.data())
@fuzzed
def test_a_damaged_artifact_is_never_used(artifacts, tmp_path, name, data):
    whole = (artifacts / name).read_bytes()
    broken = damaged(data.draw, whole)
    (tmp_path / name).write_bytes(broken)
    if broken == whole:
        READERS[name](tmp_path / name)
        return
    with pytest.raises(DataError) as caught:
        READERS[name](tmp_path / name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", READERS)
def test_every_byte_and_every_length_is_noticed(artifacts, tmp_path, name):
    """Not a sample: each single flipped byte and each length, in steps that cover the file."""
    whole = (artifacts / name).read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 400)):
        for broken in (whole[:place], whole[:place] + bytes([whole[place] ^ 0x20]) + whole[place + 1 :]):
            (tmp_path / name).write_bytes(broken)
            with pytest.raises(DataError, match=name.replace(".", r"\.")):
                READERS[name](tmp_path / name)


@given(content=anything)
@fuzzed
def test_any_other_content_with_a_checksum_is_refused(tmp_path, content):
    from aqnpipe.artifacts.files import CHECKSUM_PLACEHOLDER, with_checksum

    text = json.dumps({"x": content}, indent=2).removesuffix("\n}") + f',\n  "checksum": "{CHECKSUM_PLACEHOLDER}"\n}}\n'
    (tmp_path / "v.json").write_bytes(with_checksum(text.encode()))
    with one_clear_line() as refusals:
        read_json(tmp_path / "v.json", Verdict)
    assert refusals


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A prepared model."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    prepare_model(ModelConfig(source="tiny"), folder)
    return folder


@given(data=st.data())
@fuzzed
def test_a_damaged_checkpoint_is_never_used(checkpoint, tmp_path, data):
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    shutil.copytree(checkpoint, tmp_path / "copy", copy_function=os.link)
    path = data.draw(st.sampled_from(sorted((tmp_path / "copy").iterdir())))
    whole = path.read_bytes()
    broken = damaged(data.draw, whole)
    path.unlink()
    path.write_bytes(broken)
    if broken != whole:
        with pytest.raises(ModelError) as caught:
            refuse_damaged(tmp_path / "copy")
        assert str(caught.value).isprintable()


@given(data=st.data())
@fuzzed
def test_any_model_folder_is_prepared_or_refused(checkpoint, tmp_path, data):
    folder = tmp_path / "source"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(builtin_folder("tiny"), folder, copy_function=os.link)
    path = folder / data.draw(st.sampled_from(["config.json", "tokenizer_config.json", "model.safetensors"]))
    whole = path.read_bytes()
    path.unlink()
    if path.suffix == ".json" and data.draw(st.booleans()):
        content = json.loads(whole)
        content[data.draw(st.sampled_from(sorted(content)))] = data.draw(anything)
        path.write_text(json.dumps(content), encoding="utf-8")
    else:
        path.write_bytes(damaged(data.draw, whole))
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").mkdir()
    with one_clear_line() as refusals:
        prepare_model(ModelConfig(source=str(folder)), tmp_path / "out" / "model")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ([] if refusals else ["model"])


def places(content, where=()):
    """Every place in nested lists and mappings."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in items:
        yield (*where, key)
        yield from places(value, (*where, key))


def changed(data, content):
    """Put anything in one place of `content`, or take the place away, or add a key beside it."""
    content = copy.deepcopy(content)
    *path, last = data.draw(st.sampled_from(list(places(content))))
    inner = content
    for key in path:
        inner = inner[key]
    match data.draw(st.sampled_from(["replace", "remove", "add"])):
        case "replace":
            inner[last] = data.draw(anything | hostile)
        case "remove":
            del inner[last]
        case "add" if isinstance(inner, dict):
            inner[data.draw(hostile)] = data.draw(anything)
    return content


@pytest.mark.parametrize("name", ["smoke", "arms"])
@given(data=st.data())
@fuzzed
def test_any_study_is_valid_or_refused(tmp_path, monkeypatch, name, data):
    monkeypatch.chdir(tmp_path)
    Path("config").mkdir(exist_ok=True)
    for stem in ("smoke", "arms"):
        content = yaml.safe_load((ROOT / "config" / f"{stem}.yaml").read_text(encoding="utf-8"))
        if stem == name:
            content = changed(data, content)
        text = yaml.safe_dump(content, allow_unicode=False)
        Path(f"config/{stem}.yaml").write_text(text, encoding="utf-8")
    with one_clear_line():
        load_study_file(Path("config/smoke.yaml"))
    assert sorted(str(path) for path in Path().rglob("*.*")) == ["config/arms.yaml", "config/smoke.yaml"]


@given(content=st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@fuzzed
def test_any_bytes_as_a_study_or_as_published_figures_are_refused(tmp_path, content):
    (tmp_path / "any.yaml").write_bytes(content)
    for read in (load_study_file, check_published_file):
        with one_clear_line() as refusals:
            read(tmp_path / "any.yaml")
        assert refusals


@given(data=st.data())
@fuzzed
def test_any_published_figures_are_checked_or_refused(tmp_path, data):
    content = yaml.safe_load((ROOT / "config" / "published.yaml").read_text(encoding="utf-8"))
    (tmp_path / "published.yaml").write_text(yaml.safe_dump(changed(data, content)), encoding="utf-8")
    with one_clear_line():
        check_published_file(tmp_path / "published.yaml")


@given(data=st.data())
@fuzzed
def test_any_data_set_is_loaded_or_refused(tmp_path, data):
    rows = [{"question": f"What is {n} ?", "answer": f"#### {n}"} for n in range(4)]
    (tmp_path / "test.jsonl").write_text('{"question": "And ?", "answer": "#### 1"}\n', encoding="utf-8")
    lines = [json.dumps(changed(data, row) if data.draw(st.booleans()) else row) for row in rows]
    text = "\n".join(lines).encode()
    (tmp_path / "train.jsonl").write_bytes(damaged(data.draw, text) if data.draw(st.booleans()) else text)
    with one_clear_line():
        table = load_problems(LocalDataset(source="local", path=str(tmp_path)), "train")
        assert table["gold_answer"].null_count() == 0


@given(content=st.binary(min_size=1, max_size=300))
@fuzzed
def test_any_bytes_as_a_data_set_are_refused(tmp_path, content):
    (tmp_path / "test.jsonl").write_text('{"question": "And ?", "answer": "#### 1"}\n', encoding="utf-8")
    (tmp_path / "train.parquet").write_bytes(content)
    with one_clear_line() as refusals:
        load_problems(LocalDataset(source="local", path=str(tmp_path)), "train")
    assert refusals


@given(data=st.data())
@fuzzed
def test_any_transcripts_are_scored_or_refused(tmp_path, data):
    line = {"response": data.draw(hostile), "gold_answer": "5", "finish_reason": "stop", "question_id": "q"}
    text = json.dumps(changed(data, line) if data.draw(st.booleans()) else line).encode()
    (tmp_path / "t.jsonl").write_bytes(damaged(data.draw, text) if data.draw(st.booleans()) else text)
    with one_clear_line():
        score_transcripts("t", read_transcripts(tmp_path / "t.jsonl"))


@given(
    spec=st.text(max_size=60)
    | st.lists(st.tuples(st.sampled_from(["type", "layer", "magnitude", "x"]), hostile)).map(
        lambda pairs: ",".join(f"{key}={value}" for key, value in pairs)
    )
)
@fuzzed
def test_any_fault_is_parsed_or_refused(spec):
    with one_clear_line():
        parse_fault(spec)


@given(
    text=hostile | st.sampled_from(["#" * 50_000, "1" * 50_000, "#### " + "1," * 25_000, "-" * 50_000, "$" * 50_000])
)
@fuzzed
def test_any_response_is_graded(text):
    for scorer in SCORERS:
        grade(text, "5", scorer)


REFUSED_AS_COMMANDS = {
    "a study with a misspelt key": (["check", "study.yaml"], "study.yaml", b"seeeds: [0]\n"),
    "a study that is no YAML": (["check", "study.yaml"], "study.yaml", b"a: [\x1b[31m\n"),
    "figures that are no text": (["check-published", "figures.yaml"], "figures.yaml", b"\xff\xfe\x00"),
    "a transcript without responses": (["score", "t.jsonl"], "t.jsonl", b'{"gold_answer": "5"}\n'),
    "a fault of no known type": (["diagnose", "tiny", "--fault", "type=x,layer=1"], "none", b""),
    "a model folder with nothing in it": (["diagnose", "./model"], "model/notes", b"x"),
    "a diagnosis cut in two": (["sigmas", "diagnosis.json"], "diagnosis.json", b'{"verdict": "heal'),
    "an arm that nobody declared": (["measure-noise", "tiny", "--arm", "E99"], "none", b""),
}


@pytest.mark.parametrize("name", REFUSED_AS_COMMANDS)
def test_a_command_ends_with_exit_code_2_and_one_line(command_line, tmp_path, monkeypatch, name):
    arguments, file, content = REFUSED_AS_COMMANDS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    done = command_line(*arguments)
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
    assert line.isprintable()
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()) == [file]
