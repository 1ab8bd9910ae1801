"""The error model of a user's own on a tensor: values worked out by hand, its random numbers, and what is refused."""

import pytest
import torch

from aqnpipe.config.custom_code import CustomError, source_digest
from aqnpipe.errors import ConfigError
from aqnpipe.noise.kernels.custom import add_custom_, normals_like, refuse_unusable
from aqnpipe.noise.kernels.gaussian import NoiseStream, standard_normal
from aqnpipe.seeding import derive_seed

SOURCE = NoiseStream(5, 3, 0)
CODE = """
import torch

def shift(values, normals, *, by):
    values += by                                  # its copy: in place is allowed
    return values

def gaussian(values, normals, *, scale):
    return values + scale * normals[0]

def two(values, normals):
    return values + normals[0] + 10 * normals[1]

def rare(values, normals, *, above):
    return torch.where(normals[0] > above, 2 * values, values)

def nothing(values, normals): return values
def narrow(values, normals): return values[..., :1]
def half(values, normals): return values.half()
def number(values, normals): return 1.0
def infinite(values, normals): return values / (values > 0)
def broken(values, normals): raise KeyError("gone")
def leaves(values, normals): raise SystemExit(3)
def rows(values, normals): return values * values.abs().amax(-1, keepdim=True)
def drawn(values, normals): return values + torch.randn_like(values)
def unused(values, normals): return values * 1.01

calls = []
def counting(values, normals):
    calls.append(1)
    return values * (1 + len(calls) / 100)
"""


@pytest.fixture
def own(own_module):
    module = own_module(CODE)

    def error(name, size=0.05, **given):
        function = f"{module}:{name}"
        return CustomError(function=function, size=size, source_sha256=source_digest(function), **given)

    return error


def test_values_are_those_of_the_function_and_only_the_tensor_changes(own):
    tensor = torch.tensor([1.0, 2.0])
    assert add_custom_(tensor, own("shift", settings={"by": 0.5}, draws=0), SOURCE) is tensor
    assert tensor.tolist() == [1.5, 2.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_first_draw_has_the_numbers_of_the_key_and_the_second_those_of_a_derived_one(own, dtype):
    first = standard_normal(6, SOURCE).reshape(2, 3)
    second = standard_normal(6, SOURCE._replace(key=derive_seed(5, "own draw", 1))).reshape(2, 3)
    found = add_custom_(torch.zeros(2, 3, dtype=dtype), own("two", draws=2), SOURCE)
    torch.testing.assert_close(found, (first + 10 * second).to(dtype))
    assert not torch.equal(first, second)


def test_16_bits_are_widened_and_rounded_once(own):
    # In bfloat16 257 is no number; 256 + 0.5 + 0.5, rounded after each sum, would stay 256.
    tensor = torch.tensor([256.0], dtype=torch.bfloat16)
    assert add_custom_(tensor, own("shift", settings={"by": 1.5}, draws=0), SOURCE).item() == 258.0


def test_elements_are_numbered_as_they_lie_in_memory(own):
    error = own("gaussian", settings={"scale": 1.0})
    dense = add_custom_(torch.zeros(3, 4), error, SOURCE)
    transposed = add_custom_(torch.zeros(3, 4).t(), error, SOURCE)
    assert torch.equal(transposed, dense.t())


def test_draws_are_independent(own):
    drawn = normals_like(torch.zeros(50_000), torch.float32, 3, SOURCE)
    correlations = torch.corrcoef(drawn) - torch.eye(3)
    assert correlations.abs().max() < 5 / 50_000**0.5


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("narrow", r"returned \(2, 1\) float32 on cpu for values \(2, 3\) float32 on cpu, expected the same shape"),
        ("half", r"returned \(2, 3\) float16 on cpu"),
        ("number", "returned float, expected a tensor"),
        ("infinite", "returned a number that is not finite for the value -1"),
        ("broken", r"raised KeyError: 'gone', for values of shape \(2, 3\)"),
        ("leaves", r"raised SystemExit: 3, for values of shape \(2, 3\)"),
        ("gaussian", "missing 1 required keyword-only argument: 'scale'"),
    ],
)
def test_what_a_function_may_not_return_is_one_line(own, name, says):
    with pytest.raises(ConfigError, match=says) as found:
        add_custom_(torch.full((2, 3), -1.0), own(name), SOURCE)
    assert "\n" not in str(found.value)


def test_values_that_are_not_finite_before_may_stay_so(own):
    assert add_custom_(torch.tensor([torch.inf]), own("shift", settings={"by": 1}, draws=0), SOURCE).item() == torch.inf


def test_a_source_that_changed_after_planning_is_refused(own):
    error = own("nothing").model_copy(update={"source_sha256": "0" * 64})
    with pytest.raises(ConfigError, match="its source changed after the run was planned"):
        add_custom_(torch.ones(2), error, SOURCE)


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("counting", {}, "returned other numbers for the same values and normals, expected no state"),
        ("drawn", {}, "returned other numbers for the same values and normals"),
        ("rows", {}, "expected an elementwise function"),
        ("nothing", {}, "changed none of 4,096 values, expected an error"),
        ("unused", {}, "returned the same for other normals, expected draws: 0 where it uses none"),
        ("two", {"draws": 1}, "raised IndexError"),
        ("absent", {}, "has no function absent"),
        ("gaussian", {"settings": {"scale": 0.1, "sale": 1}}, "unexpected keyword argument 'sale'"),
        ("gaussian", {"settings": {"scale": "much"}}, "raised TypeError"),
    ],
)
def test_a_function_that_breaks_its_contract_is_found_before_anything_runs(own, name, given, says):
    with pytest.raises(ConfigError, match=says):
        refuse_unusable(own(name, **given))


def test_a_usable_function_is_accepted_also_one_that_hits_few_values(own):
    refuse_unusable(own("gaussian", settings={"scale": 0.1}))
    refuse_unusable(own("unused", draws=0))
    refuse_unusable(own("rare", (0, 1), settings={"above": 6.0}))
    with pytest.raises(ConfigError, match="changed none"):
        refuse_unusable(own("rare", (0.01, 1), settings={"above": 6.0}))
