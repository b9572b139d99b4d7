"""Vectors of pictures over HTTP: those of the model; what is not a picture, or not for this model, is an error."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitnet_runtime import Model
from image_models import IMAGE, VOCAB, packed
from runtime_models import TEMPLATE
from servers import post, served
from vision_models import CLIP, PALIGEMMA, TOWERS

ASKS = PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE)


def urls(n: int) -> list[str]:
    out = []
    for seed in range(n):
        png = io.BytesIO()
        Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 30, 3), np.uint8)).save(png, "PNG")
        out.append("data:image/png;base64," + base64.b64encode(png.getvalue()).decode())
    return out


@pytest.mark.parametrize("config", [TOWERS, CLIP], ids=["siglip", "clip"])
def test_pictures_get_the_vectors_of_the_model(tmp_path: Path, config: Any) -> None:
    path = packed(tmp_path / "sees.bitnet", config.replace(vocab_size=VOCAB))
    given = urls(3)
    with Model.load(path, threads=1) as model, served(path) as serving:
        expected = model.embed_images(given)
        forms: list[Any] = [
            [{"image": url} for url in given],
            [{"type": "image_url", "image_url": {"url": url}} for url in given],
        ]
        for asked in forms:
            status, answer = post(serving, "/v1/embeddings", {"input": asked})
            assert status == 200
            assert (np.array([row["embedding"] for row in answer["data"]], np.float32) == expected).all()
        status, answer = post(serving, "/v1/embeddings", {"input": forms[0][1], "encoding_format": "base64"})
        (row,) = answer["data"]
        assert (np.frombuffer(base64.b64decode(row["embedding"]), "<f4") == expected[1]).all()
        _, answer = post(serving, "/v1/embeddings", {"input": [*forms[0][:1], {"image": "data:image/png;base64,AAAA"}]})
        assert answer["error"]["message"].startswith("images[1]: ")
        for wrong, param, code in (
            ([forms[0][0], "a text"], "input", "invalid_value"),
            ({"image": "/etc/passwd"}, "input", "invalid_value"),
            ({"image": "http://127.0.0.1/x.png"}, "input", "invalid_value"),
            ({"image": "data:image/png;base64,AAAA"}, "input", "invalid_image"),
            ([forms[0][0]] * 65, "input", "invalid_value"),
        ):
            status, answer = post(serving, "/v1/embeddings", {"input": wrong})
            assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, code)


def test_images_are_never_read_from_files_or_addresses(tmp_path: Path) -> None:
    path = packed(tmp_path / "asks.bitnet", ASKS, template=TEMPLATE)
    with served(path) as serving:
        for url in ("/etc/passwd", "http://localhost/x.png", {"url": "file:///etc/passwd"}, 5):
            parts = [{"type": "image_url", "image_url": each} for each in ("data:,x", url)]
            asked = {"messages": [{"role": "user", "content": parts}]}
            status, answer = post(serving, "/v1/chat/completions", asked)
            message = answer["error"]["message"]
            assert status == 400 and message.startswith("images[1] is ") and "expected a data: URL" in message


def test_an_image_token_without_an_image_is_of_the_prompt(tmp_path: Path) -> None:
    with served(packed(tmp_path / "asks.bitnet", ASKS)) as serving:
        status, answer = post(serving, "/v1/completions", {"prompt": [IMAGE]})
        assert (status, answer["error"]["param"]) == (400, "prompt")


def test_a_model_whose_pictures_are_no_vectors_says_so(tmp_path: Path) -> None:
    with served(packed(tmp_path / "asks.bitnet", ASKS)) as serving:
        status, answer = post(serving, "/v1/embeddings", {"input": {"image": urls(1)[0]}})
        assert (status, answer["error"]["code"]) == (400, "unsupported_by_model")


def test_a_picture_for_a_model_without_a_template(tmp_path: Path) -> None:
    """As published PaliGemmas are: /v1/completions takes no pictures."""
    part = {"type": "image_url", "image_url": {"url": urls(1)[0]}}
    with served(packed(tmp_path / "asks.bitnet", ASKS)) as serving:
        for content, told, other in (("x", "/v1/completions", "--image"), ([part], "--image", "/v1/completions")):
            asked = {"messages": [{"role": "user", "content": content}]}
            status, answer = post(serving, "/v1/chat/completions", asked)
            message = answer["error"]["message"]
            assert (status, answer["error"]["code"]) == (400, "template_error")
            assert told in message and other not in message and "bitnet finetune --chat" in message
