"""Objective, model and options: what does not go together, and what to do about it."""

from __future__ import annotations

from bitnet.config import ModelConfig
from bitnet.settings import PRESET_SETTINGS, Settings
from bitnet.train import preferences
from bitnet.train.errors import TrainingError

Problem = tuple[bool, str, str]
"""Whether it is there, what was found, and what to do."""


def check(settings: Settings, config: ModelConfig) -> None:
    """Raises TrainingError if objective, model and options do not fit together."""
    if settings.preference:
        preferences.check(settings, config)
    problems = _of_images(settings, config) + _of_model(settings, config) + _of_options(settings, config)
    for there, found, advice in problems:
        if there:
            raise TrainingError(f"--objective {settings.objective}, but {found}; {advice}")


def _of_images(settings: Settings, config: ModelConfig) -> list[Problem]:
    """A model that sees images, and an objective that is not its own."""
    objective, sees = settings.objective, config.vision is not None
    towers, decoder = (sees and config.has_head == answers for answers in (False, True))
    shape = "" if settings.source or settings.preset in PRESET_SETTINGS else (
        f" ({settings.preset} is a published shape, to measure with `bitnet bench`; "
        "siglip-tiny and paligemma-tiny are to be trained)"
    )  # fmt: skip
    given = bool(settings.source)  # finetune has no presets
    return [
        (towers and objective != "contrastive", "two towers of images and texts learn by contrastive alone",
         "add --objective contrastive" if given else f"take that, or --preset paligemma-tiny for answers{shape}"),
        (decoder and objective != "next", "a decoder that sees images learns by next alone",
         "add --objective next" if given else
         f"take that, or --preset siglip-tiny to compare images with texts{shape}"),
    ]  # fmt: skip


def _of_model(settings: Settings, config: ModelConfig) -> list[Problem]:
    """The model, by what the objective asks of it."""
    head = f"the model has {'a' if config.has_head else 'no'} head"
    problems = {
        "next": [
            (not config.has_head, head, "add --set has_head=yes, or --objective contrastive"),
            (config.mask == "bidirectional", "mask is bidirectional, so each token sees the one it is to say",
             "add --set mask=causal, or --objective mlm"),
            (config.vision is not None and config.vision.pooling != "none", "the vision stack has a pooling, and "
             "nothing would train it", "add --set vision.pooling=none"),
        ],
        "mlm": [
            (not config.has_head, head, "add --set has_head=yes"),
            (config.mask != "bidirectional", f"mask is {config.mask}, so a masked token sees one side alone",
             "add --set mask=bidirectional"),
        ],
        "contrastive": [
            (config.has_head, head, "add --set has_head=no" + " --set pooling=mean" * (config.pooling == "none")),
            (config.pooling == "none", "pooling is none, so a text has no vector", "add --set pooling=mean"),
            (config.mask == "prefix", "mask is prefix", "add --set mask=causal, or bidirectional"),
            (settings.batch < 2, "--batch is 1, so there is no other text to tell from", "raise --batch"),
        ],
    }  # fmt: skip
    of_text = (config.input != "tokens", "input is embeddings, and text has none", "add --set input=tokens")
    return [*problems[settings.objective], of_text]


def _of_options(settings: Settings, config: ModelConfig) -> list[Problem]:
    """Options that are of other objectives or models."""
    objective, sees = settings.objective, config.vision is not None
    decoder = sees and config.has_head
    plain, usual = objective == "next" and config.mask == "causal", Settings()
    compared = objective == "contrastive" and sees
    return [
        (settings.temperature != usual.temperature and (objective != "contrastive" or sees),
         "--temperature is of vectors of texts", "leave it out"),
        (settings.contrastive_loss != usual.contrastive_loss and not compared,
         "--contrastive-loss is of vectors of images and texts", "leave it out"),
        (settings.augment != usual.augment and not sees, "--augment is of images, and the model sees none",
         "leave it out"),
        (bool(settings.chat) and objective != "next", "--chat is for the next token", "give --data"),
        (bool(settings.mixture) and (objective != "next" or sees), "--mixture is of text, for the next token",
         "give --data"),
        (settings.documents and (not plain or sees), "--documents is of text, for the next token of a causal model",
         "leave it out"),
        (settings.draft and (not plain or sees), f"--draft{'-only' * settings.draft_only} is for causal models of the "
         "next token, of text alone", "leave it out"),
        (settings.distilled > 0 and objective != "next" and not compared,
         "only models of the next token, and of images and texts, can be distilled", "leave --distill out"),
        (settings.distill_relations > 0 and compared, "--distill-relations is of decoders", "leave it out"),
        (settings.distill_features > 0 and not sees, "--distill-features is of images, and the model sees none",
         "leave it out"),
        (settings.distill_features > 0 and decoder and (settings.freeze_vision or settings.lora > 0),
         "--distill-features is of the vision stack, which stays as it is with --lora or --freeze-vision",
         "leave it out"),
        (settings.fim > 0 and (not plain or sees), "--fim is of text, for the next token of a causal model",
         "leave it out"),
    ]  # fmt: skip
