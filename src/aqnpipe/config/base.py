"""The base class of all configuration models."""

from pydantic import BaseModel, ConfigDict, ValidationError


class FrozenModel(BaseModel):
    """Base class of configuration models: immutable; unknown keys, NaN and infinities are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


def describe_validation_error(error: ValidationError) -> str:
    """Return the first problem of `error` on one line: key, what is wrong, and the value found."""
    # An unknown key is often a misspelling of the key reported as missing, so it comes first.
    problems = sorted(error.errors(include_url=False), key=lambda problem: problem["type"] != "extra_forbidden")
    problem = problems[0]
    key = ".".join(str(part) for part in problem["loc"]) or "(top level)"
    if problem["type"] == "extra_forbidden":
        text = f"{key}: unknown key"
    elif problem["type"] == "missing":
        text = f"{key}: missing key"
    else:
        found = " ".join(repr(problem["input"]).split())
        text = f"{key}: {problem['msg']}, found {found[:80]}"
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return text + more
