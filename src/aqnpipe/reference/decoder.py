"""A plain decoder that judges a recorded one: which tokens a batch had to read, and which its logits choose.

`DecodingTrace` records the forwards of one batch at the network: the tokens that each read, and the most probable token
of each row. Afterwards the batch is decoded again on paper. A prompt is read first. From then on each forward reads, of
every response that has not ended, the token before; where responses end, the last rows take their places. Greedy
decoding chooses the most probable token. A draw of row r for token n chooses argmax(log p - log e), where e is row r of
the n-th matrix of exponential variates of the keyed generator; it is repeated for the rows whose logits are kept.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from aqnpipe.seeding import derive_seed

_ROWS = 16
"""Rows of a forward whose logits are kept to repeat their draws; of the first token, as many as have room."""
_MEMORY = 2**27
"""Bytes of kept logits from which on no more are kept."""
_NOTED_ERROR = 2e-4
"""Absolute error of a log-probability that a sampler computes in float32."""
_DRAW_ERROR = 2e-5
"""Logarithmic distance of a drawn token to the best one that rounding explains, beside the rounding of the logits."""

Finding = tuple[int | None, str]
"""A row of a batch, None for the whole batch, and what is wrong with it."""


@contextmanager
def unobserved() -> Iterator[None]:
    """Compute without gradients, and outside all modes: what an audit computes is no part of the phase."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@dataclass(frozen=True)
class Choice:
    """How the study chooses tokens: the most probable one if `temperature` is None, else draws keyed by `seed`.

    The batch is the rows from `first_row` on of a batch of `num_rows` (None: it is the whole batch).
    """

    temperature: float | None = None
    seed: int = 0
    first_row: int = 0
    num_rows: int | None = None

    def variates(self, rows: int, like: Tensor) -> Iterator[Tensor]:
        """Yield the variates [rows, vocabulary] of each token of a batch of `rows`; `like`: logits [vocabulary]."""
        generator = torch.Generator(device=like.device).manual_seed(self.seed)
        while True:
            whole = torch.empty((self.num_rows or rows, len(like)), device=like.device)
            yield whole.exponential_(generator=generator)[self.first_row :]


@dataclass(frozen=True)
class Verdict:
    """What came of comparing responses with a trace.

    compared: tokens whose choice was checked. gaps: distance of each drawn token to the best one, in units of what
    rounding explains. noted: where log-probabilities that the sampler noted are not those of the kept logits.
    top_logits: of each row, the largest logit that each of its tokens was chosen from. moved: by row, the token before
    which it first changed place. experts: by row, those that ran [tokens, slots], also of the prompt, but for the last
    token.
    """

    findings: tuple[Finding, ...]
    compared: int = 0
    gaps: tuple[float, ...] = ()
    noted: str | None = None
    top_logits: tuple[tuple[float, ...], ...] = ()
    moved: Mapping[int, int] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class _Forward:
    """A recorded forward: by place in the batch the token that it read, the most probable next one, and its logit.

    kept: logits of some places. experts: by place [tokens, slots]. Prompts are read in one forward or several.
    """

    read: Tensor | None = None
    top: Tensor = field(default_factory=lambda: torch.empty(0))
    logit: Tensor = field(default_factory=lambda: torch.empty(0))
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    experts: Sequence[Tensor] | Tensor = ()


@dataclass(frozen=True)
class _Draw:
    """A draw to repeat; `logits` and `draws` (logarithms of the variates) are [vocabulary], in float64."""

    row: int
    step: int
    token: int
    logits: Tensor
    draws: Tensor
    temperature: float

    def gap(self, temperature: float | None = None) -> float:
        """Return the distance of the token to the best one, at another temperature if given, in units of rounding."""
        if not self.logits.isfinite().all():
            return 0.0  # The guard of the run ends it at the loss.
        temperature = temperature or self.temperature
        # argmax p/e is argmax (log p - log e), and the normaliser of p does not matter.
        scores = self.logits / temperature - self.draws
        rounding = 8 * torch.finfo(torch.float32).eps * float(self.logits.abs().max()) / temperature
        return float(scores.max() - scores[self.token]) / (_DRAW_ERROR + rounding)


