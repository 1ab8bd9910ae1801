"""What two reports of a node say about its change, in words and as an exit code."""

import pytest
from made_up_diagnoses import HARDWARE, diagnosis, located, wrong_sum

from aqnpipe.artifacts.diagnoses import Collectives, KernelFault, Untested
from aqnpipe.diagnosis.node_reports import compare_nodes, node_of


def node(*devices, **changes):
    """The report of a node from (name, UUID, diagnosis) of its devices."""
    base = node_of(diagnosis())
    reports = []
    for name, uuid, file in devices:
        report = node_of(file).devices[0]
        hardware = HARDWARE.model_copy(update={"uuid": uuid, **changes.get("hardware", {})})
        reports.append(report.model_copy(update={"device": name, "hardware": hardware}))
    others = {key: value for key, value in changes.items() if key != "hardware"}
    return base.model_copy(update={"devices": tuple(reports), **others})


HEALTHY = node(("cuda:0", "GPU-a", diagnosis()), ("cuda:1", "GPU-b", diagnosis()))


def test_the_same_report_twice_has_no_changes():
    found = compare_nodes(HEALTHY, HEALTHY)
    assert (found.lines, found.exit_code, found.summary) == ((), 0, "no new fault")


def test_kernels_are_in_the_report_of_a_node():
    kernel = KernelFault(
        operator="mm",
        shapes=("4x8x16",),
        dtype="float32",
        columns=(3,),
        num_columns=8,
        column_tile=None,
        row_tile=None,
        wrong_calls=2,
        calls=2,
    )
    file = diagnosis(located(4)).model_copy(update={"kernels": (kernel,)})
    assert node_of(file).devices[0].kernels == (kernel,)


def test_a_new_fault_is_exit_3():
    after = node(("cuda:0", "GPU-a", diagnosis()), ("cuda:1", "GPU-b", diagnosis(located(4))))
    found = compare_nodes(HEALTHY, after)
    assert found.lines == ("cuda:1: healthy -> fault", "cuda:1: new fault: layer 4, o_proj: noise, 1 channels")
    assert found.exit_code == 3


def test_a_fault_that_was_there_before_is_not_new_and_one_that_is_gone_is_named():
    before = node(("cuda:0", "GPU-a", diagnosis(located(4), located(None, "silu"))))
    after = node(("cuda:0", "GPU-a", diagnosis(located(4, kind="bias"))))
    found = compare_nodes(before, after)
    assert found.exit_code == 0
    assert found.lines == (
        "cuda:0: fault gone: whole device, silu: noise, 1 channels",
        "cuda:0: fault changed: layer 4, o_proj: noise, 1 channels -> layer 4, o_proj: bias, 1 channels",
    )


def test_devices_are_matched_by_uuid_and_not_by_number():
    before = node(("cuda:0", "GPU-a", diagnosis(located(4))), ("cuda:1", "GPU-b", diagnosis()))
    after = node(("cuda:0", "GPU-b", diagnosis()), ("cuda:1", "GPU-a", diagnosis(located(4))))
    assert compare_nodes(before, after).exit_code == 0


def test_a_device_that_is_gone_is_exit_4_and_a_faulty_one_in_its_place_exit_3():
    found = compare_nodes(HEALTHY, node(("cuda:0", "GPU-a", diagnosis())))
    assert found.exit_code == 4
    assert found.lines == ("cuda:1: gone (H100)",)
    replaced = node(("cuda:0", "GPU-a", diagnosis()), ("cuda:1", "GPU-c", diagnosis(located(0))))
    assert compare_nodes(HEALTHY, replaced).exit_code == 3


def test_sites_that_are_no_longer_tested_are_exit_4():
    report = HEALTHY.devices[0].model_copy(update={"untested": (Untested(part="lm_head", reason="tied"),)})
    after = HEALTHY.model_copy(update={"devices": (report, HEALTHY.devices[1])})
    found = compare_nodes(HEALTHY, after)
    assert (found.lines, found.exit_code) == (("cuda:0: no longer tested: lm_head",), 4)
    assert compare_nodes(after, HEALTHY).lines == ("cuda:0: now tested: lm_head",)
    assert compare_nodes(after, HEALTHY).exit_code == 0


@pytest.mark.parametrize("verdict", ["abstain", "error"])
def test_a_verdict_that_is_lost_is_exit_4_with_the_reason(verdict):
    report = HEALTHY.devices[0].model_copy(update={"verdict": verdict, "reason": "why"})
    found = compare_nodes(HEALTHY, HEALTHY.model_copy(update={"devices": (report, HEALTHY.devices[1])}))
    assert (found.lines, found.exit_code) == ((f"cuda:0: healthy -> {verdict} (why)",), 4)


def test_versions_settings_and_drivers():
    after = node(
        ("cuda:0", "GPU-a", diagnosis()),
        ("cuda:1", "GPU-b", diagnosis()),
        versions={"torch": "3", "new": "1"},
        dtype="float32",
        hardware={"driver": "570"},
    )
    found = compare_nodes(HEALTHY, after)
    assert found.lines == (
        "dtype: bfloat16 -> float32",
        "new: unknown -> 1",
        "torch: 2 -> 3",
        "cuda:0: driver: unknown -> 570",
        "cuda:1: driver: unknown -> 570",
    )
    assert found.exit_code == 0


def test_two_processes_of_one_cpu_are_told_apart():
    before = node(("cpu", None, diagnosis()), ("cpu", None, diagnosis()))
    after = node(("cpu", None, diagnosis()), ("cpu", None, diagnosis(located(1))))
    found = compare_nodes(before, after)
    assert found.lines[0] == "cpu: healthy -> fault"
    assert found.new_faults == 1


def between(*faults, verdict=None):
    return Collectives(verdict=verdict or ("fault" if faults else "healthy"), reason="reason", calls=5, faults=faults)


def with_collectives(found):
    return HEALTHY.model_copy(update={"collectives": found})


def test_a_new_fault_between_ranks_is_exit_3_and_one_that_is_gone_is_named():
    before, after = with_collectives(between()), with_collectives(between(wrong_sum()))
    words = (
        "all_reduce in bfloat16, result of rank 1 (cuda:1): 8 elements wrong in 4 of 41 calls, "
        "first at index 7 of 1,021: expected 2.5, observed nan"
    )
    found = compare_nodes(before, after)
    assert found.lines == ("collectives: healthy -> fault", f"collectives: new fault: {words}")
    assert found.exit_code == 3
    assert compare_nodes(after, before).lines == ("collectives: fault -> healthy", f"collectives: fault gone: {words}")
    assert compare_nodes(after, before).exit_code == 0
    # With other numbers of wrong elements it is the same fault; on another rank it is a new one.
    assert compare_nodes(after, with_collectives(between(wrong_sum(elements=9)))).exit_code == 0
    assert compare_nodes(after, with_collectives(between(wrong_sum(rank=0)))).exit_code == 3


def test_collectives_that_are_no_longer_compared_are_exit_4():
    untested = Collectives(verdict=None, reason="interrupted")
    for after in (untested, between(verdict="error"), None):
        assert compare_nodes(with_collectives(between()), with_collectives(after)).exit_code == 4
    # Files of earlier versions have none.
    assert compare_nodes(HEALTHY, with_collectives(between())).lines == ("collectives: not tested -> healthy",)
    assert compare_nodes(HEALTHY, with_collectives(untested)).exit_code == 0
