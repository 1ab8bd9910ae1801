"""An evaluation cut into pieces that any worker can answer alone, and put together again.

The cut depends on the questions and the settings alone. What a piece gives depends on the piece alone: noise and draws
are keyed by its batches' numbers, and its account is its own. So the results are the same bytes, whoever answered what.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pydantic import ConfigDict, TypeAdapter

from aqnpipe.config.noise import OperatorNoise, RelativeGaussian
from aqnpipe.config.run import EvaluationSpec
from aqnpipe.errors import WorkerError
from aqnpipe.generation.backend import Completion, Sampling
from aqnpipe.generation.noisy_passes import NoisyGenerator, PassAccount, PassNoise, pass_receipt
from aqnpipe.noise.injection.phase import NoiseKey
from aqnpipe.noise.receipts.receipt import Receipt
from aqnpipe.seeding import derive_seed

_PLAIN = ConfigDict(extra="forbid", ser_json_inf_nan="constants")


@dataclass(frozen=True)
class Batch:
    """Prompts (token ids) that one call generates for, with the numbers of their questions.

    `number` counts the batches of a sample, `step` those of the pass, through all of its samples.
    """

    sample: int
    number: int
    step: int
    questions: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Piece:
    """Batches of one pass (noise level and noise seed); `number` counts the pieces of the evaluation."""

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    number: int
    noise_level: float
    noise_seed: int
    batches: tuple[Batch, ...]

    def to_json(self) -> str:
        """Return the piece as JSON."""
        return _PIECE.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "Piece":
        """Return the piece that `to_json` wrote."""
        return _PIECE.validate_json(text)


@dataclass(frozen=True)
class AnsweredPiece:
    """What came of a piece: the completions of every batch, in order, and the account of the noise they were under."""

    __pydantic_config__: ClassVar[ConfigDict] = _PLAIN

    number: int
    completions: tuple[tuple[Completion, ...], ...]
    account: PassAccount

    def to_json(self) -> str:
        """Return the answers as JSON; floats survive bit for bit."""
        return _ANSWERED.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> "AnsweredPiece":
        """Return the answers that `to_json` wrote."""
        return _ANSWERED.validate_json(text)


_PIECE = TypeAdapter(Piece)
_ANSWERED = TypeAdapter(AnsweredPiece)


@dataclass(frozen=True)
class AnsweredPass:
    """All answers of one pass: a list per sample, completions in the order of the questions, and the receipt."""

    noise_level: float
    noise_seed: int
    samples: list[list[Completion]]
    receipt: Receipt


def pieces_of(spec: EvaluationSpec, prompts: Sequence[Sequence[int]]) -> list[Piece]:
    """Return the pieces of an evaluation, pass by pass.

    Prompts are batched by length (fewer padding tokens). A piece is one batch; where a fault keeps a threshold from its
    first call in the pass, it is the whole pass.
    """
    config = spec.evaluation
    order = sorted(range(len(prompts)), key=lambda index: (len(prompts[index]), index))
    shares = [tuple(order[start : start + config.batch_size]) for start in range(0, len(order), config.batch_size)]
    batches = [
        Batch(
            sample=sample,
            number=number,
            step=sample * len(shares) + number,
            questions=share,
            prompts=tuple(tuple(prompts[index]) for index in share),
        )
        for sample in range(config.num_samples)
        for number, share in enumerate(shares)
    ]
    indivisible = any(fault.threshold == "cached" for fault in spec.faults)
    groups = [tuple(batches)] if indivisible else [(batch,) for batch in batches]
    cut = [(level, seed, group) for level, seed in config.passes() for group in groups]
    return [Piece(number, *one) for number, one in enumerate(cut)]


def answer(generator: NoisyGenerator, spec: EvaluationSpec, piece: Piece) -> AnsweredPiece:
    """Generate every response of a piece.

    The noise of a batch is keyed by its step in the pass, its draws by noise seed, sample and number. So both are the
    same for every model that answers the same questions, and the draws also at every level. The spec's faults strike
    throughout; a threshold that they take from each call depends on the prompts of the batch.
    """
    generator.begin_pass(noise_of(spec, piece.noise_level))
    completions = []
    for batch in piece.batches:
        sampling = sampling_of(spec, piece.noise_seed, batch.sample, batch.number)
        key = NoiseKey(seed=piece.noise_seed, step=batch.step)
        completions.append(tuple(generator.generate(batch.prompts, sampling, key)))
    return AnsweredPiece(piece.number, tuple(completions), generator.end_pass())


def answered_passes(
    spec: EvaluationSpec, pieces: Sequence[Piece], answers: Iterable[AnsweredPiece]
) -> Iterator[AnsweredPass]:
    """Put answers together, which may come in any order; yield the passes in theirs, each as soon as it is whole.

    Receipts are not checked. Raises WorkerError if a piece was answered twice, not at all, or not wholly.
    """
    due = _by_pass(pieces)
    known = {piece.number: piece for piece in pieces}
    answered: dict[int, AnsweredPiece] = {}
    for one in answers:
        piece = known.get(one.number)
        if piece is None or one.number in answered:
            raise WorkerError(f"piece {one.number} of {len(pieces)} of the evaluation was answered twice")
        if [len(batch.prompts) for batch in piece.batches] != [len(done) for done in one.completions]:
            raise WorkerError(f"piece {one.number} of {len(pieces)} of the evaluation was not wholly answered")
        answered[one.number] = one
        while due and all(piece.number in answered for piece in due[0]):
            whole = due.pop(0)
            yield _joined(spec, whole, [answered[piece.number] for piece in whole])
    if due:
        missing = [str(piece.number) for group in due for piece in group if piece.number not in answered]
        raise WorkerError(f"pieces {', '.join(missing)} of {len(pieces)} of the evaluation were not answered")


def noise_of(spec: EvaluationSpec, noise_level: float) -> PassNoise:
    """Return what a pass computes under: noise on attention as the model's way to compute it has it."""
    operator_noise = OperatorNoise(
        operators=spec.evaluation.operators,
        error=RelativeGaussian(scale=noise_level),
        phases=("evaluation",),
        include_lm_head=spec.evaluation.include_lm_head,
        attention="decomposed" if spec.attention == "eager" else "fused",
    )
    return PassNoise(operator_noise=operator_noise if noise_level else None, faults=spec.faults)


