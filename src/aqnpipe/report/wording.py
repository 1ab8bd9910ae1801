"""What the statistics say, in English and Chinese: templates filled with the same numbers, nothing typed by hand."""

from typing import NamedTuple

NBSP = "\u00a0"


class Text(NamedTuple):
    """The same statement in both languages."""

    en: str
    zh: str


def say(template: Text, **values: "str | Text") -> Text:
    """Fill both languages of a template; a value that differs between languages is a Text itself."""
    english = {name: value.en if isinstance(value, Text) else value for name, value in values.items()}
    chinese = {name: value.zh if isinstance(value, Text) else value for name, value in values.items()}
    return Text(template.en.format(**english), template.zh.format(**chinese))


def joined(parts: "list[Text]") -> Text:
    """Put sentences one after the other."""
    return Text(" ".join(part.en for part in parts), "".join(part.zh for part in parts))


def points(fraction: float, sign: bool = False) -> str:
    """Format a fraction as percentage points with one decimal and a true minus, which zero does not get."""
    value = round(100 * fraction, 1) + 0.0
    return (f"{value:+.1f}" if sign else f"{value:.1f}").replace("-", "−")


def percent(fraction: float, digits: int = 1) -> str:
    """Format a fraction as percent with its sign, held together by a no-break space."""
    return f"{100 * fraction:.{digits}f}{NBSP}%"


def level_text(noise_level: float) -> Text:
    """Format a noise level as percent: `10 % noise`."""
    amount = f"{100 * noise_level:.3g}{NBSP}%"
    return Text(f"{amount} noise", f"{amount} 噪声")


def p_text(p_value: float) -> str:
    """Format a p-value with its relation: `= 0.034`, `< 0.001`."""
    if p_value < 0.001:
        return f"<{NBSP}0.001"
    return f"={NBSP}{p_value:.3f}" if p_value < 0.1 else f"={NBSP}{p_value:.2f}"


def sample_text(num_seeds: int, num_questions: int) -> Text:
    """Say how much data there is: `2 seeds, 500 questions`."""
    seeds = "1 seed" if num_seeds == 1 else f"{num_seeds} seeds"
    return Text(f"{seeds}, {num_questions:,} questions", f"{num_seeds} 个种子，{num_questions:,} 道题")


ARMS = Text(
    "{treatment} answers {first} correctly{where}, {control} {second}",
    "{treatment}{where}答对 {first}，{control} 答对 {second}",
)
LEVELS = Text(
    "{treatment} answers {first} correctly at {level} and {second} without",
    "{treatment} 在 {level}下答对 {first}，无噪声时答对 {second}",
)
DEGRADATION = Text(
    "From no noise to {level}, {treatment} changes by {first} points and {control} by {second}",
    "从无噪声到 {level}，{treatment} 变化 {first} 个百分点，{control} 变化 {second} 个百分点",
)
AT_LEVEL = Text(" at {level}", " 在 {level}下")
NOWHERE = Text("", " ")
NUMBERS = Text(
    "{who}: a difference of {difference} percentage points ({confidence} CI {low} to {high}; {margin}p{nbsp}{p}, "
    "after Holm {p_holm}; {sample}).",
    "{who}：相差 {difference} 个百分点（{confidence} 置信区间 {low} 至 {high}；{margin}p{nbsp}{p}，"
    "Holm 校正后 {p_holm}；{sample}）。",
)
MARGIN = Text("margin {margin} points, ", "界限 {margin} 个百分点，")
IDENTICAL = Text(
    "{who}: every question is answered equally well by both sides ({sample}).",
    "{who}：两侧对每道题的回答同样好（{sample}）。",
)
AGAINST = Text("The effect goes against the claim.", "效应的方向与该主张相反。")
BEYOND_MARGIN = Text("The difference lies beyond the margin.", "差异超出了预先规定的界限。")
NO_WORSE = Text(
    "{treatment} is worse than {control} by less than {margin} points.",
    "{treatment} 比 {control} 差不到 {margin} 个百分点。",
)
NOISE_COSTS_LESS = Text(
    "The noise costs {treatment} less than {margin} points.", "噪声使 {treatment} 的损失不到 {margin} 个百分点。"
)
EQUIVALENT = Text("The two differ by less than {margin} points.", "两者相差不到 {margin} 个百分点。")
ONE_RUN = Text(
    "With a single training run the effect of the arm cannot be told from the seed_variance of training; "
    "it takes at least two seeds.",
    "只有一次训练，无法把实验组的效应与训练的运气区分开；至少需要两个种子。",
)
DETECTABLE = Text(
    "Only a true difference of about {limit} points would have been found with {power} power.",
    "只有真实差异达到约 {limit} 个百分点，才能以 {power} 的功效被发现。",
)
DETECTABLE_MARGIN = Text(
    "With {power} power the claim would have been shown only if the true difference were at least {limit} points "
    "inside the margin.",
    "只有真实差异在界限以内至少 {limit} 个百分点，才能以 {power} 的功效证明该主张。",
)
SEEDS_NEEDED = Text(
    "To show a difference as small as the observed one it takes about {number} seeds per arm.",
    "要证明观察到的这么小的差异，每组约需 {number} 个种子。",
)
SEEDS_DO_NOT_HELP = Text(
    "Even {number} seeds would not show so small a difference on these questions.",
    "在这些题目上，即使 {number} 个种子也无法证明这么小的差异。",
)
QUESTIONS_NEEDED = Text(
    "To show a difference as small as the observed one it takes about {number} questions.",
    "要证明观察到的这么小的差异，约需 {number} 道题。",
)
NOT_COMPARED = Text("Not compared: {reason}.", "未作比较（{kind}）：{reason}。")

REFUSALS = {
    "missing": "缺少评估结果",
    "model": "模型不同或权重相同",
    "level": "未评估该噪声水平",
    "noise_seeds": "噪声种子不同",
    "questions": "题目不同",
    "receipt": "回执未通过",
    "record": "运行记录不符",
    "setting": "评估设置不同",
    "identical_outputs": "不同噪声水平下输出完全相同",
}
"""Kinds of refusals in Chinese; the reason itself names files and keys and stays as it is."""
