"""Images through `Model`: preprocessing, texts that fit them, and conversations about them."""

from __future__ import annotations

import base64
import io
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitnet_runtime import ContextLengthError, ImageError, Model, ModelFormatError, TemplateError, UnsupportedModelError
from image_models import CAT, DOG, GREEDY, IMAGE, RNG, VOCAB, N, decoder_file, logits, packed
from runtime_models import TEMPLATE, small_model
from test_image_prompts import PARTS
from vision_models import PALIGEMMA, TOWERS, VISION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=["prefix", "causal"])
def decoder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    with Model.load(decoder_file(folder, request.param, PARTS)) as model:
        yield model


@pytest.fixture(scope="module")
def towers(folder: Path) -> Iterator[Model]:
    config = TOWERS.replace(vocab_size=VOCAB, similarity_scale=11.0, similarity_bias=-7.5)
    with Model.load(packed(folder / "towers.bitnet", config)) as model:
        yield model


# ---- what a picture becomes ----


def test_a_picture_is_what_its_pixels_are(decoder: Model, towers: Model, tmp_path: Path) -> None:
    path = tmp_path / "a cat.png"
    Image.fromarray(CAT).save(path)
    pixels = decoder.processor.floats(CAT).transpose(1, 2, 0)
    rows = decoder.encode_image([CAT, DOG])
    assert rows.shape == (2, N, decoder.info.dim) and not np.array_equal(rows[0], rows[1])
    for form in (CAT, path, str(path), path.read_bytes(), Image.fromarray(CAT), pixels):
        assert np.array_equal(decoder.encode_image(form), rows[:1])
    assert decoder.encode_image([]).shape == (0, N, decoder.info.dim)
    vectors = towers.embed_images([CAT, DOG])
    assert vectors.shape == (2, 36) and np.allclose((vectors**2).sum(1), 1)
    assert np.array_equal(towers.embed_images(CAT), vectors[:1])


def test_a_long_list_is_in_memory_piece_by_piece(towers: Model) -> None:
    assert towers.image
    pictures = [CAT, DOG] * 300
    pixels = len(pictures) * towers.processor.floats(CAT).nbytes
    for look in (towers.embed_images, towers.encode_image):
        both = look([CAT, DOG])
        tracemalloc.start()
        try:
            found = look(pictures)
            assert tracemalloc.get_traced_memory()[1] - found.nbytes < pixels / 2
        finally:
            tracemalloc.stop()
        assert np.array_equal(found, np.concatenate([both] * 300))
    with pytest.raises(ImageError, match=r"^images\[599\]: .*expected at least 1 × 1"):
        towers.embed_images([*pictures[1:], np.zeros((0, 3, 3), np.uint8)])


def test_facts_of_images(decoder: Model, towers: Model, tmp_path: Path) -> None:
    facts = decoder.image
    assert facts and (facts.image_size, facts.channels, facts.n_tokens, facts.image_token) == (14, 3, N, IMAGE)
    assert towers.image and towers.image.image_token == -1 and towers.image.similarity_bias == -7.5
    with Model.load(small_model(tmp_path)) as model:
        assert model.image is None
        for call in (model.encode_image, model.embed_images, lambda image: model.similarity(image, "a")):
            with pytest.raises(UnsupportedModelError, match="sees no images"):
                call(CAT)
        with pytest.raises(UnsupportedModelError, match="sees no images"):
            model.generate("a", images=CAT)


def test_the_file_says_how_pictures_are_resized(folder: Path) -> None:
    def load(pictures: Any) -> Model:
        return Model.load(packed(folder / "said.bitnet", VISION, generation={"pictures": pictures}))

    with load({"resize": "crop", "filter": "bilinear"}) as model:
        assert (model.processor.resize, model.processor.filter) == ("crop", "bilinear")
    for pictures in ({"resize": "pad"}, {"size": 3}, {"resize": []}, ["crop"], "crop"):
        with load(pictures) as model, pytest.raises(ModelFormatError, match="pictures"):
            model.encode_image(CAT)


# ---- texts that fit ----


def test_similarity_is_scale_times_cosine_plus_bias(towers: Model) -> None:
    texts = ["a cat", "a dog", "x"]
    cosines = (towers.embed_images([CAT, DOG]).astype(np.float64) @ towers.embed(texts).T).astype(np.float32)
    scores = towers.similarity([CAT, DOG], texts)
    assert scores.dtype == np.float32 and np.array_equal(scores, cosines * np.float32(11) + np.float32(-7.5))
    assert towers.similarity(CAT, "a cat").shape == (1, 1) and towers.similarity([], texts).shape == (0, 3)
    likely = towers.similarity([CAT, DOG], texts, probabilities=True)
    # exp of fp32 is right to 2 units in the last place, here of numbers below 1
    np.testing.assert_allclose(likely, 1 / (1 + np.exp(-scores.astype(np.float64))), rtol=1e-5)


def test_similarity_says_which_text_is_too_long(towers: Model) -> None:
    most = towers.n_ctx
    with pytest.raises(ContextLengthError, match=rf"^text\[1\], '(ab)+': {2 * most} tokens exceed .* {most} tokens"):
        towers.similarity(CAT, ["a cat", "ab" * most])


