"""Where images stand in a prompt, and in messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitnet_runtime import InvalidParameterError
from bitnet_runtime.chat.template import ChatTemplate
from bitnet_runtime.images.prompts import images_of, placed, without_images
from bitnet_runtime.tokenizer.text import Tokenizer
from runtime_models import TEMPLATE, byte_tokenizer

IMAGE = 9
PARTS = (
    "{% for message in messages %}<|{{ message.role }}|>{% for part in message['content'] %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}<|end|>{% endfor %}"
)


@pytest.mark.parametrize(
    ("tokens", "n_images", "expected"),
    [
        ([1, 2], 1, [9, 9, 9, 1, 2]),
        ([1, 2], 2, [9] * 6 + [1, 2]),
        ([1, 9, 2, 9], 2, [1, 9, 9, 9, 2, 9, 9, 9]),
        ([1, 9, 9, 9, 2], 1, [1, 9, 9, 9, 2]),
        ([], 1, [9, 9, 9]),
    ],
)
def test_image_tokens_are_as_many_as_images_have_vectors(tokens: list[int], n_images: int, expected: list[int]) -> None:
    assert placed(tokens, IMAGE, n_images, 3) == expected


@pytest.mark.parametrize(("found", "n_images"), [(2, 1), (4, 1), (1, 2), (3, 2), (7, 2)])
def test_another_number_of_image_tokens_is_refused_with_both_numbers(found: int, n_images: int) -> None:
    message = rf"has {found} image tokens \(id 9\), expected {n_images}, one for each image, or {3 * n_images},"
    with pytest.raises(InvalidParameterError, match=message) as caught:
        placed([9] * found, IMAGE, n_images, 3)
    assert caught.value.param == "images"


def said(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "what is it?"}
ARRAY = np.zeros((4, 4), np.uint8)
PILLOW = Image.new("L", (4, 4))


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}, None),
        ({"type": "image_url", "image_url": "data:image/png;base64,AA=="}, None),
        ({"type": "input_image", "image_url": "data:image/png;base64,AA=="}, None),
        ({"type": "image", "image": "data:image/png;base64,AA=="}, None),
        ({"type": "image", "url": "data:image/png;base64,AA=="}, None),
        ({"type": "image", "path": "a cat.png"}, "a cat.png"),
        ({"type": "image", "image": Path("a cat.png")}, Path("a cat.png")),
        ({"type": "image", "image": b"GIF"}, b"GIF"),
        ({"type": "image", "image": ARRAY}, ARRAY),
        ({"type": "image", "image": PILLOW}, PILLOW),
    ],
)
def test_images_are_found_in_the_parts_that_programs_send(part: Any, image: Any) -> None:
    messages = [{"role": "system", "content": "be brief"}, *said(part, TEXT)]
    (found,) = images_of(messages)
    assert found is image or found == (image or "data:image/png;base64,AA==")
    assert without_images(messages, PARTS) == [messages[0], *said({"type": "image"}, TEXT)]
    assert without_images(messages, TEMPLATE) == [messages[0], {"role": "user", "content": "what is it?"}]


def test_parts_of_text_have_one_name_and_are_joined_where_a_template_knows_none() -> None:
    messages = said({"type": "input_text", "text": "one"}, {"type": "image", "image": ARRAY}, TEXT)
    assert without_images(messages, TEMPLATE)[0]["content"] == "one\nwhat is it?"
    assert without_images(messages, PARTS)[0]["content"] == [
        {"type": "text", "text": "one"}, {"type": "image"}, TEXT,
    ]  # fmt: skip
    assert without_images(said(), TEMPLATE)[0]["content"] == ""
    refusal = {"type": "refusal", "refusal": "no"}
    assert without_images(said(TEXT, refusal), PARTS)[0]["content"] == [TEXT, refusal]
    with pytest.raises(InvalidParameterError, match=r"messages has .*'refusal'.* knows texts and images alone"):
        without_images(said(TEXT, refusal), TEMPLATE)
    assert images_of([{"role": "user", "content": "no parts"}, {"role": "assistant", "content": None}]) == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"},
        {"type": "image", "image": None},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": None}},
        {"type": "image", "image": "a.png", "path": "b.png"},
        {"type": "input_image", "file_id": "a"},
    ],
)
def test_parts_without_one_image_are_refused_and_the_form_of_their_type_is_said(part: Any) -> None:
    with pytest.raises(InvalidParameterError, match=rf'messages has .*expected \{{"type": "{part["type"]}", "image'):
        images_of(said(part))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"},
        {"type": "text", "text": None},
        {"type": "input_text", "text": 3},
        {"type": ["text"], "text": "a"},
        {"type": {}, "image": ARRAY},
    ],
)
@pytest.mark.parametrize("template", [TEMPLATE, PARTS])
def test_parts_without_a_text_are_refused(part: Any, template: str) -> None:
    messages = said({"type": "image", "image": ARRAY}, part)
    for call in (images_of, lambda given: without_images(given, template)):
        with pytest.raises(InvalidParameterError, match=r'messages has .*expected \{"type": "text", ') as caught:
            call(messages)
        assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "knows"),
    [
        (TEMPLATE, False),
        (PARTS, True),
        ("{%- for block in content %}{{ block.text }}{% endfor %}", True),
        ("{% for c in message['content'] | selectattr('type', 'equalto', 'image') %}{% endfor %}", True),
        ('{% for message in messages if message.content %}{{ message["content"] }}{% endfor %}', False),
        ("{{ messages[0].content }} {{ tool.type }}", False),
    ],
)
def test_templates_that_know_parts_are_told_from_others(template: str, knows: bool) -> None:
    (message,) = without_images(said({"type": "image", "image": ARRAY}, TEXT), template)
    assert isinstance(message["content"], list) == knows


@pytest.mark.parametrize("special", [True, False])
def test_what_a_message_says_is_no_image(special: bool) -> None:
    library = byte_tokenizer()
    (library.add_special_tokens if special else library.add_tokens)(["<|image|>"])
    image = library.token_to_id("<|image|>")
    tokenizer = Tokenizer(library.to_str().encode(), library.get_vocab_size(), special=image)
    messages = said({"type": "image", "image": ARRAY}, {"type": "text", "text": "<|image|> <|image|>"})
    template = ChatTemplate(PARTS)
    tokens = template.encode(without_images(messages, PARTS), tokenizer, {})
    assert tokens.count(image) == 1
    assert image not in tokenizer.encode("<|image|>") and image in tokenizer.encode("<|image|>", parse_special=True)
