"""Images through `Model`: preprocessing, texts that fit them, and texts about them."""

from __future__ import annotations

import base64
import io
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import (
    ClosedError,
    ContextLengthError,
    ImageError,
    InvalidParameterError,
    Model,
    ModelFormatError,
    TemplateError,
    UnsupportedModelError,
)
from bitnet_runtime.images import vision
from runtime_models import TEMPLATE, byte_tokenizer, small_model
from test_image_prompts import PARTS
from vision_models import CAUSAL, PALIGEMMA, TOWERS, VISION

N = 9  # vectors of an image of these models
RNG = np.random.default_rng(4)
CAT, DOG = RNG.integers(0, 256, (2, 40, 30, 3), np.uint8)
GREEDY: dict[str, Any] = {"max_tokens": 4, "temperature": 0}


def tokenizer() -> Tokenizer:
    made = byte_tokenizer()
    made.add_special_tokens(["<|image|>"])
    return made


IMAGE = tokenizer().token_to_id("<|image|>")
VOCAB = tokenizer().get_vocab_size()


def packed(
    path: Path, config: ModelConfig, *, template: str = "", generation: Any = None, words: Tokenizer | None = None
) -> Path:
    """A random model with a tokenizer, a template and settings."""
    definition = (words or tokenizer()).to_str().encode()
    random_model(config, path.with_suffix(".plain"))
    plain = PackedFile.open(path.with_suffix(".plain"))

    def same(spec: Spec) -> Encoded:
        record = plain.tensors[spec.key]
        return Encoded(record.encoding, record.scope, plain.stored(record), plain.scales(record))

    metadata = {"generation": generation or {}}
    write_packed(path, plain.configs, same, metadata=metadata, tokenizer=definition, template=template.encode() or None)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=["prefix", "causal"])
def decoder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    config = {"prefix": PALIGEMMA, "causal": CAUSAL}[request.param].replace(vocab_size=VOCAB, image_token=IMAGE)
    path = packed(folder / f"{request.param}.bitnet", config, template=PARTS, generation={"bos_token_id": 2})
    with Model.load(path) as model:
        yield model


@pytest.fixture(scope="module")
def towers(folder: Path) -> Iterator[Model]:
    config = TOWERS.replace(vocab_size=VOCAB, similarity_scale=11.0, similarity_bias=-7.5)
    with Model.load(packed(folder / "towers.bitnet", config)) as model:
        yield model


def logits(model: Model, tokens: list[int], images: list[Any]) -> Any:
    """The logits after a prompt, through session calls: -1 takes the next vector."""
    rows = model.encode_image(images).reshape(-1, model.info.dim)
    with model.session() as session:
        if model.mask == "prefix":
            return session.append_prefix(tokens, rows)
        for token in tokens:
            last = session.append_embeddings(rows[:1]) if token == -1 else session.append([token])
            rows = rows[1:] if token == -1 else rows
    return last


def seen(model: Model, prompt: Any, images: Any) -> Any:
    """The same, by `generate`."""
    with model.session() as session:
        model.generate(prompt, images=images, session=session, max_tokens=1)
        return session.logits


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


# ---- texts about images ----


def test_images_stand_before_the_start_token_and_a_line_break_ends_the_text(decoder: Model) -> None:
    for prompt in ("what?", "what?\n"):
        text = decoder.tokenize(prompt + "\n")
        assert text[0] == 2
        found, other = (seen(decoder, prompt, images) for images in ([CAT, DOG], [DOG, CAT]))
        assert np.array_equal(found, logits(decoder, [-1] * 2 * N + text, [CAT, DOG]))
        assert not np.array_equal(found, other)
        assert decoder.generate(prompt, images=[CAT, DOG], **GREEDY).usage.prompt_tokens == 2 * N + len(text)
        assert np.array_equal(seen(decoder, prompt, CAT), logits(decoder, [-1] * N + text, [CAT]))
        assert decoder.image_prompt(prompt, 2) == [IMAGE] * 2 * N + text


@pytest.mark.parametrize("n_images", [-1, 1.0, None])
def test_no_prompt_is_made_for_less_than_no_images(n_images: Any, decoder: Model) -> None:
    with pytest.raises(InvalidParameterError, match=r"n_images is .*, expected a number, 0 or more") as caught:
        decoder.image_prompt("a", n_images)
    assert caught.value.param == "n_images"


