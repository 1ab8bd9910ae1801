"""`aqnpipe view`: pages on this machine alone, with every response, and nothing of a response is markup."""

import http.client
import re
import shutil
import socket
import stat
import struct
import threading
import time
from html import unescape
from html.parser import HTMLParser
from urllib.parse import quote

import polars as pl
import pytest
import synthetic_study
from checksum_files import write_parquet_with_checksum
from typer.testing import CliRunner

from aqnpipe.artifacts.files import read_json, write_json
from aqnpipe.artifacts.runs import RunRecord
from aqnpipe.cli.main import app
from aqnpipe.cli.view import open_server
from aqnpipe.comparison.stage import compare
from aqnpipe.errors import ConfigError, DataError
from aqnpipe.report import responses
from aqnpipe.report.responses import ResponsePages, Responses, differing

ODD = ("seed0/step" + "9" * 200, "seed\u0663/step1", "seed0/stepx")
HOSTILE = "<script>alert(1)</script>\u202e needle"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of a synthetic study as the workflow lays them out; one response is hostile."""
    made_in, folder = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("results")
    study = synthetic_study.study(arms=["baseline", "E5"], comparisons=[])
    made = synthetic_study.write_study(made_in, study, 40)
    compare(study, made.evaluations, folder)
    for source in made.evaluations:
        target = folder / "eval" / source.model / source.arm / f"seed{source.seed}" / f"step{source.step}.parquet"
        target.parent.mkdir(parents=True)
        table = pl.read_parquet(source.table)
        if (source.arm, source.seed) == ("E5", 1):
            table = table.with_columns(
                response=pl.when(pl.col("question_id") == "q00003").then(pl.lit(HOSTILE)).otherwise("response")
            )
        write_parquet_with_checksum(target, table)
    (folder / "data").mkdir()
    (folder / "data" / "test.parquet").write_bytes(made.test_problems.read_bytes())
    (folder / "report.html").write_text("<!DOCTYPE html><title>the report</title>")
    return folder


@pytest.fixture(scope="module")
def get(results):
    """Function (path, headers) -> (status, headers, body) of the running server."""
    server = open_server(results, 0, None, "en")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    port = server.server_address[1]

    def fetch(path, method="GET", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        known = {"Host": f"127.0.0.1:{port}", "Cookie": f"aqnpipe-view-{port}={server.token}"}
        connection.request(method, path, headers=known | headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()

    fetch.address, fetch.token = server.server_address, server.token
    yield fetch
    server.shutdown()
    server.server_close()
    thread.join()


def tags(html):
    found = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: found.append(tag)
    parser.feed(html)
    return found


def test_only_this_machine_is_answered(get):
    assert get.address[0] == "127.0.0.1"
    assert get("/", Host="evil.example")[0] == 421
    assert get("/", Host="")[0] == 421
    assert get("/", method="POST")[0] == 501
    status, headers, _ = get("/")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'sha256-")
    assert headers["X-Content-Type-Options"] == "nosniff"


def test_other_users_of_the_machine_lack_the_token(get):
    port = get.address[1]
    for cookie in ("", f"aqnpipe-view-{port}=guess", f"other={get.token}", "\x00;;=", f"aqnpipe-view-{port}="):
        for path in ("/", "/report.html", "/question/q00003", "/?token=", "/?token=guess", "/?token=%ff"):
            status, headers, body = get(path, Cookie=cookie)
            assert (status, body) == (403, "expected the address that aqnpipe view printed, with its token\n")
            assert "Set-Cookie" not in headers


def test_an_address_that_is_none_is_one_line_for_everyone(get):
    for cookie in ({}, {"Cookie": ""}):
        assert get("http://[::1", **cookie)[0] == 400


@pytest.mark.parametrize("other", ['{"x":1}', "q", "a b=c d", 'w="', "ü=1"])
def test_cookies_of_other_programs_on_this_machine_do_not_hide_the_token(get, other):
    own = f"aqnpipe-view-{get.address[1]}={get.token}"
    for cookie in (f"{other}; {own}", f"{own};{other}"):
        assert get("/", Cookie=cookie.encode())[0] == 200


def test_the_printed_address_opens_every_page(get):
    status, headers, body = get(f"/?token={get.token}", Cookie="")
    assert (status, headers["Location"], body) == (303, "/", "")
    cookie = headers["Set-Cookie"]
    assert cookie.endswith("; HttpOnly; SameSite=Strict; Path=/")
    assert get("/", Cookie=cookie.partition(";")[0])[0] == 200
    assert get(f"/report.html?token={get.token}", Cookie="")[1]["Location"] == "/report.html"


def test_a_socket_is_readable_by_its_owner_alone(results, tmp_path):
    path = tmp_path / "view.sock"
    server = open_server(results, path, None, "en")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for host, status in (("localhost:8719", 200), ("evil.example:8719", 421)):
            client = socket.socket(socket.AF_UNIX)
            client.connect(str(path))
            connection = http.client.HTTPConnection("localhost", timeout=60)
            connection.sock = client
            headers = {"Host": host, "Cookie": f"aqnpipe-view-8719={server.token}"}
            connection.request("GET", "/", headers=headers)
            assert connection.getresponse().status == status
            connection.close()
        (tmp_path / "notes").write_text("mine")
        for taken in (path, tmp_path / "notes", tmp_path / "none" / "view.sock"):
            with pytest.raises(ConfigError, match=r"--socket: .* cannot be used"):
                open_server(results, taken, None, "en")
        assert path.is_socket()
        assert (tmp_path / "notes").read_text() == "mine"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not path.exists()


def test_the_socket_of_a_server_that_was_killed_is_replaced(results, tmp_path):
    path = tmp_path / "view.sock"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    open_server(results, path, None, "en").server_close()
    assert not path.exists()


def test_no_address_reaches_a_file(get):
    for path in ("/../../etc/passwd", "/eval/base/E5/seed0/step60.parquet", "/claims.json", "/question/../claims.json"):
        status, _, body = get(path)
        assert status == 404
        assert "checksum" not in body
    assert "the report" in get("/report.html")[2]


def test_a_link_in_the_results_shows_no_other_file(get, results, tmp_path):
    page = results / "report.html"
    (tmp_path / "private").write_text("private")
    kept = page.rename(results / "kept.html")
    try:
        page.symlink_to(tmp_path / "private")
        status, _, body = get("/report.html")
        assert status == 404
        assert "private" not in body
    finally:
        page.unlink()
        kept.rename(page)


def test_a_browser_that_leaves_is_no_traceback_and_a_bug_is_one(get, monkeypatch, capfd):
    port = get.address[1]
    cookie = f"aqnpipe-view-{port}={get.token}"
    request = f"GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n"
    for _ in range(5):
        with socket.create_connection(get.address) as left:
            left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            left.sendall(request.encode())
    assert get("/")[0] == 200
    time.sleep(0.2)
    assert "Traceback" not in capfd.readouterr().err
    monkeypatch.setattr(ResponsePages, "page", lambda *_: 1 // 0)
    with pytest.raises(http.client.RemoteDisconnected):
        get("/")
    time.sleep(0.2)
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_the_first_page_lists_claims_and_questions(get, results):
    body = get("/")[2]
    assert "40 questions" in body
    claims = Responses(results).claims
    assert all(f"/claim/{quote(claim.comparison_id, safe='')}" in body for claim in claims if claim.seeds)


def test_a_claim_lists_the_questions_of_its_paired_tables(get, results):
    responses = Responses(results)
    for claim in (claim for claim in responses.claims if claim.seeds):
        changed = responses.changed_by(responses.comparison(claim.comparison_id), "strict")
        assert changed["treatment"].sum() == sum(seed.treatment_better for seed in claim.seeds)
        assert changed["control"].sum() == sum(seed.control_better for seed in claim.seeds)
        body = get(f"/claim/{quote(claim.comparison_id, safe='')}")[2]
        assert all(f"/question/{name}?" in body for name in changed["question_id"])


def listed(body):
    """The heads and the rows of the list of questions, without the title of the page."""
    return body.partition("<h2>")[2]


def test_any_two_arms_are_compared_as_the_sides_of_a_claim_are(get, results):
    """Also one that no claim names, in the other direction: what the treatment had better, the control has."""
    claims = {one["comparison_id"]: one for one in Responses(results).comparisons.values() if one["kind"] == "arms"}
    assert claims
    for name, row in claims.items():
        query = f"treatment={row['treatment']}&control={row['control']}&level={row['treatment_level']}"
        status, _, body = get(f"/pair?{query}")
        assert status == 200
        assert f"{row['treatment']} against {row['control']}, " in body
        assert listed(body) == listed(get(f"/claim/{quote(name, safe='')}")[2]) != ""
        swapped = Responses(results).pair(row["control"], row["treatment"], str(row["treatment_level"]))
        first, second = (Responses(results).changed_by(one, "strict") for one in (row, swapped))
        assert first["treatment"].to_list() == second["control"].to_list()
        assert first["control"].to_list() == second["treatment"].to_list()
    body = get("/pair?treatment=E5&control=baseline&level=0.05")[2]
    assert "E5 against baseline, at 5\u00a0% noise" in body
    assert "seeds where E5 5\u00a0% is better" in body


def test_the_first_page_offers_all_arms_and_levels(get):
    body = get("/")[2]
    form = body.split('<form action="/pair">')[1].split("</form>")[0]
    options = re.findall(r"<option[^>]*>([^<]*)", form)
    assert options == [*["pretrained", "E5", "baseline"] * 2, "0\u00a0%", "5\u00a0%", "10\u00a0%"]
    assert re.findall(r'value="([^"]*)"', form) == ["0.0", "0.05", "0.1"]
    assert re.findall(r"<option selected>([^<]*)", form) == ["baseline"], "the first pair is one of two arms"


@pytest.mark.parametrize(
    "query",
    [
        "treatment=E5&control=E5&level=0.0",
        "treatment=E6&control=E5&level=0.0",
        "treatment=E5&control=baseline&level=0.2",
        "treatment=E5&control=baseline",
        "treatment=E5&level=0.0",
        "",
    ],
)
def test_a_pair_that_was_not_evaluated_is_one_line(get, query):
    status, _, body = get(f"/pair?{query}")
    assert status == 404
    assert "expected two of pretrained, E5, baseline, with runs of one model and seed, and a level of 0.0, 0.05" in body


@pytest.mark.parametrize(("model", "seed", "is_pair"), [("base", 0, True), ("base", 1, False), ("other", 0, False)])
def test_two_arms_without_a_seed_of_a_model_in_common_are_no_pair(tmp_path, results, model, seed, is_pair):
    """An empty list would say that they answer every question alike."""
    for name, place in (("E5", "base/E5/seed0"), ("baseline", f"{model}/baseline/seed{seed}")):
        (tmp_path / "eval" / place).mkdir(parents=True)
        source = next((results / "eval" / "base" / name / "seed0").glob("*.parquet"))
        (tmp_path / "eval" / place / source.name).write_bytes(source.read_bytes())
    if is_pair:
        assert Responses(tmp_path).pair("E5", "baseline", "0.05")["model"] == "base"
        return
    with pytest.raises(DataError, match="runs of one model and seed"):
        Responses(tmp_path).pair("E5", "baseline", "0.05")


def test_a_question_shows_all_arms_seeds_and_levels_with_the_answers_of_all_scorers(get, results):
    body = get("/question/q00003")[2]
    table = Responses(results).of_question("q00003")
    assert body.count("<pre") == len(table) == 5 + 4 * 5
    assert body.count("harness_flexible") == len(table)
    assert {"at 5\u00a0% noise", "without noise"} <= {part.split("<")[0] for part in body.split("<h2>")}
    only = get("/question/q00003?arm=E5")[2]
    assert only.count("<pre") == 2 * 5


def test_a_question_of_many_arms_begins_with_the_first_ones(get, monkeypatch):
    assert "Shown: the first" not in get("/question/q00003")[2]
    monkeypatch.setattr(responses, "ARMS_AT_FIRST", 2)
    first = get("/question/q00003")[2]
    assert "Shown: the first 2 of 3 arms. Choose others above." in first
    assert "pretrained seed 0: " in first
    assert "E5 seed 1: " in first
    assert "baseline seed 0: " not in first
    chosen = get("/question/q00003?arm=baseline")[2]
    assert "baseline seed 0: " in chosen
    assert "Shown: the first" not in chosen


def test_text_of_models_is_never_markup(get):
    body = get("/question/q00003?arm=E5")[2]
    assert "script" not in tags(body)
    assert "&lt;script&gt;" in body
    assert "\u202e" not in body
    assert "<mark>" in body


def test_search_finds_questions_and_responses(get):
    body = get("/search?q=NEEDLE")[2]
    assert "1 question with" in body
    assert "/question/q00003" in body
    assert "/question/q00007" in get("/search?q=What+is+7+plus")[2]
    assert "Nothing found." in get(f"/search?q={quote('<b>')}")[2]


def test_every_question_found_can_be_reached(get, monkeypatch):
    monkeypatch.setattr(responses, "QUESTIONS_PER_PAGE", 15)
    address, parts = "/search?q=what+is", []
    while address:
        body = get(address)[2]
        assert "40 questions with" in body
        parts.append(set(re.findall(r'"/question/(\w+)"', body)))
        following = re.search(r'"(/search\?[^"]*from=\d+)"', body)
        address = following and unescape(following[1])
    assert [len(part) for part in parts] == [15, 15, 10]
    assert len(set.union(*parts)) == 40


def test_what_differs_is_marked_and_escaped():
    assert differing("a b <c>", "a x <c>") == "a <mark>b</mark> &lt;c&gt;"
    assert differing("same", "same") == "same"


def test_mistakes_are_one_line(results, tmp_path, get):
    with pytest.raises(ConfigError, match="no such folder"):
        open_server(tmp_path / "none", 0, None, "en")
    with pytest.raises(DataError, match="found no evaluations in eval/"):
        open_server(tmp_path, 0, None, "en")
    with pytest.raises(ConfigError, match=r"--port: .* cannot be used"):
        open_server(results, get.address[1], None, "en")
    with pytest.raises(ConfigError, match=r"--scorer: the evaluations have no boxed, expected strict, last_number"):
        open_server(results, 0, "boxed", "en")
    assert get("/question/none")[0] == get("/claim/none")[0] == 404
    runner = CliRunner()
    assert runner.invoke(app, ["view", str(results), "--language", "fr"]).exit_code == 2


@pytest.mark.parametrize(
    ("scorer", "column"), [("boxed", "boxed"), ("my_scorers:same_set", "own"), ("task", "task"), ("other", "strict")]
)
def test_the_study_s_scorer_and_the_names_of_its_noises_are_those_of_its_records(tmp_path, scorer, column):
    settings = {"noises": {"fp4": {}, "bias": {}}, "primary_scorer": scorer}
    study = synthetic_study.study(arms=["baseline"], comparisons=[])
    source = synthetic_study.write_study(tmp_path / "made", study, 4).evaluations[0]
    folder = tmp_path / "eval" / "base" / "baseline" / "seed0"
    folder.mkdir(parents=True)
    (folder / "step1.parquet").write_bytes(source.table.read_bytes())
    assert (Responses(tmp_path).primary_scorer, Responses(tmp_path).noise_names()) == ("strict", {})
    record = read_json(source.record, RunRecord)
    write_json(folder / "step1.run.json", record.model_copy(update={"config": {"evaluation": settings}}))
    responses = Responses(tmp_path)
    assert responses.primary_scorer == column
    assert responses.name_of(column) == (scorer if column == "own" else column)
    assert responses.noise_names() == {1.0: "fp4", 2.0: "bias"}


def test_files_with_odd_numbers_in_their_names_are_no_evaluations(results, tmp_path):
    """A number of 200 digits was an error of polars, and other digits than 0 to 9 name other files than they look."""
    folder = tmp_path / "results"
    shutil.copytree(results, folder)
    table = next((folder / "eval").rglob("step*.parquet"))
    for name in ODD:
        place = table.parents[1] / f"{name}.parquet"
        place.parent.mkdir(exist_ok=True)
        shutil.copy(table, place)
    assert len(Responses(folder).checkpoints) == len(Responses(results).checkpoints)
    assert Responses(folder).levels == Responses(results).levels
