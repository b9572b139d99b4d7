"""Where images stand in a prompt: PaliGemma's rule for texts, and the parts of messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitnet_runtime.errors import InvalidParameterError, shown

if TYPE_CHECKING:
    from bitnet_runtime.images.processor import Image

_FORMS = {
    "image": '{"type": "image", "image": …}',
    "image_url": '{"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}',
    "input_image": '{"type": "input_image", "image_url": "data:image/png;base64,…"}',
}
IMAGES = tuple(_FORMS)  # types of parts, and the names under which these have it
NAMES = ("image", "image_url", "url", "path")
_TEXTS = {"input_text": "text", "output_text": "text"}
_KNOWS_PARTS = re.compile(r"""\bfor\s+[\w, ]+\s+in\s+(\w+(\.|\[['"]))?content\b""")


def placed(tokens: Sequence[int], image_token: int, n_images: int, n_tokens: int) -> list[int]:
    """The tokens, with as many image tokens as images have vectors: `n_tokens` each.

    They stand where the prompt has them, once for an image or once for a vector; in front, if it has none.
    """
    found, expected = list(tokens).count(image_token), n_images * n_tokens
    if found == 0:
        return [image_token] * expected + list(tokens)
    if found not in (n_images, expected):
        raise InvalidParameterError(
            f"the prompt has {found} image tokens (id {image_token}), expected {n_images}, one for each image, or "
            f"{expected}, one for each of their vectors, or none",
            "images",
        )
    each = [image_token] * (expected // found)
    return [one for token in tokens for one in (each if token == image_token else (token,))]


def images_of(messages: Sequence[Mapping[str, Any]]) -> list[Image]:
    """The images of a conversation, in their order. Raises InvalidParameterError: a part is not as it should be."""
    return [
        _image(part)
        for message in messages
        for part in _parts(message) or ()
        if isinstance(part, Mapping) and part.get("type") in IMAGES
    ]


def without_images(messages: Sequence[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """What a template is given of messages with images: {"type": "image"} in the place of each.

    A template that knows no parts is given their text alone. Raises InvalidParameterError: one of them has none.
    """
    knows_parts = _KNOWS_PARTS.search(template) is not None
    out = []
    for message in messages:
        parts = _parts(message)
        if parts is not None:
            if not knows_parts and (unknown := [part for part in parts if not is_known(part)]):
                raise InvalidParameterError(
                    f"messages has {shown(unknown[0])}, and the chat template knows texts and images alone", "messages"
                )
            plain = [_plain(part) for part in parts]
            texts = [part["text"] for part in plain if isinstance(part, Mapping) and part.get("type") == "text"]
            message = {**message, "content": plain if knows_parts else "\n".join(texts)}
        out.append(message)
    return out


def is_known(part: object) -> bool:
    """Whether a part of a message is a text or an image; other kinds are left to the template."""
    return isinstance(part, Mapping) and part.get("type") in (*IMAGES, *_TEXTS, "text")


def _parts(message: object) -> Sequence[Any] | None:
    """The parts of a message; None: its content is not a list of parts."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return None
    for part in content:
        _check(part)
    return content


def _check(part: object) -> None:
    """Check the parts of known types; others are left to the template."""
    if isinstance(part, Mapping) and "type" in part:
        kind = part["type"]
        is_text = kind == "text" or (isinstance(kind, str) and kind in _TEXTS)
        if not isinstance(kind, str) or (is_text and not isinstance(part.get("text"), str)):
            raise InvalidParameterError(
                f'messages has {shown(part)}, expected {{"type": "text", "text": "…"}}, or a part with an image',
                "messages",
            )


def _plain(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGES:
        return {"type": "image"}
    return {**part, "type": _TEXTS[kind]} if kind in _TEXTS else part


def _image(part: Mapping[str, Any]) -> Image:
    """The picture in a part: {"type": "image", "image": …}, or in OpenAI's form with a data: URL."""
    given = [part[name] for name in NAMES if part.get(name) is not None]
    value = given[0] if len(given) == 1 else None
    if isinstance(value, Mapping):  # {"type": "image_url", "image_url": {"url": "…"}}
        value = value.get("url")
    if value is None:
        raise InvalidParameterError(f"messages has {shown(part)}, expected {_FORMS[part['type']]}", "messages")
    image: Image = value
    return image
