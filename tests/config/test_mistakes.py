"""Every mistake of `mistakes.yaml` is one line with file, key, found and expected; the nearest right study is valid."""

import copy
from pathlib import Path

import pytest
import yaml

from aqnpipe.config.study import load_study
from aqnpipe.errors import ConfigError

ROOT = Path(__file__).parents[2]
TABLE = yaml.safe_load(Path(__file__).with_name("mistakes.yaml").read_text(encoding="utf-8"))


def change(content, changes):
    for path, value in changes.items():
        *parents, last = (int(part) if part.isdigit() else part for part in path.split("."))
        place = content
        for part in parents:
            place = place[part]
        place[last] = value


@pytest.mark.parametrize(("study", "row"), [(group["of"], row) for group in TABLE for row in group["rows"]])
def test_a_mistake_is_one_line_and_the_nearest_right_study_is_valid(study, row, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    content = copy.deepcopy(study)
    if isinstance(study, str):
        content = yaml.safe_load(Path(f"config/{study}.yaml").read_text()) | {"arms_file": "config/arms.yaml"}
    if "arms" in row:
        arms = yaml.safe_load(Path("config/arms.yaml").read_text())
        change(arms["arms"], row["arms"])
        content["arms_file"] = str(tmp_path / "arms.yaml")
        (tmp_path / "arms.yaml").write_text(yaml.safe_dump(arms))
    change(content, copy.deepcopy(row.get("set", {})))
    if "says" not in row:
        load_study(content, "study.yaml")
        return
    with pytest.raises(ConfigError, match=row["says"]) as caught:
        load_study(content, "study.yaml")
    assert "\n" not in str(caught.value)
    assert "arms.yaml: " in str(caught.value) or "arms" not in row
