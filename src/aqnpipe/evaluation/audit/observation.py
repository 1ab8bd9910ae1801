"""Observes a model while a backend generates with it: what each row reads, and which tokens its logits choose.

The observation has no part in the decoding. Rows change places when responses end; they are followed through the cache
of keys and values: the key of the token that a row read last is compared, bit by bit, with what the next forward finds
in the cache. So a cache of another row is seen in every batch, also under noise.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from aqnpipe.errors import ModelError
from aqnpipe.evaluation.audit.cache_rows import CacheRows
from aqnpipe.evaluation.audit.choices import Choices
from aqnpipe.evaluation.audit.facts import Choice, Finding, RowFacts, tokens_digest, without_padding
from aqnpipe.noise.injection.phase import ACTIVE_KEY


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
        self.choices = Choices(choice, len(prompts), draws=draws)
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
