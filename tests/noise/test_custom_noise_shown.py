"""What the page on error models and schedules of one's own shows works as shown, and so does the example package."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from aqnpipe.config.study import read_arms
from aqnpipe.noise.measure_arm import measure_arm
from aqnpipe.noise.schedule import custom_sigmas

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "your-own-noise.md"
EXAMPLE = ROOT / "examples" / "own_noise"


def shown(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_page_s_arm_has_its_noise_and_its_schedule(tmp_path, monkeypatch, model):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_noise.py").write_text(shown("python")[0])
    (tmp_path / "arms.yaml").write_text(shown("yaml")[0])
    arm = read_arms(tmp_path / "arms.yaml")["lognormal"].planned()
    receipt = measure_arm(model, arm).check()
    assert receipt.measured_scale("rollout")[0] == pytest.approx(0.05, rel=0.1)
    # Two falls from 0.01 to 0 along a cosine in 4 steps.
    assert custom_sigmas(arm.aqn.schedule, 4, 1) == pytest.approx((0.01, 0.005, 0.01, 0.005, 0.01))


def test_sizes_that_the_example_announces_are_those_of_its_formulas(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE / "src"))
    from example_noise.errors import bit_flips, lognormal

    normals = torch.randn((2, 1_000_000), generator=torch.Generator().manual_seed(0))
    # A mantissa of 1: bit k changes it by 2^-k, so the mean square is 0.25 * mean(4^-k) = 0.25 * 0.0476.
    flipped = bit_flips(torch.ones(1_000_000), normals, probability=0.25) - 1
    assert flipped.square().mean().sqrt() == pytest.approx(0.109, rel=0.01)
    assert (flipped != 0).float().mean() == pytest.approx(0.25, abs=0.005)
    assert set(flipped.tolist()) == {0.0, *(2.0**-k for k in range(1, 8))}
    error = lognormal(torch.ones(1_000_000), normals, spread=0.3) - 1
    # sqrt(exp(0.09) - 1)
    assert error.square().mean().sqrt() == pytest.approx(0.3069, rel=0.01)
    assert abs(error.mean()) < 0.002


@pytest.mark.slow
def test_the_example_package_is_installed_and_found(tmp_path):
    """Also without the clone: only what pip installed, and the files of the study."""
    shutil.copytree(EXAMPLE, tmp_path / "package")
    study = tmp_path / "study"
    study.mkdir()
    for name in ("study.yaml", "arms.yaml"):
        shutil.copy(EXAMPLE / name, study)
    install = [*("-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target"), str(tmp_path / "site")]
    subprocess.run([sys.executable, *install, str(tmp_path / "package")], check=True, timeout=300)

    def aqnpipe(*arguments: str) -> subprocess.CompletedProcess[str]:
        call = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); from aqnpipe.cli.main import main; main()"
        command = [sys.executable, "-c", call, *arguments]
        return subprocess.run(command, cwd=study, capture_output=True, text=True, timeout=300, check=False)

    checked = aqnpipe("check", "--trust-code", "study.yaml")
    assert checked.returncode == 0, checked.stderr
    measured = aqnpipe("measure-noise", "tiny", "--trust-code", "--arms", "arms.yaml", "--arm", "lognormal")
    assert measured.returncode == 0, measured.stderr
    assert "every phase has what was requested" in measured.stdout
    content = yaml.safe_load((study / "arms.yaml").read_text())
    content["arms"]["lognormal"]["operator_noise"]["error"]["function"] = "example_noise.errors:log_normal"
    (study / "arms.yaml").write_text(yaml.safe_dump(content))
    refused = aqnpipe("check", "--trust-code", "study.yaml")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "arms.lognormal.operator_noise.error: example_noise.errors:log_normal: " in refused.stderr
    assert "has no function log_normal" in refused.stderr
