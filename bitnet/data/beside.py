"""Pictures that a record names beside its messages, as data sets of TRL have them; and whether a record has pictures.

    {"images": ["a.png"], "messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", …}]}, …]}

Each goes in the place of an image that is not named. Without such places all stand before the first question.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitnet.data.files import DataError
from bitnet.data.tokenizer import IMAGE
from bitnet_runtime.images.prompts import IMAGES, NAMES

BESIDE = ("images", "image")  # beside the messages


def has_pictures(record: Mapping[str, Any], messages: Sequence[Any]) -> bool:
    """Whether there are pictures in the messages, or beside them in their record."""
    named = any(record.get(name) for name in BESIDE)
    return named or any(isinstance(part, dict) and part.get("type") in IMAGES for part in _parts(messages))


def within(messages: Sequence[Any], record: Mapping[str, Any], where: str) -> list[Any]:
    """The messages, with the pictures beside them in their parts. Raises DataError if they do not fit."""
    given = [record[name] for name in BESIDE if record.get(name)]
    if not given:
        return list(messages)
    pictures = given[0] if isinstance(given[0], list) else given
    if len(given) > 1 or not all(isinstance(each, str) for each in pictures):
        raise DataError(
            f'{where}: beside "messages" stands {json.dumps(given)[1:-1]:.80}, expected a list of paths, '
            '"images": ["a.png"]'
        )
    if IMAGE in json.dumps(messages):  # as other trainers write it; here words never become an image
        raise DataError(f'{where}: a text spells {IMAGE}, expected a part {{"type": "image"}} in its place')
    places = sum(map(_is_place, _parts(messages)))
    if not places:
        return _before_the_first_question(messages, pictures, where)
    if places != len(pictures):
        raise DataError(
            f'{where}: there are {len(pictures)} pictures beside "messages" and {places} places for them, parts '
            '{"type": "image"}; expected as many'
        )
    left = iter(pictures)
    return [_filled(message, left) for message in messages]


def _parts(messages: Sequence[Any]) -> Iterator[Any]:
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        yield from content if isinstance(content, list) else ()


def _is_place(part: Any) -> bool:
    """Whether a part is an image that names none."""
    is_image = isinstance(part, dict) and part.get("type") == "image"
    return is_image and all(part.get(name) is None for name in NAMES)


def _filled(message: Any, pictures: Iterator[str]) -> Any:
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = [{"type": "image", "image": next(pictures)} if _is_place(part) else part for part in message["content"]]
    return {**message, "content": parts}


def _before_the_first_question(messages: Sequence[Any], pictures: Sequence[str], where: str) -> list[Any]:
    asked = [i for i, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"]
    if not asked:
        raise DataError(f'{where}: pictures stand beside "messages", and no message of user asks about them')
    out, content = list(messages), messages[asked[0]].get("content")
    said = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = [{"type": "image", "image": name} for name in pictures]
    out[asked[0]] = {**out[asked[0]], "content": shown + said}
    return out
