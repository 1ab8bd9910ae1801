"""The loss_study stage: the loss of texts under simulated faults and hidden-state noise, without training."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.nn.functional as F

from aqnpipe.artifacts.files import read_table, write_json, write_table
from aqnpipe.artifacts.loss_studies import LossStudyTable
from aqnpipe.artifacts.problems import ProblemTable
from aqnpipe.artifacts.provenance import code_digest, sha256_of_files, versions
from aqnpipe.artifacts.runs import RunRecord, StageFiles
from aqnpipe.config.noise import AdaptiveNoise, ConstantSigma, Fault, FaultOrder, NoiseSpec, Phase
from aqnpipe.config.run import LossCondition, LossStudyConfig, LossStudySpec
from aqnpipe.data.prompts import Example, choose_examples, prompt_token_ids, refuse_overlap
from aqnpipe.device import refuse_other_numbers, resolve_device, torch_device
from aqnpipe.errors import DataError, ReceiptError
from aqnpipe.machine.machine import NoiseKey
from aqnpipe.models.layout import decoder_layers, num_rms_norms
from aqnpipe.models.loading import load_model, load_tokenizer, weights_sha256
from aqnpipe.models.verification import refuse_other_weights
from aqnpipe.noise.aqn import noised_rollout, target_factors
from aqnpipe.noise.control_layers import control_layers
from aqnpipe.noise.injection.phase import phase_noise
from aqnpipe.noise.receipts.receipt import LossStudyPass, LossStudyReceipts
from aqnpipe.noise.receipts.recorder import ReceiptRecorder


@dataclass(frozen=True)
class Text:
    """A question and its gold solution as token ids; the first `prompt_tokens` are the prompt.

    `cluster`: of the question; None: it is its own.
    """

    question_id: str
    token_ids: list[int]
    prompt_tokens: int
    cluster: str | None = None


@dataclass(frozen=True)
class LossPass:
    """Condition, fault and noise of one pass over the texts; its receipt is a `LossStudyPass`."""

    condition: LossCondition
    magnitude: float = 0.0
    order: FaultOrder | None = None
    noise_seed: int = 0
    with_gradient: bool = False


def loss_study(
    spec: LossStudySpec,
    model_dir: Path,
    test_problems: Path,
    outputs: StageFiles,
    say: Callable[[str], None] = print,
    train_problems: Path | None = None,
) -> None:
    """Compute the loss of every text under every condition and write table, receipts and record.

    Raises ReceiptError, before anything is written, if a pass had other noise or faults than its condition;
    DataError if there are too few texts.
    """
    refuse_other_numbers()
    settings = spec.settings
    torch.set_num_threads(settings.threads)
    device = resolve_device(spec.device)
    model = load_model(model_dir, dtype=spec.dtype, attention=spec.attention, device=torch_device(device.kind))
    # Only the gradients at the faulty sites are used, so no weight needs one.
    model.requires_grad_(False)
    tokenizer = load_tokenizer(model_dir)
    texts = read_texts(test_problems, spec, tokenizer, choose_examples(spec.prompt, train_problems))
    tables, passes = [], []
    for loss_pass in loss_passes(settings):
        rows, receipt = run_pass(model, texts, loss_pass, spec)
        problems = receipt.problems()
        if problems:
            raise ReceiptError("receipt invalid: " + "; ".join(problems))
        tables.append(rows)
        passes.append(receipt)
        if loss_pass.noise_seed == settings.noise_seeds[-1] or not receipt.noised_layers:
            order = f" {loss_pass.order}" if loss_pass.order else ""
            mean = float(rows["loss"].to_numpy().mean())
            say(f"{settings.name}: {loss_pass.condition} {loss_pass.magnitude:g}{order}: loss {mean:.4f}")
    refuse_other_weights(model, model_dir, spec.dtype)
    receipts = LossStudyReceipts(
        vocabulary_size=model.get_input_embeddings().weight.shape[0],
        num_layers=len(decoder_layers(model)),
        faulty_layers=faulty_layers(spec),
        gamma=settings.gamma,
        passes=tuple(passes),
    )
    write_json(outputs.receipt, receipts)
    inputs = {"test_problems": test_problems} | ({"train_problems": train_problems} if train_problems else {})
    write_table(outputs.table, pl.concat(tables), LossStudyTable)
    record = _record(spec, model_dir, inputs, device.label)
    written = sha256_of_files({"table": outputs.table, "receipt": outputs.receipt})
    write_json(outputs.record, record.model_copy(update={"outputs_sha256": written}))


def loss_passes(settings: LossStudyConfig) -> Iterator[LossPass]:
    """Yield every pass once: conditions without noise need one seed, conditions without a fault no magnitude.

    The order matters only where the faulty output itself has noise. Passes of the first noise seed also run backward,
    to measure gradients at the faults.
    """
    first = settings.noise_seeds[0]
    for condition in settings.conditions:
        if condition == "clean":
            yield LossPass(condition)
        elif condition == "noise_only":
            yield from (LossPass(condition, noise_seed=seed) for seed in settings.noise_seeds)
        elif condition == "fault_only":
            yield from (LossPass(condition, magnitude, with_gradient=True) for magnitude in settings.magnitudes)
        else:
            for magnitude in settings.magnitudes:
                for order in settings.orders if condition in ("global", "targeted") else (None,):
                    for seed in settings.noise_seeds:
                        yield LossPass(condition, magnitude, order, seed, with_gradient=seed == first)


def read_texts(problems: Path, spec: LossStudySpec, tokenizer: Any, examples: Sequence[Example] = ()) -> list[Text]:
    """Return the study's texts: prompt, gold solution and end token. DataError if the table has fewer."""
    table = read_table(problems, ProblemTable).head(spec.settings.num_texts)
    if len(table) < spec.settings.num_texts:
        raise DataError(f"{problems}: {len(table)} questions, expected at least num_texts = {spec.settings.num_texts}")
    refuse_overlap(examples, table["question"])
    prompts = prompt_token_ids(table["question"], spec.prompt, tokenizer, examples)
    clusters = table["cluster"] if "cluster" in table.columns else [None] * len(table)
    return [
        Text(
            question_id,
            [*prompt, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id],
            len(prompt),
            cluster,
        )
        for question_id, prompt, answer, cluster in zip(
            table["question_id"], prompts, table["answer"], clusters, strict=True
        )
    ]


