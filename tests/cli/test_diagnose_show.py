"""A fault in terms of hardware, and what was not tested, as text."""

import pytest
from made_up_diagnoses import diagnosis, located, wrong_sum
from rich.console import Console

from aqnpipe.artifacts.diagnoses import Collectives, FaultBits, KernelFault, TilePlace, Untested
from aqnpipe.artifacts.hardware import Hardware
from aqnpipe.cli.diagnose.command import (
    collective_lines,
    evidence_in_bits,
    next_steps,
    show_comparison,
    show_faults,
    show_node,
    untested_lines,
)
from aqnpipe.diagnosis.node_reports import compare_nodes, node_of

BITS = FaultBits(expected="0x3f80", observed="0x3f00", xor_mask="0x0080", flipped={7: 3, 2: 1}, values=3)


def printed(fault):
    console = Console(width=80, record=True)
    show_faults(console, (fault,))
    return console.export_text()


def test_a_fault_in_bits():
    fault = located(1).model_copy(
        update={"bits": BITS, "rate_per_call": 0.25, "calls": 12, "tile": TilePlace(width=64, offsets=(3, 8, 9, 10))}
    )
    assert evidence_in_bits(fault) == [
        "expected 0x3f80, observed 0x3f00, XOR 0x0080",
        "bits flipped in 3 wrong values: 2 (1), 7 (3)",
        "wrong in 3 of 12 compared calls; not every probe shows every fault",
        "channels 3, 8-10 modulo 64",
    ]
    assert "layer 1, o_proj: expected 0x3f80" in printed(fault)


def test_a_fault_of_the_whole_device_and_one_outside_the_layers():
    shared = located(None, "silu").model_copy(update={"layers": (0, 1, 2, 5)})
    assert evidence_in_bits(shared) == ["seen in layers 0-2, 5"]
    assert "whole device, silu: seen in layers 0-2, 5" in printed(shared)
    outside = located(None, "lm_head").model_copy(update={"scope": "model", "bits": BITS})
    assert "\nlm_head: expected 0x3f80" in printed(outside)


def test_what_to_do_names_the_card_and_what_was_computed_on_it():
    broken = diagnosis(located(1)).model_copy(
        update={"hardware": Hardware(name="H100", uuid="GPU-1", serial="7", slot="00000000:07:00.0", driver="550")}
    )
    first, second, third = next_steps(broken)
    assert first == (
        "Take this device out of service: H100, UUID GPU-1, serial number 7, slot 00000000:07:00.0, driver 550."
    )
    assert "--json" in second
    assert "in doubt" in third
    kernel = KernelFault(
        **{"operator": "mm", "shapes": ("4x64x8",), "dtype": "bfloat16", "columns": (3,), "num_columns": 64},
        **{"column_tile": None, "row_tile": None, "wrong_calls": 4, "calls": 4},
    )
    assert "--reproducer" in next_steps(broken.model_copy(update={"kernels": (kernel,)}))[1]
    assert next_steps(diagnosis()) == []
    simulated = broken.model_copy(update={"simulated_faults": ({"type": "bias"},)})
    assert next_steps(simulated) == ["The fault is simulated; nothing follows for this device."]


def test_one_line_per_device_names_card_and_kernel(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    kernel = KernelFault(
        **{"operator": "mm", "shapes": ("4x64x8",), "dtype": "bfloat16", "columns": (3,), "num_columns": 64},
        **{"column_tile": None, "row_tile": None, "wrong_calls": 4, "calls": 4},
    )
    report = node_of(diagnosis(located(1)))
    device = report.devices[0].model_copy(update={"device": "cuda:3", "kernels": (kernel,)})
    show_node(report.model_copy(update={"devices": (device,)}))
    line = "cuda:3: H100, UUID GPU-1: mm 4x64x8 bfloat16, output columns 3 of 64, in 4 of 4 calls"
    assert line in capsys.readouterr().out.splitlines()


def test_what_no_device_tested_is_said_once_and_of_one_device_with_its_name():
    both = Untested(part="router", layers=(1, 2, 3), reason="no probe")
    lone = Untested(part="lm_head", reason="tied")
    first, second = (node_of(diagnosis()).devices[0] for _ in range(2))
    first = first.model_copy(update={"device": "cuda:0", "untested": (both,)})
    second = second.model_copy(update={"device": "cuda:1", "untested": (both, lone)})
    assert untested_lines([first, second]) == [
        "not tested: router of layers 1-3 (no probe)",
        "cuda:1: not tested: lm_head (tied)",
    ]


@pytest.mark.parametrize("width", [80])
def test_a_node_fits_the_width_of_a_terminal(capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    device = (
        node_of(diagnosis(located(1)))
        .devices[0]
        .model_copy(
            update={
                "hardware": diagnosis().hardware.model_copy(update={"name": "NVIDIA A100-SXM4-80GB with a long name"})
            }
        )
    )
    report = node_of(diagnosis(located(1))).model_copy(update={"devices": (device,) * 8})
    show_node(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("FAULT node1: 0 of 8 devices healthy")
    assert max(map(len, lines)) <= width


def test_names_in_brackets_are_no_markup(capsys):
    before = node_of(diagnosis())
    after = before.model_copy(update={"model": "[bold]x[/bold]"})
    show_comparison(compare_nodes(before, after))
    assert "model: tiny -> [bold]x[/bold]" in capsys.readouterr().out


def test_collectives_in_words_and_what_to_do():
    node = node_of(diagnosis())
    assert collective_lines(node) == []

    def lines(**found):
        return collective_lines(node.model_copy(update={"collectives": Collectives(**found)}))

    assert lines(verdict=None, reason="one device") == ["not tested: collectives between devices (one device)"]
    assert lines(verdict="healthy", reason="5 calls") == ["collectives: healthy: 5 calls"]
    assert lines(verdict="error", reason="rank 1: died") == ["collectives: error: rank 1: died"]
    first, fault, advice = lines(verdict="fault", reason="wrong: all_reduce", faults=(wrong_sum(),))
    assert first == "collectives: fault: wrong: all_reduce"
    assert fault == wrong_sum().in_words
    assert advice.startswith("Train on one device of this node at a time.")
    simulated = lines(verdict="fault", reason="", faults=(wrong_sum(),), simulated_faults=({"site": "all_reduce"},))
    assert simulated[-1] == "The fault is simulated; nothing follows for this node."
