"""Made-up diagnoses of one device, for tests of what is done with them."""

from aqnpipe.artifacts.diagnoses import DiagnosisFile, LocatedFault, WrongCollective
from aqnpipe.artifacts.hardware import Hardware

HARDWARE = Hardware(name="H100", uuid="GPU-1", temperature_celsius=30.0)


def located(layer, site="o_proj", kind="noise"):
    unknown = ("num_channels", "magnitude", "magnitude_low", "magnitude_high", "threshold")
    return LocatedFault(
        **dict.fromkeys(unknown),
        layer=layer,
        scope="device" if layer is None else "layer",
        site=site,
        type=kind,
        num_faulty_channels=1,
        faulty_channel_indices=(3,),
        probes=("linear",),
        evidence="evidence",
    )


def diagnosis(*faults, verdict=None):
    verdict = verdict or ("fault" if faults else "healthy")
    first = faults[0] if faults else None
    return DiagnosisFile(
        verdict=verdict,
        reason=f"reason of {verdict}",
        layer=first.layer if first else None,
        type=first.type if first else None,
        faults=faults,
        findings=(),
        num_layers=2,
        forward_equivalents=11.0,
        model="tiny",
        device="H100",
        dtype="bfloat16",
        attention="sdpa",
        seed=7,
        time="2026-11-22T18:00:00Z",
        host="node1",
        hardware=HARDWARE,
        versions={"torch": "2"},
        seconds=2.0,
        layers=(),
    )


def wrong_sum(rank=1, elements=8):
    return WrongCollective(
        collective="all_reduce",
        rank=rank,
        device=f"cuda:{rank}",
        dtype="bfloat16",
        sizes=(1021,),
        wrong_elements=elements,
        first_index=7,
        expected="2.5",
        observed="nan",
        wrong_calls=4,
        calls=41,
    )
