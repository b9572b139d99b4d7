"""Does a packed file compute what training computed? Checked on every export.

Weights are compared one by one: codes, scales and floats must be identical. Log-probabilities
cannot be: int8 rounding is a staircase, so two correct fp32 programs agree to about 1e-7 until
one activation falls on the other side of an edge, and differ by about 3e-3 a token after that.
So there are three questions, the distance between torch in fp64 and in fp32 being the measure:
- Short prompts, most of which have no such event: is the median difference fp32 noise?
- A long text: is the mean difference that of rounding events, or larger?
- The same: do the differences cancel, so that the loss is the same?

For a model without a head the first two compare the vectors of the texts, number by number. `scoring`
describes what is compared for the others.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile

from .drafts import compare_guesses
from .findings import Agreement, HeadCost, Report, Scores, ZeroInputs
from .quantized import quantized
from .real_text import mask_token_of, real_tokens
from .scoring import MAX_LOGITS, Texts, behind_images, engine_scores, images_of, texts_of, torch_scores
from .sparsity import counting_zero_inputs

if TYPE_CHECKING:
    from bitnet.model.transformer import Transformer
    from bitnet.train.checkpoint import Checkpoint
    from bitnet_runtime import Model

SHORT = 8  # tokens of a short prompt
PROMPTS = 64
FLOOR_TOKENS = 8192  # of the long text, scored in fp64 too
EXACT = 1e-5  # nats a token; fp32 noise where no activation changed its code
ROUNDED = 3e-3  # nats a token; after one did
LOSS = 1e-4  # nats, of the mean over a long text
NATS, NUMBER = "nats a token", "of a number of a vector"
IMAGES = 16
SHOWN = 128  # most texts behind an image: an image of 224 pixels takes 600 kB


class VerificationError(ValueError):
    """The packed file does not compute what the checkpoint computes."""


def verify(checkpoint: str | os.PathLike[str], file: str | os.PathLike[str], *, tokens: int = 50_000) -> Report:
    """Compare a packed file with the checkpoint it was made from, head and embedding as the file stores them.

    tokens: length of the long text. Raises VerificationError saying what differs.
    """
    from bitnet.train.checkpoint import Checkpoint

    return compare(Checkpoint.open(checkpoint), file, tokens=tokens)


def compare(checkpoint: Checkpoint, file: str | os.PathLike[str], *, tokens: int) -> Report:
    """`verify` for an open checkpoint."""
    from bitnet import kernels

    with kernels.unused():
        return _compared(checkpoint, file, tokens)


def _compared(checkpoint: Checkpoint, file: str | os.PathLike[str], tokens: int) -> Report:
    from bitnet_runtime import Model

    packed_file, trained = PackedFile.open(file), checkpoint.model
    model = _with_head(trained, packed_file.configs[0].head_format)
    facts = _check_weights(packed_file, model)
    ids, source = real_tokens(checkpoint, max(tokens, SHORT * PROMPTS))
    config = model.config
    prompts, text = _asked(config, ids, max(tokens, SHORT), mask_token_of(checkpoint))
    reference = copy.deepcopy(model).double()
    with counting_zero_inputs(model) as counts:
        scores = torch_scores(model, text)
    with Model.load(file, kv_type="f32") as engine:
        short = _agreement(engine, torch_scores(model, prompts), reference, prompts)
        long = _agreement(engine, scores, reference, text)
        seen = _of_images(engine, model, reference)
        guessed = compare_guesses(engine, model, reference, prompts.inputs, estimated=packed_file.sketched)
    try:
        check_agreement(short, long, _rounded(long))
        if guessed:
            check_limit("median difference of draft tokens", guessed.median, EXACT + 1.5 * guessed.floor_median)
            check_limit("mean difference of draft tokens", guessed.mean, _rounded(guessed))
    except VerificationError as error:
        if config.has_head and long.loss_torch > 2 * (guessing := math.log(config.vocab_size)):
            raise VerificationError(
                f"the model loses {long.loss_torch:.4g} nats a token, where guessing costs {guessing:.3g}: its run "
                "diverged, and PyTorch and the engine differ in the last digits of such numbers; train it with a lower "
                "--lr"
            ) from error
        raise
    return Report(
        checkpoint=checkpoint.folder.name,
        quantized=amount if isinstance(amount := checkpoint.state_if_any.get("quantized"), float) else 1.0,
        text=source,
        asked=text.what,
        short=short,
        long=long,
        images=seen,
        draft=guessed,
        head=_head_cost(trained, model, text, scores),
        zero_inputs=ZeroInputs.of(counts),
        **facts,
    )


def check_agreement(short: Agreement, long: Agreement, most: float) -> None:
    """Raises VerificationError. most: of the mean difference in the long text."""
    unit = NUMBER if long.vectors else NATS
    check_limit("median difference in short prompts", short.median, EXACT + 1.5 * short.floor_median, unit)
    check_limit("mean difference in a long text", long.mean, most, unit)
    if not long.vectors:  # their mean says nothing: the numbers of one text move together
        check_limit("difference of the loss", abs(long.loss_engine - long.loss_torch), LOSS + 3 * long.loss_error, unit)


def _rounded(long: Agreement) -> float:
    """Limit of the mean difference in a long text. An activation that falls on the other side of an edge changes all
    that follows in its text, so the number of texts counts: with few of them, chance has a large part."""
    return ROUNDED * (1 + 4 / math.sqrt(long.windows)) + 1.5 * long.floor_mean


def _asked(config: ModelConfig, ids: NDArray[np.int64], tokens: int, mask_token: int) -> tuple[Texts, Texts]:
    """Short prompts, and a long text of about `tokens` tokens; after images, if the model sees them."""
    if config.input == "images":
        return images_of(config, IMAGES), images_of(config, IMAGES)
    room = config.max_context
    if shown := config.vision is not None and config.image_token > 0 and config.vision.max_context + 1 < room:
        assert config.vision
        room -= config.vision.max_context
    length = min(room, len(ids), max(SHORT, MAX_LOGITS // max(config.vocab_size, 1)))
    prompts = texts_of(config, _windows(ids[: SHORT * PROMPTS], min(SHORT, length)), mask_token)
    windows = _windows(ids[: max(tokens, length)], length)
    text = behind_images(config, windows[:SHOWN]) if shown else texts_of(config, windows, mask_token)
    return prompts, text


def _of_images(engine: Model, model: Transformer, reference: Transformer) -> Agreement | None:
    """Compare the vision stack, if there is one. An image has a few hundred tokens, of which some activations always
    fall on the other side of an edge, so even the median is not mere noise."""
    if not model.vision or not reference.vision:
        return None
    images = images_of(model.vision.config, IMAGES)
    found = _agreement(engine, torch_scores(model.vision, images), reference.vision, images)
    check_limit("median difference in images", found.median, EXACT + 3 * found.floor_median, NUMBER)
    check_limit("mean difference in images", found.mean, ROUNDED + 1.5 * found.floor_mean, NUMBER)
    return found


def check_limit(what: str, found: float, limit: float, unit: str = NATS) -> None:
    if not found <= limit:  # NaN fails too
        raise VerificationError(
            f"engine against torch: {what} is {found:.1e} {unit}, expected at most {limit:.1e}; "
            "the engine does not compute this model right, please report it"
        )


# ---- weights ----


def _check_weights(file: PackedFile, model: Transformer) -> dict[str, Any]:
    """Compare every stored number with training's quantizers. Returns the facts for the report."""
    weights, stacks = model.state_dict(), model.config.stacks
    n_layers = sum(stack.n_layers for stack in stacks)
    zeros, ternary, size = [0] * n_layers, [0] * n_layers, 0
    for key, record in file.tensors.items():
        role, first = records.ROLES[key.role], stacks[0].n_layers if key.stack else 0
        layer = first + (0 if role == "draft_projection" else key.layer)  # it counts with the layer that it enters
        for what, found, expected in _stored(file, record, weights, stacks):
            if found.shape != expected.shape or not np.array_equal(found, expected):
                raise VerificationError(f"{key.name}: {what} in the file differ from the checkpoint's")
            if record.encoding.ternary and what == "codes" and role not in ("embedding", "head"):
                size += record.size
                zeros[layer] += int((found == 0).sum())
                ternary[layer] += found.size
    parameters = sum(w.numel() for w in weights.values())
    return {
        "parameters": parameters,
        "file_bytes": file.file_size,
        "fp16_bytes": 2 * parameters,
        "bits_per_weight": 8 * file.file_size / parameters,
        "ternary_weights": sum(ternary),
        "ternary_bits_per_weight": 8 * size / max(sum(ternary), 1),
        "zero_fraction": tuple(z / n for z, n in zip(zeros, ternary, strict=True) if n),
        "tensors_equal": len(file.tensors),
        "sparse": file.sparse,
    }


