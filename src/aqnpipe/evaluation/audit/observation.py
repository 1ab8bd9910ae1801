"""Observes a model while a backend generates with it: what each row reads, and which tokens its logits choose.

The observation has no part in the decoding. Rows change places when responses end; they are followed through the cache
of keys and values: the key of the token that a row read last is compared, bit by bit, with what the next forward finds
in the cache. So a cache of another row is seen in every batch, also under noise.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from aqnpipe.errors import ModelError
from aqnpipe.evaluation.audit.cache_rows import CacheRows
from aqnpipe.evaluation.audit.facts import Choice, Finding, RowFacts, tokens_digest, without_padding
from aqnpipe.noise.injection.phase import ACTIVE_KEY

_DRAWN_STEPS = 8
"""Draws are made again for the first tokens of a batch: other draws, or another temperature, show in these."""
_DRAW_TOLERANCE = 1e-3
"""Two tokens whose perturbed log-probabilities are this close may be exchanged by rounding."""


class Observation:
    """Hooks on `model` during the generation of one batch; a context manager.

    prompts: the batch, to number its rows. number: chooses what of the batch is sampled. draws: check the draws, too.
    """

    def __init__(
        self,
        model: Any,
        prompts: Sequence[Sequence[int]],
        padding_token: int,
        choice: Choice,
        *,
        number: int,
        draws: bool,
    ) -> None:
        self._model, self._prompts, self._padding_token = model, prompts, padding_token
        self._cache = CacheRows(number)
        self.choices = _Choices(choice, len(prompts), draws=draws)
        self._ids: Tensor | None = None
        self._raw: list[int] = []
        self._prefix: list[int] = []
        self._seen = 0
        self._is_prefill = True
        self._read: list[list[int]] = []
        self._fed: list[list[int]] = []
        self._rows: list[int] | None = None
        self._order: list[int] = []
        self._hooks = ExitStack()
        self.problems: list[Finding] = []
        self.noise_key: tuple[int, int] | None = None
        self.first_logits: Tensor | None = None
        self.dtype = self.attention = ""
        self.autocast: str | None = None
        self.training = False

    def __enter__(self) -> Self:
        embedding = self._model.get_input_embeddings()
        for handle in (
            self._model.register_forward_pre_hook(self._before, with_kwargs=True),
            embedding.register_forward_pre_hook(self._embed),
            self._model.register_forward_hook(self._after, with_kwargs=True),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def rows(self) -> tuple[RowFacts, ...]:
        """Return what each row of the batch read and chose, in the order of the prompts."""
        self._end_prefill()
        last = self.choices.finish()
        self.problems += self.choices.problems()
        found = {
            self._order[number]: RowFacts(tokens_digest(read), tuple(fed), last.get(self._order[number]))
            for number, (read, fed) in enumerate(zip(self._read, self._fed, strict=True))
        }
        return tuple(found[row] for row in sorted(found))

    def _before(self, module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        self._seen = 0 if cache is None else cache.get_seq_length()
        is_one_of_several = self._rows is None and len(self._read) == 1 < len(self._prompts)
        if is_one_of_several and self._seen == len(self._raw) and not self._prefix:
            # The row read before was the common prefix of all prompts.
            self._prefix = self._raw
            self._read.clear()
            self._cache.forget()
            self.choices.forget()
        self._is_prefill = self._rows is None and self._seen == len(self._prefix)
        if not self._is_prefill:
            self._end_prefill()
            self._follow_rows(cache, kwargs.get("input_ids"))

    def _embed(self, module: Any, args: Any) -> None:
        self._ids = args[0] if args else None

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if self._ids is None:
            self.problems.append((None, "the model read no token ids"))
            return
        if self.first_logits is None:
            self._note_settings(output.logits)
        if self._is_prefill:
            self._read_prompts(self._ids, kwargs, output.logits)
        else:
            self._read_tokens(self._ids, kwargs, output.logits)

    def _note_settings(self, logits: Tensor) -> None:
        key = getattr(self._model, ACTIVE_KEY, None)
        self.noise_key = None if key is None else (key.seed, key.step)
        self.first_logits = logits[0, -1].detach()
        self.attention = str(self._model.config._attn_implementation)
        kind = logits.device.type
        self.autocast = _name(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self.training = any(module.training for module in self._model.modules())
        sizes: dict[torch.dtype, int] = {}
        for parameter in self._model.parameters():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
        self.dtype = _name(max(sizes, key=lambda dtype: sizes[dtype]))

    def _read_prompts(self, ids: Tensor, kwargs: dict[str, Any], logits: Tensor) -> None:
        rows: list[list[int]] = ids.tolist()
        self._raw, width = rows[0], ids.shape[1]
        present = ids != self._padding_token
        ends = (torch.arange(width, device=ids.device) * present).amax(1).tolist()
        keep = kwargs.get("logits_to_keep")
        kept = keep.tolist() if isinstance(keep, Tensor) else list(range(width - logits.shape[1], width))
        visible = _visible(kwargs.get("attention_mask"), rows)
        for row, (seen, end) in enumerate(zip(visible, ends, strict=True)):
            self._read.append(without_padding(self._prefix + seen, self._padding_token))
            place = kept.index(end) if end in kept else len(kept) - 1
            self.choices.start(logits[row, place])
        self._cache.note_prompts(kwargs.get("past_key_values"), [self._seen + end for end in ends], self._seen + width)

    def _end_prefill(self) -> None:
        if self._rows is not None:
            return
        self._rows = list(range(len(self._read)))
        self._fed = [[] for _ in self._read]
        self._order = self._numbered()
        self.choices.begin(self._order)

    def _numbered(self) -> list[int]:
        """Return the number in the batch of every row that was read; rows that are no prompt take what is left."""
        wanted: dict[tuple[int, ...], list[int]] = {}
        for number, prompt in enumerate(self._prompts):
            wanted.setdefault(tuple(without_padding(prompt, self._padding_token)), []).append(number)
        order = [wanted[key].pop(0) if wanted.get(key := tuple(read)) else -1 for read in self._read]
        left = sorted(set(range(max(len(self._read), len(self._prompts)))).difference(order))
        return [left.pop(0) if number < 0 else number for number in order]

    def _follow_rows(self, cache: Any, ids: Tensor | None) -> None:
        """Find out which row is at which place now."""
        if self._rows is None:
            raise RuntimeError("the prompts were not read; this is a bug")
        if not self._cache.is_followed:
            raise ModelError(
                f"{type(self._model).__name__}: its cache holds no keys of tokens, by which the rows of a batch are "
                "followed; an evaluation needs a model with attention to cached keys"
            )
        places, strangers = self._cache.places(
            cache, lambda: (ids[:, 0].tolist(), self.choices.chosen()) if ids is not None else ([], None)
        )
        if strangers:
            self.problems.append((None, f"the cache of {strangers} rows holds keys that no row of the batch has"))
        self.choices.move(places)
        self._rows = [self._rows[place] for place in places]

    def _read_tokens(self, ids: Tensor, kwargs: dict[str, Any], logits: Tensor) -> None:
        if self._rows is None or len(self._rows) != len(ids) or ids.shape[1] != 1:
            self.problems.append((None, f"a step read {tuple(ids.shape)} tokens, expected one for every active row"))
            return
        for row, token in zip(self._rows, ids[:, 0].tolist(), strict=True):
            self._fed[row].append(token)
        self.choices.check(ids[:, 0], logits[:, -1])
        self._cache.note_step(kwargs.get("past_key_values"))


def _visible(mask: Tensor | None, rows: list[list[int]]) -> list[list[int]]:
    """Return the tokens of `rows` that a mask [rows, tokens] leaves visible; all of them without such a mask."""
    if mask is None or mask.ndim != 2:
        return rows
    return [
        [token for token, shown in zip(row, shows[-len(row) :], strict=True) if shown]
        for row, shows in zip(rows, mask.tolist(), strict=True)
    ]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Choices:
    """The logits of each place, and whether the tokens read next are those that the study's choice makes of them."""

    def __init__(self, choice: Choice, num_rows: int, *, draws: bool) -> None:
        self._choice, self._num_rows, self._draws_checked = choice, num_rows, draws
        self._generator: torch.Generator | None = None
        self._started: list[Tensor] = []
        self._logits: Tensor | None = None
        self._perturbation: Tensor | None = None
        self._rows: list[int] = []
        self._steps: list[tuple[list[int], Tensor, Tensor, Tensor]] = []
        self._moves: set[int] = set()
        self._last: list[tuple[list[int], Tensor, Tensor]] = []

    def start(self, logits: Tensor) -> None:
        """Note the logits [vocabulary] behind one more prompt."""
        self._started.append(logits.detach())

    def forget(self) -> None:
        """Forget the logits behind a common prefix."""
        self._started.clear()

    def begin(self, rows: Sequence[int]) -> None:
        """All prompts were read; `rows` are their numbers in the batch."""
        self._rows = list(rows)
        if self._started:
            self._set(torch.stack(self._started))

    def move(self, places: Sequence[int]) -> None:
        """Rows changed places, from `places` to 0, 1, ...; rows that are not named have ended."""
        if list(places) == list(range(len(self._rows))) or self._logits is None:
            return
        self._end(sorted(set(range(len(self._rows))).difference(places)))
        self._moves.add(len(self._steps) + 1)
        index = torch.tensor(list(places), device=self._logits.device)
        self._rows = [self._rows[place] for place in places]
        self._logits = self._logits[index]

    def chosen(self) -> list[int] | None:
        """Return the token that each place's logits choose; None if only the draws of the generator know it."""
        is_known = self._choice.temperature is None or self._perturbation is not None
        if self._logits is None or not is_known:
            return None
        tokens: list[int] = self._scores(self._logits, self._rows).argmax(-1).tolist()
        return tokens

    def check(self, tokens: Tensor, logits: Tensor) -> None:
        """Compare the tokens [rows] that a step read with the choice; `logits` [rows, vocabulary] are behind them."""
        if self._logits is not None:
            chosen = self._logits.gather(-1, tokens[:, None])[:, 0]
            is_top = chosen == self._logits.amax(-1)
            self._steps.append((self._rows, chosen, is_top, self._is_wrong(tokens, is_top)))
        self._set(logits.detach())

    def finish(self) -> dict[int, int]:
        """Return the token that each row's last logits choose; none for rows whose draws are not checked."""
        if self._logits is not None:
            self._end(list(range(len(self._rows))))
            self._logits = None
        return {row: token for rows, tokens, _ in self._last for row, token in zip(rows, tokens.tolist(), strict=True)}

    def problems(self) -> Iterator[tuple[int, str]]:
        """Yield the rows with a token that is not the study's choice, and what is wrong with the first such token."""
        found = dict(self._wrong())
        if found and self._moves.issuperset(found.values()):
            # Between these steps every choice was right.
            text = "token {} was read with the cached keys of another row, when rows had left the batch"
            yield from ((row, text.format(step)) for row, step in found.items())
        else:
            yield from ((row, self._describe(step)) for row, step in found.items())

    def _wrong(self) -> Iterator[tuple[int, int]]:
        """Yield the row and the number (from 1) of the first token of each row that is not the study's choice."""
        found: dict[int, int] = {}
        for step, (rows, _, _, is_wrong) in enumerate(self._steps, start=1):
            for row, wrong in zip(rows, is_wrong.tolist(), strict=True):
                if wrong:
                    found.setdefault(row, step)
        yield from sorted(found.items())

    def _describe(self, step: int) -> str:
        if self._choice.temperature is None:
            return f"token {step} is not the most probable one; the study decodes greedily"
        tokens, most_probable = self.counts()
        how = "decoded greedily" if tokens == most_probable else f"token {step} is another draw"
        return f"{how}; the study samples at temperature {self._choice.temperature:g} with draws keyed by this batch"

    def counts(self) -> tuple[int, int]:
        """Return the number of tokens that were read, and how many of them were the most probable ones."""
        tops = [is_top for _, _, is_top, _ in self._steps]
        return sum(map(len, tops)), int(torch.cat(tops).sum()) if tops else 0

    def values(self) -> dict[int, list[float]]:
        """Return the logits of the chosen tokens of each row, in order, as far as the tokens are known."""
        found: dict[int, list[float]] = {}
        last = [(rows, values) for rows, _, values in self._last]
        for rows, values in [*((rows, chosen) for rows, chosen, _, _ in self._steps), *last]:
            for row, value in zip(rows, values.float().tolist(), strict=True):
                found.setdefault(row, []).append(value)
        return found

    def _set(self, logits: Tensor) -> None:
        """Note the logits of the active rows, and make the draws that choose from them."""
        self._logits = logits
        self._perturbation = None
        if self._choice.temperature is None or not self._draws_checked or len(self._steps) >= _DRAWN_STEPS:
            return
        if self._generator is None:
            self._generator = torch.Generator(device=logits.device).manual_seed(self._choice.seed)
        draws = torch.empty(self._num_rows, logits.shape[-1], device=logits.device)
        self._perturbation = draws.exponential_(generator=self._generator).log_()

    def _scores(self, logits: Tensor, rows: Sequence[int]) -> Tensor:
        """Return what the choice maximises: logits, or log-probabilities at the temperature minus log of the draws."""
        if self._choice.temperature is None or self._perturbation is None:
            return logits
        index = torch.tensor(list(rows), device=logits.device)
        return torch.log_softmax(logits.float() / self._choice.temperature, -1) - self._perturbation[index]

    def _is_wrong(self, tokens: Tensor, is_top: Tensor) -> Tensor:
        if self._choice.temperature is None:
            return ~is_top
        if self._logits is None or self._perturbation is None:
            return torch.zeros_like(is_top)
        scores = self._scores(self._logits, self._rows)
        best, chosen = scores.amax(-1), scores.gather(-1, tokens[:, None])[:, 0]
        rounding = 8 * torch.finfo(torch.float32).eps * self._logits.float().abs().amax(-1) / self._choice.temperature
        return best - chosen > _DRAW_TOLERANCE + rounding

    def _end(self, places: Sequence[int]) -> None:
        """Note the last choice of the rows at `places`, if it is known."""
        is_known = self._choice.temperature is None or self._perturbation is not None
        if not places or self._logits is None or not is_known:
            return
        logits = self._logits[torch.tensor(list(places), device=self._logits.device)]
        rows = [self._rows[place] for place in places]
        tokens = self._scores(logits, rows).argmax(-1)
        self._last.append((rows, tokens, logits.gather(-1, tokens[:, None])[:, 0]))
