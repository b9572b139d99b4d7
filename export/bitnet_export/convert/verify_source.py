"""Does a packed file compute what the published model computes? Checked on every conversion.

As `verify` does for checkpoints, but the source is read one layer at a time (`reference.py`), and
of the short prompts every logit is compared, so that each row of the head counts. A few hundred
tokens hold too few rounding events for a fixed limit of what they may do, and it depends on the
model; so it is measured: noise of 1e-5 on the embedding, ten times what fp32 arithmetic leaves
there, makes such events everywhere. The engine has to be closer to the reference than that.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.quant import stored_rows
from bitnet_export.checkpoint.findings import Agreement, Checked, HeadCost, Scores
from bitnet_export.checkpoint.scoring import NOTHING, Texts, behind_images, engine_scores, images_of, texts_of
from bitnet_export.checkpoint.verify import EXACT, NUMBER, SHORT, VerificationError, check_agreement, check_limit
from bitnet_export.foreign.source import Progress, Source, Ternary
from bitnet_export.foreign.source import Tensor as Stored
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLE, Key

from .reference import Pass, Seen, hidden_states, logits
from .vectors import leaving

if TYPE_CHECKING:
    from bitnet_runtime import Model

PROMPTS = 16
WINDOW = 256  # tokens of a window of the long text
NOISE = 1e-5
IMAGES = 16
REF32, REF64 = 0, 1  # of the passes


def verify_source(
    source: Source, path: Path, *, tokens: int, linears: str = "f32", progress: Progress = lambda _: None
) -> Checked:
    """Compare a packed file with the source it was made from; `tokens` is the length of the long text.

    linears: how it stores linear layers that are not ternary.

    Raises VerificationError saying what differs.
    """
    from bitnet import kernels

    with kernels.unused():
        return _compared(source, path, tokens, linears, progress)


def _compared(source: Source, path: Path, tokens: int, linears: str, progress: Progress) -> Checked:
    from bitnet_runtime import Model, NumericError

    file = PackedFile.open(path)
    config, weights = file.configs[0], _Weights(file, progress)
    texts, origin = _asked(source, config, max(tokens, SHORT))
    images = images_of(file.configs[1], IMAGES) if len(file.configs) > 1 else None
    passes = _passes(texts, texts[1:], config.head_format, linears)
    progress("comparing with the source: the engine")
    try:
        with Model.load(path, kv_type="f32", verify=False) as engine:
            if source.tokenizer is not None:
                engine.tokenize("")  # the engine refuses some tokenizers that the library takes
            all_logits = _prompt_logits(engine, texts[0].inputs) if config.has_head else None
            found = [engine_scores(engine, ModelConfig.of_stacks(file.configs), each) for each in texts]
            seen = None if images is None else engine_scores(engine, file.configs[1], images)
    except NumericError:
        raise VerificationError(
            "the model computes numbers that are not finite: some of its weights are far too large, or damaged"
        ) from None
    with torch.inference_mode():
        sight, shown = ([], None) if images is None else _see(source, images, texts, linears, weights.compare)
        states = hidden_states(source, passes, weights.compare, shown=shown)
        ref32, ref64, noisy, published = (
            [[_numbers(x) for x in state] for state in leaving(source, 0, passes, states, weights.compare)]
            if all_logits is None
            else _log_probabilities(source, passes, states, all_logits)
        )
    short, long = (
        Agreement.of(found[i], ref32[i], ref64[i], _shape(config, texts[i]), vectors=not config.has_head)
        for i in (0, 1)
    )
    noise = float(np.abs(noisy[-1] - ref32[-1]).mean())
    check_agreement(short, long, EXACT + 1.5 * max(long.floor_mean, noise))
    of_images = None if images is None or seen is None else _of_images(file.configs[1], images, seen, sight)
    head = HeadCost.of(config.head_format, "published", ref32[-1], published[-1])
    floats = _stored_floats(file)
    return Checked(origin, weights.tensors, weights.ternary, short, long, noise, head, floats, of_images)


def _passes(texts: Sequence[Texts], long: Sequence[Texts], stored: str, linears: str) -> list[Pass]:
    return [
        Pass(texts, torch.float32, stored, linears),
        Pass(texts, torch.float64, stored, linears),
        Pass(long, torch.float32, stored, linears, NOISE),
        Pass(long, torch.float32, "f32", "f32"),
    ]


def _shape(config: ModelConfig, texts: Texts) -> tuple[int, int]:
    return len(texts), config.max_context if config.input == "images" else texts.length


# ---- images ----


def _see(
    source: Source, images: Texts, texts: Sequence[Texts], linears: str, seen: Seen
) -> tuple[list[Scores], list[torch.Tensor] | None]:
    """By pass, the numbers of the images' vectors, and the vectors of the images at the beginning of the long text."""
    shown = [Texts(each.images) for each in texts if each.images is not None]
    passes = _passes([images, *shown], [images, *shown], "f32", linears)
    found = leaving(source, 1, passes, hidden_states(source, passes, seen, 1), seen)
    numbers = [_numbers(F.normalize(of_pass[0], dim=-1)) for of_pass in found]
    return numbers, [of_pass[1] for of_pass in found] if shown else None


