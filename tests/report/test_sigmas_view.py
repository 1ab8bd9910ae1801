import polars as pl

from aqnpipe.artifacts.diagnoses import SigmaFile, Verdict
from aqnpipe.config.noise import LayerSigmas
from aqnpipe.report.diagnosis import strategies
from aqnpipe.report.inputs import Diagnosis
from aqnpipe.report.words import load_words

VERDICT = Verdict(verdict="healthy", reason="", layer=None, type=None, findings=(), forward_equivalents=1, num_layers=2)


def sigma_file(*sigmas):
    aqn = LayerSigmas(
        enabled=True,
        layer_specific=True,
        base_sigma=0.05,
        layer_sigmas=dict(enumerate(sigmas)),
        schedule="epoch_aware",
        high_priority_layers=[],
    )
    return SigmaFile(aqn=aqn, reasons={1: "<b>faulty</b>"}, srdd_metadata={})


def diagnosis(machine, **strategies):
    return Diagnosis("base", machine, pl.DataFrame(), VERDICT, strategies)


def test_one_strategy_needs_no_picture():
    alone = diagnosis("device", published=sigma_file(0.05, 0.05))
    assert strategies([alone], load_words("en")) == ([], [])


def test_every_strategy_layer_multiplier_and_reason_is_shown():
    target = diagnosis("target", published=sigma_file(0.05, 0.075), shuffled_layers=sigma_file(0.1125, 0.0))
    alone = diagnosis("device", published=sigma_file(0.05, 0.05))
    (group,), (table,) = strategies([alone, target], load_words("en"))
    assert [key.name for key in group.legend] == ["published", "shuffled_layers"]
    (panel,) = group.panels
    assert panel.title == "Strategies on machine target"
    assert "<svg" in panel.svg
    rows = [row.cells for row in table.rows]
    assert rows[1] == ("target", "published", "1", "0.075", "1.5", "<b>faulty</b>")
    assert rows[2][:5] == ("target", "shuffled layers", "0", "0.1125", "2.25")
