"""The workflow that would publish: its commands exist, and its pages get a folder per version."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import aqnpipe

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "publish.yml"


@pytest.fixture(scope="module")
def jobs():
    return yaml.safe_load(WORKFLOW.read_text())["jobs"]


def commands(job):
    return "\n".join(step.get("run", "") for step in job["steps"])


def test_it_says_that_it_never_ran():
    assert WORKFLOW.read_text().startswith("# Never run yet: nothing of this project is published.")


def test_the_wheel_is_tried_on_the_supported_versions_before_anything_is_published(jobs):
    assert jobs["try"]["strategy"]["matrix"]["python"] == ["3.11", "3.12"]
    assert jobs["try"]["needs"] == "wheel"
    for name in ("pypi", "pages"):
        assert (jobs[name]["needs"], jobs[name]["if"]) == ("try", "github.ref_type == 'tag'")
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "pypi": {"id-token": "write"},
        "pages": {"contents": "write"},
    }
    assert 'cd "$RUNNER_TEMP/empty folder"' in commands(jobs["try"])
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert "make docs" in commands(jobs["pages"])
    assert "docs" in targets


@pytest.mark.parametrize(("tag", "code"), [("v{}", 0), ("v{}1", 1), ("{}", 0), ("v", 1)])
def test_a_tag_that_is_not_the_version_ends_it(jobs, tag, code):
    (step,) = (step for step in jobs["wheel"]["steps"] if step.get("name") == "The tag is the version")
    environment = os.environ | {"GITHUB_REF_NAME": tag.format(aqnpipe.__version__)}
    done = subprocess.run(["bash", "-e", "-c", step["run"]], cwd=ROOT, env=environment, capture_output=True)
    assert done.returncode == code


def git(folder, *words):
    return subprocess.run(["git", "-C", folder, *words], check=True, capture_output=True, text=True).stdout


def publish(clone, version, script):
    (clone / "build" / "site" / "docs" / "site").mkdir(parents=True, exist_ok=True)
    (clone / "build" / "site" / "docs" / "site" / "index.html").write_text(version)
    python = clone / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    environment = os.environ | {"GIT_CONFIG_GLOBAL": os.devnull}
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], cwd=clone, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_each_version_keeps_its_folder_and_latest_is_the_highest(jobs, tmp_path):
    (step,) = (step for step in jobs["pages"]["steps"] if step.get("name", "").startswith("Publish"))
    origin = tmp_path / "origin.git"
    subprocess.run(["git", "init", "--quiet", "--bare", origin], check=True)
    for number, version in enumerate(("0.1.0", "0.9.0", "0.10.0", "0.9.1")):
        clone = tmp_path / f"clone{number}"
        subprocess.run(["git", "clone", "--quiet", origin, clone], check=True, capture_output=True)
        git(clone, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "-m", "code")
        publish(clone, version, step["run"])
    files = git(origin, "ls-tree", "-r", "--name-only", "gh-pages").split()
    assert {path.split("/")[0] for path in files} == {
        ".nojekyll",
        "index.html",
        "latest",
        "0.1.0",
        "0.9.0",
        "0.9.1",
        "0.10.0",
    }
    page = "docs/site/index.html"
    for folder, version in (("0.1.0", "0.1.0"), ("0.9.0", "0.9.0"), ("0.10.0", "0.10.0"), ("latest", "0.10.0")):
        assert git(origin, "show", f"gh-pages:{folder}/{page}") == version
    listed = re.findall(r'href="([\w.]+)/docs', git(origin, "show", "gh-pages:index.html"))
    assert listed == ["latest", "0.10.0", "0.9.1", "0.9.0", "0.1.0"]
