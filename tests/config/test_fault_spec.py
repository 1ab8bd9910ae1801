from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aqnpipe.config.fault_spec import Collective, CollectiveFault, format_fault, parse_fault, parse_fault_of_node
from aqnpipe.config.noise import Fault, FaultSite, FaultType
from aqnpipe.errors import ConfigError

FAULTS = st.builds(
    Fault,
    type=st.sampled_from(get_args(FaultType)),
    layer=st.integers(0, 200),
    magnitude=st.floats(1e-9, 1),
    sparsity=st.floats(1e-9, 1),
    site=st.sampled_from(get_args(FaultSite)),
    threshold=st.sampled_from(["dynamic", "cached"]),
    seed=st.integers(0, 2**40),
)


def test_the_documented_spec():
    found = parse_fault("type=saturation,layer=10,magnitude=0.3,sparsity=0.1,site=layer_output,seed=0")
    assert found == Fault(type="saturation", layer=10, magnitude=0.3, sparsity=0.1)


def test_spaces_and_order_do_not_matter():
    assert parse_fault(" layer = 2 , magnitude=1e-3,type=bias") == Fault(type="bias", layer=2, magnitude=0.001)


BETWEEN_RANKS = st.builds(
    CollectiveFault,
    type=st.sampled_from(get_args(FaultType)),
    site=st.sampled_from(get_args(Collective)),
    magnitude=st.floats(1e-9, 1),
    sparsity=st.floats(1e-9, 1),
    rank=st.integers(0, 7),
)


@given(FAULTS)
def test_what_is_written_reads_back(fault):
    assert parse_fault(format_fault(fault)) == parse_fault_of_node(format_fault(fault)) == fault


@given(BETWEEN_RANKS)
def test_faults_between_ranks_read_back(fault):
    assert parse_fault_of_node(format_fault(fault)) == fault
    assert parse_fault_of_node("type=bias, magnitude=0.1, site = all_gather").site == "all_gather"
    with pytest.raises(ConfigError):
        parse_fault(format_fault(fault))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("type=bias,layer=0,magnitude=0.1,colour=red", "unknown key 'colour'"),
        ("type=bias,layer=0", "magnitude: missing key"),
        ("type=melting,layer=0,magnitude=0.1", "type: found 'melting', expected 'dead_zone'"),
        ("type=bias,layer=0,magnitude=0.1,sparsity=0", "sparsity: found '0', expected a number above 0"),
        ("type=bias,layer=0,magnitude=0.1,sparsity=1.5", "sparsity: found '1.5', expected at most 1"),
        ("type=bias,layer=0,magnitude=nan", "magnitude: found 'nan', expected a finite number"),
        ("type=bias,layer=-1,magnitude=0.1", "layer: found '-1', expected at least 0"),
        ("type=bias,layer=one,magnitude=0.1", "layer: found 'one', expected a whole number"),
        ("type=bias,layer=0,magnitude=0.1,site=elbow", "site: found 'elbow', expected 'layer_output'"),
        ("type=bias,layer=0,layer=1,magnitude=0.1", "layer is given twice"),
        ("type=bias,layer", "found 'layer', expected comma-separated key=value"),
        ("", "found '', expected comma-separated key=value"),
    ],
)
def test_bad_specs_end_in_one_line(spec, message):
    with pytest.raises(ConfigError) as caught:
        parse_fault(spec)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.text(max_size=40))
def test_no_text_breaks_the_parser(text):
    with pytest.raises(ConfigError) as caught:
        parse_fault(text)
    assert "\n" not in str(caught.value)