class DecodingTrace:
    """Records the forwards of one batch; call `note` after each, then `judge` the responses."""

    def __init__(self, prompts: Sequence[Sequence[int]], padding_token: int, choice: Choice) -> None:
        self.prompts = [without_padding(prompt, padding_token) for prompt in prompts]
        self._padding_token, self._choice = padding_token, choice
        self._read: list[list[int]] = []
        self._prefix: list[int] = []
        self._prefills: list[_Forward] = []
        self._steps: list[_Forward] = []
        self._bytes = 0
        self._problems: list[Finding] = []

    def note(self, kwargs: Mapping[str, Any], logits: Tensor, experts: Tensor | None = None) -> None:
        """Note a forward with a cache by its arguments, its logits [rows, places, vocabulary], and experts if any ran.

        experts [rows, places, slots]: those of a mixture that computed each token.
        """
        ids = kwargs.get("input_ids")
        with unobserved():
            if not isinstance(ids, Tensor):
                self._problems.append((None, "the model read no token ids"))
            elif self._is_prefill(kwargs["past_key_values"], ids):
                self._note_prompts(ids, kwargs, logits, experts)
            elif ids.shape[1] != 1:
                self._problems.append((None, f"a step read {tuple(ids.shape)} tokens, expected one of every row"))
            else:
                found = () if experts is None else experts
                self._steps.append(self._forward(logits[:, -1], 1 + len(self._steps), 0, ids[:, 0], found))

    def _is_prefill(self, cache: Any, ids: Tensor) -> bool:
        seen = cache.get_seq_length() - ids.shape[1]
        if seen and not self._prefix and len(self._read) == 1 < len(self.prompts) and seen == len(self._read[0]):
            # The row read before was the common prefix of all prompts.
            self._prefix, self._read, self._prefills = self._read[0], [], []
        return len(self._read) < len(self.prompts)

    def _note_prompts(self, ids: Tensor, kwargs: Mapping[str, Any], logits: Tensor, experts: Tensor | None) -> None:
        width, keep = ids.shape[1], kwargs.get("logits_to_keep")
        kept = keep.tolist() if isinstance(keep, Tensor) else list(range(width - logits.shape[1], width))
        rows, mask = ids.tolist(), kwargs.get("attention_mask")
        shown = mask[:, -width:].tolist() if isinstance(mask, Tensor) and mask.ndim == 2 else [[1] * width] * len(rows)
        first, places, found = len(self._read), [], []
        for number, (row, visible) in enumerate(zip(rows, shown, strict=True)):
            end = (len(without_padding(row, self._padding_token)) or width) - 1
            places.append(kept.index(end) if end in kept else len(kept) - 1)
            tokens = [token for token, is_visible in zip(row, visible, strict=True) if is_visible]
            self._read.append(without_padding(self._prefix + tokens, self._padding_token))
            if experts is not None:
                found.append(experts[number][torch.tensor(visible) > 0][: len(self._read[-1])])
        index = torch.arange(len(rows), device=logits.device), torch.tensor(places, device=logits.device)
        self._prefills.append(self._forward(logits[index], 0, first, None, found))

    def _forward(
        self, logits: Tensor, step: int, first: int, read: Tensor | None, experts: Sequence[Tensor] | Tensor
    ) -> _Forward:
        """Return a forward by the logits [rows, vocabulary] of the places from `first` on."""
        top = logits.argmax(-1)
        kept = {} if self._choice.temperature is None else self._kept(logits, step, first)
        return _Forward(read, top, logits.gather(-1, top[:, None])[:, 0].float(), kept, experts)

    def _kept(self, logits: Tensor, step: int, first: int) -> dict[int, Tensor]:
        """Return copies of the logits of some rows, chosen by a key of the audit's own."""
        size = logits[0].numel() * logits.element_size()
        room = ((_MEMORY // 2 if step == 0 else _MEMORY) - self._bytes) // size
        drawn = sorted(range(len(logits)), key=lambda row: derive_seed(self._choice.seed, "audited rows", step, row))
        chosen = drawn[: max(0, room if step == 0 else min(_ROWS, room))]
        self._bytes += size * len(chosen)
        return {first + row: logits[row].clone() for row in chosen}

    @property
    def prompts_read(self) -> list[list[int]]:
        """The prompts that the network read, without padding, by the number of the row in the batch."""
        return [read for _, read in sorted(zip(self._numbers(), self._read, strict=False), key=lambda pair: pair[0])]

    def _numbers(self) -> list[int]:
        """Return the number in the batch of every row that was read; rows that are no prompt take what is left."""
        wanted: dict[tuple[int, ...], list[int]] = {}
        for number, prompt in enumerate(self.prompts):
            wanted.setdefault(tuple(prompt), []).append(number)
        order = [wanted[key].pop(0) if wanted.get(key := tuple(read)) else -1 for read in self._read]
        left = sorted(set(range(max(len(self._read), len(self.prompts)))).difference(order))
        return [left.pop(0) if number < 0 else number for number in order]

    def judge(self, responses: Sequence[Sequence[int]], noted: Sequence[Sequence[float]] = ()) -> Verdict:
        """Compare the responses with the tokens that were read, and with those that the logits choose.

        `noted`: by row, the log-probabilities that the sampler noted, or nothing.
        """
        findings = list(self._problems)
        if not len(self._read) == len(self.prompts) == len(responses):
            read = f"the model read {len(self._read)} of {len(self.prompts)} prompts, {len(responses)} have a response"
            findings.append((None, read))
        elif not all(responses):
            findings.append((None, "a response has no tokens"))
        return Verdict(tuple(findings)) if findings else self._decoded_again(responses, noted)

    def _decoded_again(self, responses: Sequence[Sequence[int]], noted: Sequence[Sequence[float]]) -> Verdict:
        """Return the verdict on the responses, as far as the forwards read them."""
        forwards, rows, compared = [self._prefill(), *self._steps], self._numbers(), 0
        misread: list[Finding] = []
        wrong: dict[int, str] = {}
        moved: dict[int, int] = {}
        draws: list[_Draw] = []
        top_logits: list[list[float]] = [[] for _ in responses]
        experts: dict[int, list[Tensor]] = {}
        like = next((kept for forward in forwards for kept in forward.kept.values()), None)
        variates = iter(()) if like is None else self._choice.variates(len(responses), like)
        last_kept = max((step for step, forward in enumerate(forwards) if forward.kept), default=-1)
        for step in range(max(len(forwards), *map(len, responses))):
            forward = forwards[step] if step < len(forwards) else _Forward()
            if step:
                before, rows = rows, _without_gaps(rows, [len(responses[row]) > step for row in rows])
                read = [] if forward.read is None else forward.read.tolist()
                if read != (expected := [responses[row][step - 1] for row in rows]):
                    misread = [_misread(before, rows, read, expected, responses, step)]
                    break
                moved = {row: step + 1 for row, old in zip(rows, before, strict=False) if row != old} | moved
            compared += len(rows)
            for row, top, logit in zip(rows, forward.top.tolist(), forward.logit.tolist(), strict=True):
                top_logits[row].append(logit)
                if responses[row][step] != top:
                    wrong.setdefault(row, _not_the_top(responses[row], step, top))
            for row, found in zip(rows, forward.experts, strict=False):
                experts.setdefault(row, []).append(found)
            drawn = next(variates) if step <= last_kept else torch.empty(0)
            for place, logits in forward.kept.items():
                row = rows[place]
                logs, temperature = drawn[row].double().log(), self._choice.temperature or 1.0
                draws.append(_Draw(row, step, responses[row][step], logits.double(), logs, temperature))
        gaps = [draw.gap() for draw in draws]
        if self._choice.temperature is not None:
            wrong = self._wrong_draws(draws, gaps)
        return Verdict(
            findings=(*misread, *((row, wrong[row]) for row in sorted(wrong))),
            compared=compared,
            gaps=tuple(gaps),
            noted=_noted_problem(draws, noted) if any(noted) else None,
            top_logits=tuple(map(tuple, top_logits)),
            moved=moved,
            experts={row: torch.cat(parts) for row, parts in experts.items()},
        )

    def _prefill(self) -> _Forward:
        """Return the forwards that read the prompts as one."""
        parts = self._prefills
        return _Forward(
            top=torch.cat([part.top for part in parts]),
            logit=torch.cat([part.logit for part in parts]),
            kept={place: logits for part in parts for place, logits in part.kept.items()},
            experts=[experts for part in parts for experts in part.experts],
        )

    def _wrong_draws(self, draws: Sequence[_Draw], gaps: Sequence[float]) -> dict[int, str]:
        """Return by row what is wrong with its first token that is not the study's draw."""
        temperature = f"the study samples at temperature {self._choice.temperature:g}, keyed by this batch"
        first: dict[int, int] = {}
        for draw, gap in zip(draws, gaps, strict=True):
            if gap > 1:
                first.setdefault(draw.row, draw.step)
        cause = _cause_of(draws) if first else ""
        return {row: f"token {step + 1} is {cause}; {temperature}" for row, step in first.items()}


def _cause_of(draws: Sequence[_Draw]) -> str:
    """Return what explains tokens that are not the study's draws."""
    if all(draw.logits[draw.token] == draw.logits.max() for draw in draws):
        return "the most probable one, as all are: decoded greedily"
    fitting = [value / 20 for value in range(2, 61) if all(draw.gap(value / 20) <= 1 for draw in draws)]
    if fitting:
        return f"sampled at temperature {fitting[0]:g} to {fitting[-1]:g}"
    return "another sample: of another seed, or of a distribution that was changed (top-k, top-p, a penalty)"


def _noted_problem(draws: Sequence[_Draw], noted: Sequence[Sequence[float]]) -> str | None:
    for draw in draws:
        if not noted[draw.row] or not draw.logits.isfinite().all():
            continue
        found = noted[draw.row][draw.step]
        expected = float((draw.logits / draw.temperature).log_softmax(-1)[draw.token])
        if abs(found - expected) > _NOTED_ERROR:
            return (
                f"the sampler noted a log-probability of {found:.6g}, the network's logits give {expected:.6g}: it "
                "drew from other (rounded?) logits"
            )
    return None


def _not_the_top(response: Sequence[int], step: int, top: int) -> str:
    if step + 1 == len(response):
        return f"the last token of the response is {response[step]}, the model chose {top}"
    return f"token {step + 1} is not the most probable one; the study decodes greedily"


def end_problem(
    tokens: Sequence[int],
    limit: int,
    end_token: int,
    stop_text: str | None = None,
    text_of: Callable[[Sequence[int]], str] = str,
    reason: str | None = None,
) -> str | None:
    """Return how a response ends too early, too late or for another `reason` than "stop" or "length"; None if right.

    `text_of` gives the text of tokens, in which `stop_text` ends a response.
    """
    if not tokens:
        return "the response has no tokens"
    if len(tokens) > limit:
        return f"the response has {len(tokens)} tokens, the study allows {limit}"
    if end_token in tokens[:-1]:
        return "the response goes on behind the end token"
    has_text = stop_text is not None and stop_text in text_of(tokens)
    if has_text and str(stop_text) in text_of(tokens[:-1]):
        return f"the response goes on behind the stop text {stop_text!r}"
    has_ended = tokens[-1] == end_token or has_text
    if not has_ended and len(tokens) < limit:
        return f"the response was cut after {len(tokens)} of {limit} tokens, without an end token or stop text"
    expected = "stop" if has_ended else "length"
    return None if reason in (None, expected) else f"the response ended by {expected}, not by {reason}"


def _misread(
    before: Sequence[int],
    rows: Sequence[int],
    found: Sequence[int],
    expected: Sequence[int],
    responses: Sequence[Sequence[int]],
    step: int,
) -> Finding:
    """Return the first row whose response is not what a forward read: `found` in place of `expected`."""
    places = [place for place, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]]
    if len(found) > len(expected):
        ended = [row for row in before if row not in rows] or list(before)
        others = f", or one of {len(ended) - 1} others that end here" if len(found) - len(expected) < len(ended) else ""
        row, detail = ended[0], f"it was cut early{others}: the model read token {step} of {len(found)} rows"
    elif len(found) < len(expected):
        row = rows[places[0] if places else -1]
        detail = f"it goes on behind token {step}, which the model read of {len(found)} rows"
    else:
        row, detail = rows[places[0]], f"its token {step} is {expected[places[0]]}, the model read {found[places[0]]}"
    return row, (
        f"the response of {len(responses[row])} tokens is not the one that the model gave behind this prompt: {detail}"
    )


def _without_gaps(rows: Sequence[int], stay: Sequence[bool]) -> list[int]:
    """Return the rows that stay; the last ones take the places of those that leave."""
    count = sum(stay)
    last = [row for row, stays in zip(rows[count:], stay[count:], strict=True) if stays]
    return [row if stays else last.pop() for row, stays in zip(rows[:count], stay[:count], strict=True)]


def without_padding(token_ids: Sequence[int], padding_token: int) -> list[int]:
    """Return token ids without the padding tokens at the end, which no token before them sees."""
    length = len(token_ids)
    while length and token_ids[length - 1] == padding_token:
        length -= 1
    return list(token_ids[:length])