def _of_images(config: ModelConfig, images: Texts, engine: Scores, passes: list[Scores]) -> Agreement:
    found = Agreement.of(engine, passes[REF32], passes[REF64], _shape(config, images), vectors=True)
    noise = float(np.abs(passes[2] - passes[REF32]).mean())
    check_limit("mean difference in images", found.mean, EXACT + 1.5 * max(found.floor_mean, noise), NUMBER)
    return found


def _numbers(vectors: torch.Tensor) -> Scores:
    return vectors.double().numpy().ravel()


def _stored_floats(file: PackedFile) -> str:
    """How linear layers that are not ternary are stored; empty where there are none."""
    roles = {ROLE[role] for role in TERNARY_LINEARS}
    found = {r.encoding.name for r in file.tensors.values() if r.key.role in roles and r.key.part == 0}
    return " and ".join(sorted(name for name in found if not name.startswith("TERNARY")))


class _Weights:
    """Compares the source's tensors as the reference loads them, and counts equal ones. Tells the layer."""

    def __init__(self, file: PackedFile, progress: Progress) -> None:
        self.file, self.progress, self.tensors, self.ternary = file, progress, 0, 0

    def compare(self, key: Key, tensor: Stored) -> None:
        if key.layer != NONE:
            layers = self.file.configs[key.stack].n_layers
            self.progress(f"comparing with the source: the reference, layer {key.layer + 1} of {layers}")
        record = self.file.tensors[key]
        pairs: list[tuple[str, NDArray[Any], NDArray[Any]]]
        if isinstance(tensor, Ternary):
            pairs = [
                ("codes", self.file.codes(record), tensor.codes),
                ("scales", self.file.scales(record), tensor.scales),
            ]
            self.ternary += tensor.codes.size
        else:
            values = tensor.all()
            if record.encoding.kind == "float":
                values = values.astype(record.encoding.dtype).astype(np.float32)
            else:
                values = stored_rows(torch.from_numpy(np.ascontiguousarray(values)), "int8").numpy()
            pairs = [("values", self.file.values(record), values)]
        for what, found, expected in pairs:
            if not np.array_equal(found.ravel(), expected.ravel()):
                raise VerificationError(f"{key.name}: {what} in the file differ from the source's")
        self.tensors += 1


# ---- texts ----


