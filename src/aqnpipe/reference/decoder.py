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
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from aqnpipe.reference.draws import Draw, cause_of
from aqnpipe.seeding import derive_seed

_ROWS = 16
"""Rows of a forward whose logits are kept to repeat their draws; of the first token, as many as have room."""
_MEMORY = 2**27
"""Bytes of kept logits from which on no more are kept."""
_NOTED_ERROR = 2e-4
"""Absolute error of a log-probability that a sampler computes in float32."""

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


@dataclass(frozen=True)
class Verdict:
    """What came of comparing responses with a trace.

    compared: tokens whose choice was checked. gaps: distance of each drawn token to the best one, in units of what
    rounding explains. noted: where log-probabilities that the sampler noted are not those of the kept logits.
    top_logits: of each row, the largest logit that each of its tokens was chosen from. moved: by row, the token before
    which it first changed place. experts: by row, those that ran [tokens, slots].
    """

    findings: tuple[Finding, ...]
    compared: int = 0
    gaps: tuple[float, ...] = ()
    noted: str | None = None
    top_logits: tuple[tuple[float, ...], ...] = ()
    moved: Mapping[int, int] = field(default_factory=dict)
    experts: Mapping[int, Tensor] = field(default_factory=dict)


class DecodingTrace:
    """Records the forwards of one batch; call `note` after each, then `judge` the responses."""

    def __init__(self, prompts: Sequence[Sequence[int]], padding_token: int, choice: Choice) -> None:
        self.prompts = [without_padding(prompt, padding_token) for prompt in prompts]
        self._padding_token, self._choice = padding_token, choice
        self._read: list[list[int]] = []
        self._prefix: list[int] = []
        self._first: list[tuple[Tensor, Tensor]] = []
        self._steps: list[tuple[Tensor, Tensor, Tensor]] = []
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._experts_of_prompts: list[Tensor] = []
        self._experts_of_steps: list[Tensor] = []
        self._bytes = 0
        self.problems: list[Finding] = []

    def note(self, kwargs: Mapping[str, Any], logits: Tensor, experts: Tensor | None = None) -> None:
        """Note a forward with a cache by its arguments, its logits [rows, places, vocabulary], and experts if any ran.

        experts [rows, places, slots]: those of a mixture that computed each token.
        """
        ids = kwargs.get("input_ids")
        with unobserved():
            if not isinstance(ids, Tensor):
                self.problems.append((None, "the model read no token ids"))
            elif self._is_prefill(kwargs["past_key_values"], ids):
                self._note_prompts(ids, kwargs, logits, experts)
            elif ids.shape[1] != 1:
                self.problems.append((None, f"a step read {tuple(ids.shape)} tokens, expected one of every row"))
            else:
                self._steps.append((ids[:, 0], *self._note_logits(logits[:, -1], 1 + len(self._steps), 0)))
                self._experts_of_steps += [] if experts is None else [experts]

    def _is_prefill(self, cache: Any, ids: Tensor) -> bool:
        seen = cache.get_seq_length() - ids.shape[1]
        if seen and not self._prefix and len(self._read) == 1 < len(self.prompts) and seen == len(self._read[0]):
            # The row read before was the common prefix of all prompts.
            self._prefix, self._read = self._read[0], []
            self._first, self._kept = [], {}
        return len(self._read) < len(self.prompts)

    def _note_prompts(self, ids: Tensor, kwargs: Mapping[str, Any], logits: Tensor, experts: Tensor | None) -> None:
        width, keep = ids.shape[1], kwargs.get("logits_to_keep")
        kept = keep.tolist() if isinstance(keep, Tensor) else list(range(width - logits.shape[1], width))
        rows, mask = ids.tolist(), kwargs.get("attention_mask")
        shown = mask[:, -width:].tolist() if isinstance(mask, Tensor) and mask.ndim == 2 else [[1] * width] * len(rows)
        first, places = len(self._read), []
        for number, (row, visible) in enumerate(zip(rows, shown, strict=True)):
            end = (len(without_padding(row, self._padding_token)) or width) - 1
            places.append(kept.index(end) if end in kept else len(kept) - 1)
            tokens = [token for token, is_visible in zip(row, visible, strict=True) if is_visible]
            self._read.append(without_padding(self._prefix + tokens, self._padding_token))
            if experts is not None:
                self._experts_of_prompts.append(experts[number][torch.tensor(visible) > 0][: len(self._read[-1])])
        index = torch.tensor(places, device=logits.device)
        self._first.append(self._note_logits(logits[torch.arange(len(rows), device=logits.device), index], 0, first))

    def _note_logits(self, logits: Tensor, step: int, first: int) -> tuple[Tensor, Tensor]:
        """Return the most probable tokens [rows] and their logits; keep the logits of some rows, from place `first`."""
        top = logits.argmax(-1)
        if self._choice.temperature is not None:
            self._keep(logits, step, first)
        return top, logits.gather(-1, top[:, None])[:, 0].float()

    def _keep(self, logits: Tensor, step: int, first: int) -> None:
        size = logits[0].numel() * logits.element_size()
        room = ((_MEMORY // 2 if step == 0 else _MEMORY) - self._bytes) // size
        count = room if step == 0 else min(_ROWS, room)
        if count <= 0:
            return
        drawn = sorted(range(len(logits)), key=lambda row: derive_seed(self._choice.seed, "audited rows", step, row))
        for row in drawn[:count]:
            self._kept[step, first + row] = logits[row].clone()
            self._bytes += size

    @property
    def prompts_read(self) -> list[list[int]]:
        """The prompts that the network read, without padding, by the number of the row in the batch."""
        places = {row: place for place, row in enumerate(self._numbers())}
        return [self._read[places[row]] for row in sorted(places)]

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
        findings = list(self.problems)
        if not len(self._read) == len(self.prompts) == len(responses):
            read = f"the model read {len(self._read)} of {len(self.prompts)} prompts, {len(responses)} have a response"
            findings.append((None, read))
        elif not all(responses):
            findings.append((None, "a response has no tokens"))
        if findings:
            return Verdict(tuple(findings))
        rows_of, misread = self._followed(responses)
        wrong, top_logits = self._compared(rows_of, responses)
        gaps: list[float] = []
        if self._choice.temperature is not None:
            gaps, wrong = self._repeated_draws(rows_of, responses)
        moved: dict[int, int] = {}
        for step, (before, now) in enumerate(pairwise(rows_of), start=1):
            for place, row in enumerate(now):
                if before[place] != row:
                    moved.setdefault(row, step + 1)
        return Verdict(
            findings=(*misread, *wrong),
            compared=sum(map(len, rows_of)),
            gaps=tuple(gaps),
            noted=self._noted_problem(rows_of, noted, responses),
            top_logits=tuple(map(tuple, top_logits)),
            moved=moved,
            experts=self._experts(rows_of),
        )

    def _followed(self, responses: Sequence[Sequence[int]]) -> tuple[list[list[int]], list[Finding]]:
        """Return the rows at the places of every forward as far as they read the responses, and where they did not."""
        rows_of = [self._numbers()]
        tokens = [tokens.tolist() for tokens, _, _ in self._steps]
        for step in range(1, 1 + max(len(tokens), max(map(len, responses)) - 1)):
            before = rows_of[-1]
            rows = _without_gaps(before, [len(responses[row]) > step for row in before])
            found = tokens[step - 1] if step <= len(tokens) else []
            expected = [responses[row][step - 1] for row in rows]
            if found != expected:
                return rows_of, [_misread(before, rows, found, expected, responses, step)]
            rows_of.append(rows)
        return rows_of, []

    def _compared(
        self, rows_of: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[list[Finding], list[list[float]]]:
        """Return the first token of each row that is not the most probable one, and top logits by row."""
        first = [torch.cat(parts) for parts in zip(*self._first, strict=True)]
        tops = [first, *([top, logit] for _, top, logit in self._steps)]
        wrong: dict[int, str] = {}
        top_logits: list[list[float]] = [[] for _ in responses]
        for step, (rows, (top, logit)) in enumerate(zip(rows_of, tops, strict=False)):
            for row, token, value in zip(rows, top.tolist(), logit.tolist(), strict=True):
                top_logits[row].append(value)
                if responses[row][step] != token:
                    wrong.setdefault(row, self._not_the_top(responses[row], step, token))
        return [(row, wrong[row]) for row in sorted(wrong)], top_logits

    def _not_the_top(self, response: Sequence[int], step: int, top: int) -> str:
        if step + 1 == len(response):
            return f"the last token of the response is {response[step]}, the model chose {top}"
        return f"token {step + 1} is not the most probable one; the study decodes greedily"

    def _repeated_draws(
        self, rows_of: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
    ) -> tuple[list[float], list[Finding]]:
        """Return the gaps of the kept rows, in units of what rounding explains, and the rows with other tokens."""
        draws = self._draws(rows_of, responses)
        gaps = [draw.gap() for draw in draws]
        wrong: dict[int, int] = {}
        for draw, gap in zip(draws, gaps, strict=True):
            if gap > 1:
                wrong.setdefault(draw.row, draw.step)
        cause = cause_of(draws) if wrong else ""
        temperature = f"the study samples at temperature {self._choice.temperature:g}, keyed by this batch"
        return gaps, [(row, f"token {step + 1} is {cause}; {temperature}") for row, step in sorted(wrong.items())]

    def _draws(self, rows_of: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> list[Draw]:
        choice, found = self._choice, []
        generator: torch.Generator | None = None
        for step in range(min(len(rows_of), 1 + max((step for step, _ in self._kept), default=-1))):
            kept = [(place, logits) for (number, place), logits in self._kept.items() if number == step]
            like = next(iter(self._kept.values()))
            generator = generator or torch.Generator(device=like.device).manual_seed(choice.seed)
            whole = torch.empty((choice.num_rows or len(responses), len(like)), device=like.device)
            whole.exponential_(generator=generator)
            for place, logits in kept:
                row = rows_of[step][place]
                draws = whole[choice.first_row + row].double().log()
                found.append(Draw(row, step, responses[row][step], logits.double(), draws, choice.temperature or 1.0))
        return sorted(found, key=lambda draw: (draw.step, draw.row))

    def _experts(self, rows_of: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """Return by row the experts [tokens, slots] of the prompt, and of the response but its last token."""
        found = {row: [prompt] for row, prompt in zip(rows_of[0], self._experts_of_prompts, strict=False)}
        for rows, of_step in zip(rows_of[1:], self._experts_of_steps, strict=False):
            for row, of_row in zip(rows, of_step, strict=True):
                found[row].append(of_row)
        return {row: torch.cat(parts) for row, parts in found.items()}

    def _noted_problem(
        self, rows_of: Sequence[Sequence[int]], noted: Sequence[Sequence[float]], responses: Sequence[Sequence[int]]
    ) -> str | None:
        for (step, place), logits in self._kept.items() if any(noted) else ():
            if step >= len(rows_of) or not noted[row := rows_of[step][place]] or not logits.isfinite().all():
                continue
            probabilities = (logits.double() / (self._choice.temperature or 1.0)).log_softmax(-1)
            expected = float(probabilities[responses[row][step]])
            if abs(noted[row][step] - expected) > _NOTED_ERROR:
                return (
                    f"the sampler noted a log-probability of {noted[row][step]:.6g}, the network's logits give "
                    f"{expected:.6g}: it drew from other (rounded?) logits"
                )
        return None


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
