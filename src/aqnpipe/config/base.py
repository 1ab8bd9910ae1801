"""What all configuration models share."""

from pydantic import BaseModel, ConfigDict, ValidationError


class FrozenModel(BaseModel):
    """Immutable model that refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True)


def describe_validation_error(error: ValidationError) -> str:
    """Return the first problem of `error` as `key: what is wrong, found ...` in one line."""
    # An unknown key explains the missing one that it was meant to be, so it comes first.
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