def _asked(source: Source, config: ModelConfig, tokens: int) -> tuple[list[Texts], str]:
    """Short texts and a long one, or images for a vision stack; and a description of them.

    Every logit of the short ones is compared. The long one begins with an image, or has a prefix, if the model takes
    that.
    """
    if config.input == "images":
        return [images_of(config, IMAGES // 4), images_of(config, IMAGES)], "images"
    ids, origin = _tokens(source, config, PROMPTS * SHORT + tokens)
    places = source.config.vision.max_context if source.config.vision and config.image_token else 0
    length = min(config.max_context - places, WINDOW, tokens)
    plain = config.replace(mask="causal") if config.mask == "prefix" else config
    short = texts_of(plain, _windows(ids[: PROMPTS * SHORT], min(SHORT, config.max_context)))
    windows = _windows(ids[PROMPTS * SHORT :], max(length, 2))
    if places and length > 1:
        return [short, behind_images(source.config, windows)], f"{origin}, behind images"
    return [short, texts_of(plain if places else config, windows)], origin


def _tokens(source: Source, config: ModelConfig, n: int) -> tuple[NDArray[np.int64], str]:
    """Real text if the source has a tokenizer, else random ids; never the image token."""
    if source.tokenizer is None:
        ids, origin = np.random.default_rng(0).integers(0, config.vocab_size, n), "random tokens (no tokenizer)"
    else:
        from tokenizers import Tokenizer

        words = Tokenizer.from_buffer(source.tokenizer)
        found = words.encode(inspect.getsource(difflib), add_special_tokens=False).ids
        ids, origin = np.resize(np.array(found, np.int64), n), "Python's difflib"
    return np.where(ids == config.image_token, 0, ids) if config.image_token else ids, origin


def _windows(ids: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return ids[: max(len(ids) // length, 1) * length].reshape(-1, length)


# ---- what the reference computes ----


class _Sums:
    """Log-probabilities of the targets of texts, from logits of one part of the vocabulary after another."""

    def __init__(self, texts: Texts) -> None:
        assert texts.targets is not None
        self.targets = torch.from_numpy(texts.targets)
        self.total = torch.full(self.targets.shape, -math.inf, dtype=torch.float64)
        self.chosen = torch.zeros(self.targets.shape, dtype=torch.float64)

    def add(self, rows: slice, part: torch.Tensor) -> None:
        """part: logits (n, T, rows)."""
        part = part.double()
        self.total = torch.logaddexp(self.total, part.logsumexp(-1))
        inside = (self.targets >= rows.start) & (self.targets < rows.stop)
        place = (self.targets - rows.start).clamp(0, part.shape[-1] - 1)
        self.chosen += torch.where(inside, part.gather(-1, place[..., None])[..., 0], 0.0)

    def scores(self) -> NDArray[np.float64]:
        return (self.chosen - self.total)[self.targets != NOTHING].numpy()


def _prompt_logits(engine: Model, prompts: NDArray[np.int64]) -> NDArray[np.float32]:
    """The logits of every token, (n, T, V)."""
    rows = []
    with engine.session(n_ctx=prompts.shape[1]) as session:
        for tokens in prompts.tolist():
            session.reset()
            rows.append(session.append(tokens, "all"))
    return np.array(rows)


def _log_probabilities(
    source: Source, passes: Sequence[Pass], states: list[list[torch.Tensor]], engine: NDArray[np.float32]
) -> list[list[Scores]]:
    """Those of the targets, by pass and texts; every logit of the prompts is compared with the engine's on the way."""
    sums = [[_Sums(texts) for texts in each.texts] for each in passes]
    apart, floor = np.zeros(engine.shape[:2]), np.zeros(engine.shape[:2])
    for rows, parts in logits(source, passes, states):
        for total, part in zip(itertools.chain(*sums), itertools.chain(*parts), strict=True):
            total.add(rows, part)
        ref32, ref64 = parts[REF32][0], parts[REF64][0]
        apart += np.abs(engine[:, :, rows] - ref32.numpy()).sum(-1)
        floor += (ref64 - ref32).abs().sum(-1).numpy()
    found, expected = (float(np.median(d)) / source.config.vocab_size for d in (apart, floor))
    check_limit("median difference of all logits of a token in short prompts", found, EXACT + 1.5 * expected)
    return [[total.scores() for total in each] for each in sums]
