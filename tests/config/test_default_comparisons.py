"""The comparisons of a study that declares none."""

from aqnpipe.config.analysis import LevelComparison, default_comparisons
from aqnpipe.config.arm import Arm

NOISE = {"operator_noise": {"error": {"kind": "relative_gaussian", "scale": 0.05}}}
OTHER = {"operator_noise": {"operators": "all", "error": {"kind": "relative_gaussian", "scale": 0.05}}}
AQN = {"aqn": {"schedule": {"kind": "linear", "sigma_start": 0.05, "sigma_end": 0.0}}}
GUIDED = {"aqn": AQN["aqn"] | {"layer_sigmas_from": "target"}}


def arms(**definitions):
    return {name: Arm.model_validate({"description": name} | settings) for name, settings in definitions.items()}


def pairs(found, kind):
    return [
        (comparison.treatment, comparison.control, comparison.noise_level, comparison.expected)
        for comparison in found
        if comparison.kind == kind
    ]


def test_every_arm_meets_its_counterpart():
    aa_control = NOISE | AQN | {"aa_control_of": "helped"}
    found = default_comparisons(
        arms(clean={}, noisy=NOISE, helped=NOISE | AQN, guided=NOISE | GUIDED, aa_control=aa_control), (0.0, 0.05, 0.1)
    )
    assert pairs(found, "arms") == [
        ("clean", "pretrained", 0.0, "higher"),
        ("noisy", "clean", 0.0, "lower"),
        ("noisy", "clean", 0.1, "higher"),
        ("helped", "noisy", 0.0, "higher"),
        ("helped", "noisy", 0.1, "higher"),
        ("guided", "helped", 0.0, "higher"),
        ("guided", "helped", 0.1, "higher"),
    ]
    assert [comparison.arm for comparison in found if comparison.kind == "levels"] == [
        "clean",
        "noisy",
        "helped",
        "guided",
    ]
    assert pairs(found, "degradation") == [
        ("noisy", "clean", 0.1, "higher"),
        ("helped", "noisy", 0.1, "higher"),
        ("guided", "helped", 0.1, "higher"),
    ]
    assert {comparison.family for comparison in found if comparison.role == "secondary"} == {"arms", "degradation"}
    assert all(comparison.claim_zh for comparison in found)


def test_with_every_level_arms_are_compared_at_each():
    found = default_comparisons(arms(clean={}, noisy=NOISE), (0.1, 0.0, 0.05), every_level=True)
    assert pairs(found, "arms") == [
        ("clean", "pretrained", 0.0, "higher"),
        ("noisy", "clean", 0.0, "lower"),
        ("noisy", "clean", 0.05, "higher"),
        ("noisy", "clean", 0.1, "higher"),
    ]
    assert pairs(found, "degradation") == [("noisy", "clean", 0.05, "higher"), ("noisy", "clean", 0.1, "higher")]
    assert sorted((claim.arm, claim.noise_level) for claim in found if claim.kind == "levels") == [
        *(("clean", level) for level in (0.05, 0.1)),
        *(("noisy", level) for level in (0.05, 0.1)),
    ]


def test_guided_sigmas_meet_uniform_ones_and_robust_first_the_same_sigmas_in_a_random_order():
    names = ("robust_first", "damage_first", "shuffled_layers")
    guided = {name: NOISE | {"aqn": GUIDED["aqn"] | {"layer_sigmas_strategy": name}} for name in names}
    found = default_comparisons(arms(uniform=NOISE | AQN, **guided), (0.0,))
    assert pairs(found, "arms") == [
        ("uniform", "pretrained", 0.0, "higher"),
        ("robust_first", "uniform", 0.0, "higher"),
        ("robust_first", "shuffled_layers", 0.0, "higher"),
        ("damage_first", "uniform", 0.0, "higher"),
    ]


def test_another_noise_and_another_model_are_no_counterpart():
    found = default_comparisons(arms(noisy=NOISE, helped=OTHER | AQN, big=NOISE | {"model": "large"}), (0.0,))
    assert pairs(found, "arms") == [
        ("noisy", "pretrained", 0.0, "higher"),
        ("helped", "pretrained", 0.0, "higher"),
        ("big", "pretrained", 0.0, "higher"),
    ]
    assert {comparison.kind for comparison in found} == {"arms"}


def test_without_a_clean_level_nothing_is_compared_with_it():
    found = default_comparisons(arms(clean={}, noisy=NOISE), (0.1,))
    assert pairs(found, "arms") == [("noisy", "clean", 0.1, "higher")]
    assert len(found) == 1


def test_noise_is_expected_to_hurt():
    assert LevelComparison(arm="a", noise_level=0.1, claim="c").direction == "lower"
    assert LevelComparison(arm="a", noise_level=0.1, claim="c", test="equivalence", margin=0.1).direction is None