def sampling_of(spec: EvaluationSpec, noise_seed: int, sample: int, batch: int) -> Sampling:
    """Return how the responses of one sample of a batch are drawn; greedy without `sampling`."""
    config, stop_text = spec.evaluation, spec.prompt.stop_text
    if config.sampling is None:
        return Sampling(max_response_tokens=config.max_response_tokens, stop_text=stop_text)
    return Sampling(
        max_response_tokens=config.max_response_tokens,
        stop_text=stop_text,
        temperature=config.sampling.temperature,
        seed=derive_seed(config.sampling.seed, "evaluation_sampling", noise_seed, sample, batch),
    )


def _by_pass(pieces: Sequence[Piece]) -> list[list[Piece]]:
    groups: dict[tuple[float, int], list[Piece]] = {}
    for piece in pieces:
        groups.setdefault((piece.noise_level, piece.noise_seed), []).append(piece)
    return list(groups.values())


def _joined(spec: EvaluationSpec, pieces: Sequence[Piece], answers: Sequence[AnsweredPiece]) -> AnsweredPass:
    first = pieces[0]
    found: dict[int, dict[int, Completion]] = {}
    for piece, answered in zip(pieces, answers, strict=True):
        for batch, completions in zip(piece.batches, answered.completions, strict=True):
            found.setdefault(batch.sample, {}).update(zip(batch.questions, completions, strict=True))
    samples = [[responses[question] for question in range(len(responses))] for _, responses in sorted(found.items())]
    receipt = pass_receipt(noise_of(spec, first.noise_level), [one.account for one in answers])
    return AnsweredPass(first.noise_level, first.noise_seed, samples, receipt)