def faulty_layers(spec: LossStudySpec) -> tuple[int, ...]:
    """Return the layers with a fault of the machine."""
    return tuple(sorted({fault.layer for fault in spec.faults}))


def noised_layers(condition: LossCondition, num_layers: int, faulty: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """Return the layers whose output gets noise in `condition`; DataError if no layer is left for it."""
    layers = list(range(num_layers))
    match condition:
        case "clean" | "fault_only":
            return ()
        case "noise_only" | "global":
            return tuple(layers)
        case "targeted":
            return faulty
        case "healthy_layers" | "wrong_layers" | "random_layers":
            return tuple(control_layers(layers, faulty, condition, seed))


def run_pass(
    model: Any, texts: list[Text], loss_pass: LossPass, spec: LossStudySpec
) -> tuple[pl.DataFrame, LossStudyPass]:
    """Run every text alone, in order; return the rows of `artifacts.LossStudyTable` and the receipt.

    The noise of a text is keyed by its number and the layer, so conditions with noise in the same layer share it.
    """
    num_layers, settings = len(decoder_layers(model)), spec.settings
    layers = noised_layers(loss_pass.condition, num_layers, faulty_layers(spec), settings.layer_seed)
    aqn, factors = _noise(loss_pass.condition, layers, num_layers, settings)
    phases: tuple[Phase, ...] = ("evaluation", "backward") if loss_pass.with_gradient else ("evaluation",)
    noise = NoiseSpec(aqn=aqn, faults=_faults(spec, loss_pass))
    recorder = ReceiptRecorder(
        noise,
        expected_phases=phases,
        num_layers=num_layers,
        num_norms=num_rms_norms(model),
        num_steps=1 if aqn else 0,
        num_epochs=1 if aqn else 0,
        layer_factors=factors,
    )
    key = NoiseKey(seed=loss_pass.noise_seed, step=0)
    targets = target_factors(model, aqn, factors) if aqn else {}
    rows = []
    with (
        nullcontext() if loss_pass.with_gradient else torch.no_grad(),
        noised_rollout(
            model, aqn, targets, recorder, sigma=settings.gamma, seed=loss_pass.noise_seed, step=0
        ) as hidden_sigmas,
        phase_noise(model, noise, "evaluation", key, recorder, hidden_sigmas=hidden_sigmas),
    ):
        for text in texts:
            # Nothing but the faults counts elements in this phase.
            before = recorder.seen("evaluation", "elements", "changed")
            losses = _token_losses(model, text, recorder if loss_pass.with_gradient else None)
            after = recorder.seen("evaluation", "elements", "changed")
            seen = after.elements - before.elements
            rows.append(
                {
                    "question_id": text.question_id,
                    **({} if text.cluster is None else {"cluster": text.cluster}),
                    "condition": loss_pass.condition,
                    "magnitude": loss_pass.magnitude,
                    "order": loss_pass.order,
                    "noise_seed": loss_pass.noise_seed,
                    "loss": losses[text.prompt_tokens - 1 :].mean().item(),
                    "text_loss": losses.mean().item(),
                    "scored_tokens": len(text.token_ids) - text.prompt_tokens,
                    "text_tokens": len(text.token_ids) - 1,
                    "survival_rate": 1 - (after.changed - before.changed) / seen if seen else 1.0,
                }
            )
    return pl.DataFrame(rows, schema_overrides={"order": pl.String}), LossStudyPass(
        condition=loss_pass.condition,
        magnitude=loss_pass.magnitude,
        order=loss_pass.order,
        noise_seed=loss_pass.noise_seed,
        noised_layers=layers,
        receipt=recorder.receipt(),
    )


def _token_losses(model: Any, text: Text, recorder: ReceiptRecorder | None) -> torch.Tensor:
    """Return the cross entropy in nats of every token but the first.

    With a recorder, the mean over the solution is also backpropagated, so that gradients pass the faults.
    """
    ids = torch.tensor([text.token_ids], device=model.device)
    if recorder is None:
        logits = model(input_ids=ids, use_cache=False).logits
    else:
        embedded = model.get_input_embeddings()(ids).requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits
    losses = F.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    if recorder is not None:
        losses[text.prompt_tokens - 1 :].mean().backward()
        recorder.add("backward", passes=1)
    return losses.detach().cpu()


def _noise(
    condition: LossCondition, layers: tuple[int, ...], num_layers: int, settings: LossStudyConfig
) -> tuple[AdaptiveNoise | None, dict[int, float] | None]:
    """Return AQN for a condition with noise in `layers`, and the factor of every layer if not all are 1."""
    if not layers:
        return None, None
    schedule = ConstantSigma(sigma=settings.gamma)
    match condition:
        case "targeted" | "healthy_layers" | "wrong_layers" | "random_layers":
            aqn = AdaptiveNoise(schedule=schedule, targets="hidden_states", layer_sigmas_from=settings.machine)
            return aqn, {layer: float(layer in layers) for layer in range(num_layers)}
        case _:
            return AdaptiveNoise(schedule=schedule, targets="hidden_states"), None


def _faults(spec: LossStudySpec, loss_pass: LossPass) -> tuple[Fault, ...]:
    if loss_pass.magnitude == 0:
        return ()
    changes: dict[str, object] = {"magnitude": loss_pass.magnitude, "order": loss_pass.order or "after_noise"}
    # Validated again rather than copied, so that an invalid combination of settings is refused.
    return tuple(Fault.model_validate(fault.model_dump() | changes) for fault in spec.faults)


def _record(spec: LossStudySpec, model_dir: Path, inputs: Mapping[str, Path], device: str) -> RunRecord:
    return RunRecord(
        stage="loss_study",
        identity={"model": spec.model_role, "name": spec.settings.name},
        config=spec.model_dump(mode="json"),
        code_digest=code_digest("aqnpipe.loss_study.stage"),
        inputs_sha256=sha256_of_files(inputs) | {"weights": weights_sha256(model_dir)},
        versions=versions(),
        device=device,
    )