def test_token_ids_say_where_images_stand(decoder: Model) -> None:
    expected = logits(decoder, [5, *[-1] * N, 6, *[-1] * N, 7], [CAT, DOG])
    for ids in ([5, IMAGE, 6, IMAGE, 7], [5, *[IMAGE] * N, 6, *[IMAGE] * N, 7], np.array([5, IMAGE, 6, IMAGE, 7])):
        assert np.array_equal(seen(decoder, ids, [CAT, DOG]), expected)
    for ids, images, message in (
        ([5, IMAGE], [CAT, DOG], rf"has 1 image tokens \(id {IMAGE}\), expected 2, .* or 18, "),
        ([5, IMAGE, IMAGE], None, rf"has 2 image tokens \(id {IMAGE}\), expected 0"),
        ([5, IMAGE, IMAGE], [], "expected 0"),
    ):
        with pytest.raises(InvalidParameterError, match=message) as caught:
            decoder.generate(ids, images=images, **GREEDY)
        assert caught.value.param == "images"


def test_a_text_never_says_that_there_is_an_image(decoder: Model) -> None:
    tokens = decoder.tokenize("<|image|>\n")
    assert IMAGE not in tokens
    assert np.array_equal(seen(decoder, "<|image|>", CAT), logits(decoder, [-1] * N + tokens, [CAT]))
    assert decoder.generate("<|image|>", **GREEDY).usage.prompt_tokens == len(tokens) - 1


def test_without_images_a_prompt_is_what_it_was(decoder: Model) -> None:
    expected = decoder.generate(decoder.tokenize("abc"), **GREEDY).tokens
    assert decoder.generate("abc", **GREEDY).tokens == decoder.generate("abc", images=[], **GREEDY).tokens == expected


def test_several_prompts_take_a_list_of_images_each(decoder: Model) -> None:
    images: list[Any] = [[CAT], [], [DOG, CAT]]
    together = decoder.generate(["a", "b", "c"], images=images, **GREEDY)
    alone = [decoder.generate(text, images=of_it, **GREEDY) for text, of_it in zip("abc", images, strict=True)]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    for wrong in ([CAT], CAT, [[CAT]] * 2):
        with pytest.raises(InvalidParameterError, match="expected 3 lists, of the pictures of each prompt"):
            decoder.generate(["a", "b", "c"], images=wrong, **GREEDY)


def test_a_session_never_takes_one_image_for_another(decoder: Model) -> None:
    with decoder.session() as session:
        for image in (CAT, DOG, CAT):
            decoder.generate("what?", images=image, session=session, max_tokens=1)
            assert np.array_equal(session.logits, seen(decoder, "what?", image))
        assert list(session.tokens[:N]) == [-1] * N


@pytest.mark.parametrize("options", [{"draft": 4}, {"repeat_penalty": 1.3, "repeat_last_n": -1}])
def test_drafts_and_penalties_pass_images_by(decoder: Model, options: Any) -> None:
    options = {"max_tokens": 12, "temperature": 0} | options
    with_images = decoder.generate("abab abab", images=CAT, **options)
    assert with_images.tokens == decoder.generate("abab abab", images=CAT, **options | {"draft": 0}).tokens


@pytest.mark.parametrize("who", ["stream", "session", "model"])
def test_who_ends_a_call_ends_its_images(folder: Path, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """From another thread, while the first of four images is computed."""
    packed(folder / "ending.bitnet", PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE))
    computed, obeying = 0, vision._obeying
    with Model.load(folder / "ending.bitnet", threads=1) as model, model.session() as session:
        pictures = [Image.new("RGB", (4, 4))] * 4
        stream = model.stream("a", images=pictures, session=session, max_tokens=2)
        end: Callable[[], object] = {"stream": stream.close, "session": session.cancel, "model": model.close}[who]

        def ended(*call: Any) -> int:
            nonlocal computed
            computed += 1
            thread = threading.Thread(target=end)
            thread.start()
            if who == "session":
                thread.join()
            while not call[-1].now:  # the library is told, whatever else waits for this call
                time.sleep(0)
            return obeying(*call)

        monkeypatch.setattr(vision, "ROWS", 1)
        monkeypatch.setattr(vision, "_obeying", ended)
        if who == "model":
            with pytest.raises(ClosedError):
                model.encode_image(pictures)
        else:
            assert list(stream) == [] or stream.result
            assert stream.result is not None
            assert stream.result.finish_reason == "cancelled"
            assert stream.result.tokens == []
    assert computed == 1


def test_what_is_too_long_is_refused_with_both_numbers(decoder: Model) -> None:
    with pytest.raises(ContextLengthError) as caught:
        decoder.generate("abc", images=[CAT] * 7, **GREEDY)
    assert (caught.value.n_prompt, caught.value.n_ctx) == (7 * N + 5, 64)
    said = f"{7 * N} of them are those of 7 images, {N} each, and {(64 - 5) // N} would fit"
    assert said in str(caught.value)


@pytest.mark.parametrize("images", [b"no picture", [CAT, "none.png"], np.full((14, 14), np.nan), 7])
def test_bad_pictures_are_refused_before_any_work(decoder: Model, images: Any) -> None:
    with pytest.raises(ImageError):
        decoder.stream("a", images=images)


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
