"""What the audit says, in English and Chinese."""

from collections.abc import Sequence

from aqnpipe.artifacts.published import CheckedAccuracy
from aqnpipe.config.published import LossClaim, RunScatter
from aqnpipe.published.tests import Result
from aqnpipe.report.wording import NBSP, Text, p_text, percent, say
from aqnpipe.statistics.continuous import Summary, implied_correlation

UNITS = {"points": Text(" points", " 个百分点"), "nats": Text(" nats", " nats"), "ratio": Text(" times", " 倍")}

CONCLUSIONS = {
    "supported": Text("The figures support the claim.", "这些数字支持该主张。"),
    "refuted": Text("The figures speak against the claim.", "这些数字与该主张相反。"),
    "not_shown": Text("The figures do not show it.", "这些数字不足以证明该主张。"),
}

_NUMBERS = Text(
    "{treatment} against {control}: {difference}{unit} ({interval}{tests}).",
    "{treatment} 对 {control}：{difference}{unit}（{interval}{tests}）。",
)
_INTERVAL = Text("interval {low} to {high}", "区间 {low} 至 {high}")
_NO_INTERVAL = Text("interval unbounded", "区间无界")
_TESTS = Text("; p{nbsp}{p}{holm}", "；p{nbsp}{p}{holm}")
_HOLM = Text(", after Holm {p}", "，Holm 校正后 {p}")
_INVALID = Text("Not a valid comparison: {reasons}.", "比较无效：{reasons}。")
_DIFFERS_IN = Text("the sides also differ in {what}", "两侧还有其他不同：{what}")
_ABOVE_UNIFORM = Text(
    "the loss of {name}, {mean}, is above ln|V| = {uniform}, worse than guessing uniformly",
    "{name} 的损失 {mean} 高于 ln|V| = {uniform}，比均匀猜测还差",
)
_IMPOSSIBLE = Text(
    "{name}, {printed} %, is not possible with {number} questions (next to it: {below} and {above} %)",
    "{number} 道题不可能得到 {name} 的 {printed} %（相邻的可能值为 {below} 和 {above} %）",
)
_RUN_TO_RUN = Text(
    "Each side is a single run, and identical runs differ by SD {points} points ({runs} runs): p{nbsp}{p} against "
    "that seed_variance.",
    "每侧只有一次训练，而相同的训练之间标准差为 {points} 个百分点（{runs} 次）：相对于这种运气 p{nbsp}{p}。",
)
_QUESTIONS = Text(
    "To show a difference of this size with {power} power it takes about {number} questions on each side.",
    "要以 {power} 的功效证明这么大的差异，每侧约需 {number} 道题。",
)


def plain(value: float | None) -> str:
    """Format a number for a sentence: four significant digits at most, a true minus is not needed in plain text."""
    return "none" if value is None else f"{value:.4g}"


def numbers(result: Result, p_holm: float | None) -> Text:
    """Say what was found."""
    interval = _NO_INTERVAL
    if result.ci_low is not None and result.ci_high is not None:
        interval = say(_INTERVAL, low=_amount(result.ci_low, result), high=_amount(result.ci_high, result))
    tests = Text("", "")
    if result.p_value is not None:
        holm = say(_HOLM, p=p_text(p_holm)) if p_holm is not None else Text("", "")
        tests = say(_TESTS, nbsp=NBSP, p=p_text(result.p_value), holm=holm)
    return say(
        _NUMBERS,
        treatment=result.treatment,
        control=result.control,
        difference=_amount(result.difference, result),
        unit=UNITS[result.unit],
        interval=interval,
        tests=tests,
    )


def invalid(reasons: Sequence[Text]) -> Text:
    """Say why a comparison is not valid."""
    joined = Text("; ".join(reason.en for reason in reasons), "；".join(reason.zh for reason in reasons))
    return say(_INVALID, reasons=joined)


def differs_in(what: Sequence[str]) -> Text:
    """Say what else differs between the sides."""
    return say(_DIFFERS_IN, what="; ".join(what))


def above_uniform(name: str, mean: float, uniform: float) -> Text:
    """Say that a loss is worse than guessing."""
    return say(_ABOVE_UNIFORM, name=name, mean=f"{mean:.6g}", uniform=f"{uniform:.2f}")


def impossible(accuracy: CheckedAccuracy) -> Text:
    """Say that no count of right answers gives an accuracy."""
    below, above = accuracy.nearest
    return say(
        _IMPOSSIBLE,
        name=accuracy.id,
        printed=accuracy.printed,
        number=f"{accuracy.num_questions:,}",
        below=f"{below:.2f}",
        above=f"{above:.2f}",
    )


def count_note(accuracy: CheckedAccuracy) -> str:
    """Say that several counts print alike."""
    return f"{accuracy.id}: {accuracy.correct[0]} to {accuracy.correct[-1]} right answers all print as reported"


def run_to_run(scatter: RunScatter, p_value: float) -> Text:
    """Say how the difference stands against the scatter of identical runs."""
    return say(_RUN_TO_RUN, points=f"{scatter.points:g}", runs=str(scatter.num_runs), nbsp=NBSP, p=p_text(p_value))


def questions_needed(number: int, power: float) -> Text:
    """Say how many questions the observed difference takes."""
    return say(_QUESTIONS, number=f"{number:,}", power=percent(power, 0))


def loss_notes(claim: LossClaim, treatment: Summary, control: Summary) -> list[str]:
    """Say what a reported p-value implies about a paired test."""
    notes = []
    for reported in claim.reported:
        if reported.p_value is None or treatment.num != control.num:
            continue
        correlation = implied_correlation(treatment, control, float(reported.p_value))
        if correlation is None:
            notes.append(f"no paired t-test of these figures gives p = {reported.p_value}")
        else:
            notes.append(
                f"p = {reported.p_value} ({reported.by}) is that of a paired t-test if the runs of the two sides "
                f"correlate by {correlation:.2f}"
            )
    return notes


def _amount(value: float, result: Result) -> str:
    digits = 4 if result.unit == "nats" else 2
    sign = "" if result.unit == "ratio" else "+"
    return f"{round(value, digits) + 0.0:{sign}.{digits}f}".replace("-", "−")
