"""A prompt made ready to be computed. All that is wrong with it is said here, before any work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_runtime.abilities import require_embedding, require_image_token, require_next_token
from bitnet_runtime.errors import ContextLengthError, InvalidParameterError, ModelFormatError, shown
from bitnet_runtime.ids import NO_TOKEN, token_ids
from bitnet_runtime.images.processor import count
from bitnet_runtime.images.prompts import placed
from bitnet_runtime.model_text import ModelText
from bitnet_runtime.sessions.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.images.processor import Image

SIDES = ("left", "right")
COUNTED = 100_000  # characters, whose tokens are made in a tenth of a second


class Ready(NamedTuple):
    """A prompt ready to be computed."""

    tokens: list[int]  # -1 where a vector of an image stands
    pixels: NDArray[np.float32] | None = None  # of the images


def ready(
    model: ModelText, prompt: Prompt, images: Image | Sequence[Image] | None = None, session: Session | None = None
) -> Ready:
    """What is to be continued, of which there is one token at least: what `Writer` takes. session: it has to fit there.

    Raises all that is wrong with a prompt, before any work.
    """
    require_next_token(model)
    n_ctx = session.n_ctx if session else model.n_ctx
    if images is None or (isinstance(images, (list, tuple)) and not images):
        return Ready(_prompt(model, prompt, n_ctx))
    seen, n = require_image_token(model), count(images)
    if isinstance(prompt, str):
        _check_length(model, prompt, n_ctx)
        tokens, start = model.image_prompt(prompt, n), n * seen.n_tokens
        tokens[:start] = [NO_TOKEN] * start  # alone: a tokenizer may have more of them in texts
    else:
        ids = token_ids(prompt, "prompt", model.vocab_size, or_text=True)
        tokens = placed(ids, seen.image_token, n, seen.n_tokens)
        tokens = [NO_TOKEN if token == seen.image_token else token for token in tokens]
    if len(tokens) > n_ctx:
        taken = n * seen.n_tokens
        fit = max(0, n_ctx - len(tokens) + taken) // seen.n_tokens
        some = f"{taken} of them are those of {n} images, {seen.n_tokens} each, and {fit} would fit"
        raise ContextLengthError(len(tokens), n_ctx, most=model.info.max_context, some=some)
    return Ready(tokens, model.processor.batch(images))  # only now: to decode many takes long


def _prompt(model: ModelText, prompt: Prompt, n_ctx: int) -> list[int]:
    """A prompt without images."""
    tokens = tokens_of(model, prompt, "prompt", n_ctx)
    if not tokens:
        found = "is empty and the model has no start token" if isinstance(prompt, str) else "is an empty list"
        raise InvalidParameterError(f"the prompt {found}; give at least one character or token id", "prompt")
    if not isinstance(prompt, str) and model.image is not None and (there := tokens.count(model.image.image_token)):
        raise InvalidParameterError(
            f"the prompt has {there} image tokens (id {model.image.image_token}), expected 0: no images are given",
            "images",
        )
    return tokens


def tokens_of(model: ModelText, text: Prompt, param: str, n_ctx: int) -> list[int]:
    """Token ids of a text that has to fit the context."""
    require_embedding(model)
    if isinstance(text, str):
        _check_length(model, text, n_ctx)
        tokens = model.tokenize(text)
    else:
        tokens = token_ids(text, param, model.vocab_size, or_text=True)
    if len(tokens) > n_ctx:
        raise ContextLengthError(len(tokens), n_ctx, most=model.info.max_context)
    return tokens


def text_tokens(model: ModelText, text: Prompt) -> list[int]:
    """The tokens of a text to embed: a string is padded to the length the model was trained on."""
    tokens = tokens_of(model, text, "text", model.n_ctx)
    padding = _padding(model)
    if padding is None or not isinstance(text, str):
        return tokens
    length, token, left = padding
    filling = [token] * (length - len(tokens))
    return filling + tokens if left else tokens + filling


def _padding(model: ModelText) -> tuple[int, int, bool] | None:
    """Length of a padded text, the padding token, and whether it is on the left; FORMAT.md §5."""
    said = model._generation.get("padding")
    if said is None:
        return None
    given: dict[str, Any] = said if isinstance(said, dict) else {}
    length, token, side = given.get("length", 0), given.get("token_id", -1), given.get("side")
    ints = type(length) is type(token) is int
    if not ints or not (0 < length <= model.info.max_context and 0 <= token < model.vocab_size) or side not in SIDES:
        raise ModelFormatError(
            f'{model.path}: padding is {shown(said)}, expected {{"length": 1 to {model.info.max_context}, '
            f'"token_id": below {model.vocab_size}, "side": "left" or "right"}}'
        )
    return length, token, side == "left"


def _check_length(model: ModelText, text: str, n_ctx: int) -> None:
    """Refuse a text that is much too long before tokenizing it; a shorter one can be tokenized and counted."""
    if len(text) > COUNTED and (fewest := model._tokenizer.fewest_tokens(text)) > n_ctx:
        raise ContextLengthError(fewest, n_ctx, at_least=True, most=model.info.max_context)
