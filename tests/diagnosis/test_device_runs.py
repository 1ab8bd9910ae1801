"""Rates over repeated runs, worked out by hand, and seeds and shapes that differ from run to run."""

import pytest
from made_up_diagnoses import HARDWARE, diagnosis, located

from aqnpipe.artifacts.diagnoses import worst
from aqnpipe.config.diagnosis import DiagnosisConfig
from aqnpipe.diagnosis.api import diagnose_model
from aqnpipe.diagnosis.node_reports import (
    INTERRUPTED,
    RunsOfDevice,
    config_of_run,
    prompt_tokens_of_run,
    rate_of,
    record_of,
)

CONFIG = DiagnosisConfig(seed=7)


def runs_of(*files, repeated=True):
    runs = RunsOfDevice("cuda:0", HARDWARE, repeated=repeated)
    for file in files:
        runs.add(file, record_of(file, CONFIG, 64, 35.0))
    return runs


def test_a_rate_that_was_never_seen_has_the_exact_one_sided_bound():
    rate = rate_of(0, 59)
    assert (rate.rate, rate.low) == (0, 0)
    # The rule of three, exactly: 59 runs without a fault bound its rate by 1 - 0.05^(1/59) = 4.95 %.
    assert rate.high == pytest.approx(1 - 0.05 ** (1 / 59))


def test_an_interval_by_hand():
    # 1 of 2: the bounds solve 1 - (1 - p)^2 = 0.025 and p^2 = 1 - 0.025.
    rate = rate_of(1, 2)
    assert rate.low == pytest.approx(1 - 0.975**0.5)
    assert rate.high == pytest.approx(0.975**0.5)
    assert rate_of(3, 3).high == 1
    assert rate_of(3, 3).low == pytest.approx(0.05 ** (1 / 3))


def test_rates_of_runs_and_of_sites():
    report = runs_of(
        diagnosis(), diagnosis(located(1)), diagnosis(located(1), located(None, "silu")), diagnosis()
    ).report()
    assert report.verdict == "fault"
    assert report.reason == "4 runs: 2 healthy, 2 fault"
    assert report.repetition.faulty.rate == 0.5
    assert [(site.layer, site.site, site.rate.seen) for site in report.repetition.sites] == [
        (1, "o_proj", 2),
        (None, "silu", 1),
    ]
    assert report.repetition.any_other_site.high == pytest.approx(1 - 0.05**0.25)
    assert (report.seconds, report.forward_equivalents) == (8.0, 44.0)
    assert (report.hardware.temperature_celsius, report.temperature_after_celsius) == (30.0, 35.0)
    assert len(report.faults) == 2


def test_one_run_without_a_duration_has_its_own_reason_and_no_rates():
    report = runs_of(diagnosis(located(0)), repeated=False).report()
    assert (report.reason, report.repetition) == ("reason of fault", None)


def test_an_abstention_among_healthy_runs_is_not_healthy():
    assert runs_of(diagnosis(), diagnosis(verdict="abstain")).report().verdict == "abstain"


def test_no_complete_run_is_no_verdict():
    report = runs_of().report(interrupted=True)
    assert (report.verdict, report.reason, report.repetition) == ("abstain", INTERRUPTED, None)


def test_the_worst_outcome_is_the_one_that_must_not_be_hidden():
    assert worst(["healthy", "abstain", "error", "fault"]) == "fault"
    assert worst(["healthy", "abstain", "error"]) == "error"
    assert worst(["healthy", "abstain"]) == "abstain"
    assert worst(["healthy", "healthy"]) == "healthy"


def test_runs_have_new_seeds_and_shapes_and_the_first_is_as_configured():
    configs = [config_of_run(CONFIG, run) for run in range(60)]
    assert configs[0] == CONFIG
    assert len({config.seed for config in configs}) == 60
    shapes = {(c.miss_probability, c.exact_repeats, prompt_tokens_of_run(run)) for run, c in enumerate(configs)}
    assert len(shapes) == 60
    assert config_of_run(CONFIG, 5) == config_of_run(CONFIG, 5)


@pytest.mark.parametrize("run", [1, 2, 3])
def test_a_healthy_machine_is_healthy_in_every_shape(random_model, prompt_ids, run):
    found = diagnose_model(random_model(num_layers=2), prompt_ids[:1], config_of_run(CONFIG, run), method="exact")
    assert found.verdict.verdict == "healthy", found.verdict.reason
