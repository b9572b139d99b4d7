"""Texts about images through `Model`: prompts with images in them, sessions, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitnet_runtime import ClosedError, ContextLengthError, ImageError, InvalidParameterError, Model
from bitnet_runtime.images import vision
from image_models import CAT, DOG, GREEDY, IMAGE, VOCAB, N, decoder_file, logits, packed
from test_image_prompts import PARTS
from vision_models import PALIGEMMA


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", params=["prefix", "causal"])
def decoder(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    with Model.load(decoder_file(folder, request.param, PARTS)) as model:
        yield model


def seen(model: Model, prompt: Any, images: Any) -> Any:
    """The logits after a prompt, as `generate` leaves them."""
    with model.session() as session:
        model.generate(prompt, images=images, session=session, max_tokens=1)
        return session.logits


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
