"""A fault in terms of hardware, and what was not tested, as text."""

import pytest
from made_up_diagnoses import diagnosis, located
from rich.console import Console

from aqnpipe.artifacts.diagnoses import FaultBits, TilePlace, Untested
from aqnpipe.cli.diagnose.show import evidence_in_bits, show_comparison, show_faults, show_node, untested_lines
from aqnpipe.diagnosis.node_comparison import compare_nodes, node_of

BITS = FaultBits(expected="0x3f80", observed="0x3f00", xor_mask="0x0080", flipped={7: 3, 2: 1}, values=3)


def printed(fault):
    console = Console(width=80, record=True)
    show_faults(console, (fault,))
    return console.export_text()


def test_a_fault_in_bits():
    fault = located(1).model_copy(
        update={
            "bits": BITS,
            "rate_per_call": 0.25,
            "calls": 12,
            "tile": TilePlace(width=64, offsets=(3, 8, 9, 10)),
        }
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