def _stored(
    file: PackedFile, record: records.Record, weights: dict[str, Any], stacks: Sequence[ModelConfig]
) -> list[tuple[str, NDArray[Any], NDArray[Any]]]:
    """(what, in the file, from the checkpoint) for everything a record stores."""
    from bitnet.model.positions import position_tables

    name, config = record.key.parameter(stacks), stacks[record.key.stack]
    weight = weights[name] if name in weights else position_tables(config)[record.key._replace(stack=0).name]
    numbers, scales, _ = quantized(weight, record.encoding, config)
    if scales is None:
        return [("values", file.codes(record).ravel(), numbers.ravel())]
    return [("codes", file.codes(record), numbers), ("scales", file.scales(record), scales.ravel())]


# ---- scores ----


def _windows(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return ids[: len(ids) // length * length].reshape(-1, length)


def _agreement(engine: Model, torch32: Scores, reference: Transformer, texts: Texts) -> Agreement:
    """torch32: the scores of the texts. reference: the model in fp64."""
    length = reference.config.max_context if texts.inputs.ndim == 4 else texts.length
    exact = torch_scores(reference, texts[: math.ceil(FLOOR_TOKENS / length)])
    found = engine_scores(engine, reference.config, texts)
    return Agreement.of(found, torch32, exact, (len(texts), length), vectors=texts.targets is None)


# ---- the price of the head ----


def _with_head(model: Transformer, head_format: str) -> Transformer:
    """The same weights with embedding and head stored in another format."""
    other = copy.copy(model)  # shares the parameters
    other.config = model.config.replace(head_format=head_format)
    return other


def _head_cost(trained: Transformer, model: Transformer, texts: Texts, scores: Scores) -> HeadCost:
    """scores: of `texts` by `model`, which is `trained` with its own head format."""
    as_trained = scores if model.config == trained.config else torch_scores(trained, texts)
    return HeadCost.of(model.config.head_format, trained.config.head_format, scores, as_trained)