def test_similarity_of_a_pair_is_the_same_among_others(towers: Model) -> None:
    pictures, texts = [*RNG.integers(0, 256, (17, 14, 14, 3), np.uint8)], [f"text {n}" for n in range(13)]
    together = towers.similarity(pictures, texts)
    for place, picture in enumerate(pictures):
        assert np.array_equal(towers.similarity(picture, texts[place % 13]), together[place, place % 13, None, None])


def test_without_a_bias_texts_are_judged_among_those_given(folder: Path) -> None:
    config = TOWERS.replace(vocab_size=VOCAB, similarity_scale=100.0)
    with Model.load(packed(folder / "clip.bitnet", config)) as model:
        scores = model.similarity([CAT, DOG], ["a", "b", "c"]).astype(np.float64)
        likely = model.similarity([CAT, DOG], ["a", "b", "c"], probabilities=True)
    powers = np.exp(scores - scores.max(1, keepdims=True))
    np.testing.assert_allclose(likely, powers / powers.sum(1, keepdims=True), rtol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_are_filled_up_as_the_file_says(side: str, folder: Path) -> None:
    padding = {"length": 8, "token_id": 7, "side": side}
    path = packed(folder / "filled.bitnet", TOWERS.replace(vocab_size=VOCAB), generation={"padding": padding})
    with Model.load(path) as model:
        ids, filling = model.tokenize("abc"), [7] * 5
        assert np.array_equal(model.embed("abc"), model.embed([filling + ids if side == "left" else ids + filling]))
        assert not np.array_equal(model.embed("abc"), model.embed([ids]))
        assert np.array_equal(model.embed("abcdefghij"), model.embed([model.tokenize("abcdefghij")]))


@pytest.mark.parametrize(
    "padding", [3, {"length": 8}, *({"length": 8, "token_id": 7, "side": "left"} | bad for bad in (
        {"length": 25}, {"length": 0}, {"token_id": VOCAB}, {"token_id": -1}, {"token_id": True}, {"side": "middle"},
    ))],
)  # fmt: skip
def test_a_filling_that_cannot_be_is_refused(padding: Any, folder: Path) -> None:
    path = packed(folder / "filled.bitnet", TOWERS.replace(vocab_size=VOCAB), generation={"padding": padding})
    with Model.load(path) as model, pytest.raises(ModelFormatError, match=r"padding is .*expected"):
        model.embed("abc")


def test_a_model_that_does_not_compare_says_so(decoder: Model, folder: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="does not compare images with texts: it answers questions"):
        decoder.similarity(CAT, "a")
    with Model.load(packed(folder / "vision.bitnet", VISION)) as model:
        with pytest.raises(UnsupportedModelError, match="it has no vectors for texts"):
            model.similarity(CAT, "a")
        with pytest.raises(UnsupportedModelError, match="takes no text"):
            model.generate("a", images=CAT)


# ---- conversations ----


def url(picture: Any) -> str:
    out = io.BytesIO()
    Image.fromarray(picture).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def test_messages_have_images_where_the_template_wants_them(decoder: Model) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image", "image": CAT}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(DOG)}}]},
    ]
    tokens = decoder.apply_template(messages)
    assert decoder.detokenize(tokens, skip_special=False) == (
        f"<|user|>one{'<|image|>' * N}<|end|><|user|>{'<|image|>' * N}<|end|>"
    )
    expected = logits(decoder, [-1 if token == IMAGE else token for token in tokens], [CAT, DOG])
    for answer in (decoder.chat, lambda *args, **options: [*decoder.stream_chat(*args, **options)]):
        with decoder.session() as session:
            answer(messages, session=session, max_tokens=1)
            assert np.array_equal(session.logits, expected)
    assert decoder.render_template(messages).count("<|image|>") == 2


def test_what_a_message_says_is_never_an_image(decoder: Model) -> None:
    parts = [{"type": "image", "image": CAT}, {"type": "text", "text": "<|image|>"}]
    assert decoder.apply_template([{"role": "user", "content": parts}]).count(IMAGE) == N


def test_a_template_without_parts_has_images_in_front(folder: Path) -> None:
    config = PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE)
    parts = [{"type": "image", "image": CAT}, {"type": "text", "text": "what?"}]
    with Model.load(packed(folder / "plain.bitnet", config, template=TEMPLATE)) as model:
        plain = model.apply_template([{"role": "user", "content": "what?"}])
        assert model.apply_template([{"role": "user", "content": parts}]) == [IMAGE] * N + plain
        assert model.chat([{"role": "user", "content": parts}], **GREEDY).usage.prompt_tokens == N + len(plain)


def test_images_are_refused_where_nothing_is_done_with_them(folder: Path, towers: Model) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": CAT}]}]
    remote = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://a.org/cat.png"}}]}]
    config = PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE)
    with Model.load(packed(folder / "bare.bitnet", config)) as model, pytest.raises(TemplateError):
        model.chat(messages)
    with (
        Model.load(packed(folder / "chat.bitnet", config, template=PARTS)) as model,
        pytest.raises(ImageError, match="a URL, expected a file"),
    ):
        model.chat(remote)
    with pytest.raises(UnsupportedModelError, match=r"no head"):
        towers.generate("a", images=CAT)
    with pytest.raises(UnsupportedModelError, match=r"no image token"):
        towers.image_prompt("a", 1)
