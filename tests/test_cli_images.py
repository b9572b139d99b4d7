"""Pictures on the command line: similarity, generate, chat, embed."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from bitnet.data import conversations
from bitnet.data.corpus import DataError
from bitnet_cli import main
from bitnet_export import random_adapter
from bitnet_runtime import Model
from image_models import CAT, DOG, IMAGE, VOCAB, N, packed
from test_image_prompts import PARTS
from vision_models import PALIGEMMA, TOWERS, VISION


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and pictures, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("of images") / "with a space"
    folder.mkdir()
    decoder = PALIGEMMA.replace(vocab_size=VOCAB, image_token=IMAGE)
    packed(folder / "decoder", decoder)
    packed(folder / "chat", decoder.replace(max_context=128), template=PARTS)
    packed(folder / "towers", TOWERS.replace(vocab_size=VOCAB, similarity_scale=11.0, similarity_bias=-2.5))
    packed(folder / "clip", TOWERS.replace(vocab_size=VOCAB, similarity_scale=50.0))
    packed(folder / "vision", VISION)
    Image.fromarray(CAT).save(folder / "a cat.png")
    Image.fromarray(DOG).save(folder / "dog.png")
    return folder


def bitnet(*args: object, stdin: str | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error. Without `stdin` there is none."""
    given = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with mock.patch("sys.stdin", given), redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main([str(arg) for arg in args])
    return code, out.getvalue(), err.getvalue()


# ---- similarity ----


def test_similarity_shows_the_texts_of_each_picture_best_first(folder: Path) -> None:
    pictures, texts = [str(folder / "a cat.png"), str(folder / "dog.png")], ["a cat", "a dog", "x"]
    with Model.load(folder / "towers") as model:
        likely = model.similarity(pictures, texts, probabilities=True)
    options = [option for text in texts for option in ("-p", text)]
    code, out, err = bitnet("similarity", folder / "towers", *pictures, *options)
    expected = []
    for picture, row in zip(pictures, likely, strict=True):
        expected += [picture, *(f"  {100 * row[at]:6.2f} %  {texts[at]}" for at in np.argsort(-row, kind="stable"))]
    assert (code, out.splitlines()) == (0, expected)
    assert "the model judges pairs (sigmoid)" in err
    flagged = bitnet("similarity", *pictures, "-m", folder / "towers", *options, "--quiet")
    assert flagged == (0, out, "")
    for place in (0, 1, 2):  # of the options, among the names
        names = [folder / "towers", *pictures]
        mixed = bitnet("similarity", *names[:place], *options, "--quiet", "--threads", "1", *names[place:])
        assert mixed == (0, out, "")


def test_similarity_with_an_adapter(folder: Path, tmp_path: Path) -> None:
    random_adapter(folder / "clip", tmp_path / "a.bitnet")
    picture, texts = str(folder / "a cat.png"), ["a cat", "a dog"]
    options = ["-p", texts[0], "-p", texts[1], "--json", "--quiet"]
    code, out, _ = bitnet("similarity", folder / "clip", picture, *options, "--adapter", tmp_path / "a.bitnet")
    with Model.load(folder / "clip", adapters=[tmp_path / "a.bitnet"]) as model:
        changed, plain = (model.similarity(picture, texts, adapter=name) for name in ("a", None))
    assert code == 0 and (changed != plain).all()
    np.testing.assert_allclose(json.loads(out)["scores"], changed, rtol=1e-6)


def test_similarity_as_json_and_texts_of_a_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("a cat\nein Hündchen\n")
    code, out, err = bitnet(
        "similarity", folder / "clip", folder / "dog.png", "-f", tmp_path / "texts", "--json", "--quiet"
    )
    found = json.loads(out)
    assert (code, err, found["kind"], found["texts"]) == (0, "", "softmax", ["a cat", "ein Hündchen"])
    with Model.load(folder / "clip") as model:
        scores = model.similarity(folder / "dog.png", found["texts"])
    assert np.array_equal(np.float32(found["scores"]), scores)
    assert abs(sum(found["probabilities"][0]) - 1) < 1e-6


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["towers", "none.png", "-p", "a"], 1, "none.png: No such file"),
        (["towers", ".", "-p", "a"], 1, "it is a folder, expected a picture"),
        (["towers", "towers", "-p", "a"], 1, "expected a picture: PNG"),
        (["towers", "-p", "a"], 2, "towers alone is given, expected a packed file and a picture"),
        (["towers", "dog.png"], 2, "-p/--text -f/--file is required"),
        (["towers", "dog.png", "-p", ""], 1, "text 1 is empty"),
        (["decoder", "dog.png", "-p", "a"], 1, "see Model.generate (`bitnet generate --image`)"),
        (["vision", "dog.png", "-p", "a"], 1, "it has no vectors for texts"),
    ],
)
def test_similarity_says_what_is_wrong(args: list[str], code: int, message: str, folder: Path) -> None:
    paths = [arg if arg in ("-p", "a", "") else folder / arg for arg in args]
    found, out, err = bitnet("similarity", *paths)
    assert (found, out) == (code, "") and message in err
    assert err.splitlines()[-1].startswith("bitnet: error: ") or code == 2


# ---- generate, embed ----


@pytest.mark.parametrize("piped", [False, True])
def test_generate_looks_at_pictures(piped: bool, folder: Path) -> None:
    pictures: list[Any] = [folder / "a cat.png", folder / "dog.png"]
    options = ["-i", pictures[0], "--image", pictures[1], "-n", "4", "--temp", "0", "--json", "--quiet"]
    prompt: list[Any] = [] if piped else ["-p", "what?"]
    code, out, err = bitnet("generate", folder / "decoder", *prompt, *options, stdin="what?\n" if piped else None)
    with Model.load(folder / "decoder") as model:
        expected = model.generate("what?", images=pictures, max_tokens=4, temperature=0)
    found = json.loads(out)
    assert (code, err, found["tokens"]) == (0, "", expected.tokens)
    assert found["usage"]["prompt_tokens"] == 2 * N + len("what?\n")


@pytest.mark.parametrize(
    ("model", "picture", "message"),
    [
        ("decoder", "none.png", "none.png: No such file"),
        ("decoder", "https://example.org/cat.png", "a URL, expected a file"),
        ("towers", "dog.png", "see Model.embed (`bitnet embed`) and Model.similarity (`bitnet similarity`)"),
        ("vision", "dog.png", "takes no text"),
    ],
)
def test_generate_says_what_is_wrong(model: str, picture: str, message: str, folder: Path) -> None:
    name = picture if "://" in picture else folder / picture
    code, out, err = bitnet("generate", folder / model, "-p", "a", "-i", name)
    assert (code, out) == (1, "") and message in err.splitlines()[-1]


def test_embed_gives_vectors_of_pictures_before_those_of_texts(folder: Path) -> None:
    pictures = [str(folder / "a cat.png"), str(folder / "dog.png")]
    given = ["-i", pictures[0], "-i", pictures[1], "-p", "a"]
    code, out, _ = bitnet("embed", folder / "towers", *given)
    with Model.load(folder / "towers") as model:
        vectors = np.concatenate([model.embed_images(pictures), model.embed("a")])
    assert code == 0 and np.array_equal(np.float32([json.loads(line) for line in out.splitlines()]), vectors)
    found = json.loads(bitnet("embed", folder / "towers", *given, "--similarity", "--json")[1])
    assert (found["images"], found["texts"]) == (pictures, ["a"])
    np.testing.assert_allclose(found["similarity"], vectors @ vectors.T, atol=1e-6)  # fp32 sums of 36 terms
    code, _, err = bitnet("embed", folder / "decoder", "-i", pictures[1])
    assert code == 1 and "ask about them: Model.generate (`bitnet generate --image`)" in err
    code, out, _ = bitnet("embed", folder / "vision", "-i", pictures[1], stdin="not read")
    assert code == 0 and len(json.loads(out)) == VISION.dim


# ---- chat ----


def shown(out: str, err: str) -> list[int]:
    return [int(line.split()[1]) for line in err.splitlines() if line.startswith("Prompt: ")]


def test_chat_looks_at_pictures(folder: Path, tmp_path: Path) -> None:
    lines = ["one", f"/image {folder / 'dog.png'}", "two", "/retry", f"/save {tmp_path / 'c.jsonl'}", "/clear", "three"]
    options = ["-i", folder / "a cat.png", "-n", "2", "--temp", "0"]
    code, out, err = bitnet("chat", folder / "chat", *options, stdin="\n".join(lines))
    (saved,) = map(json.loads, (tmp_path / "c.jsonl").read_text().splitlines())
    messages = saved["messages"]
    assert [part["type"] for part in messages[0]["content"]] == ["image", "text"]
    assert messages[2]["content"][0] == {"type": "image", "image": str(folder / "dog.png")}
    with pytest.raises(DataError):
        list(conversations.read([tmp_path / "c.jsonl"]))
    with Model.load(folder / "chat") as model:
        sizes = [len(model.apply_template(messages[:n])) for n in (1, 3, 3)]
        sizes.append(len(model.apply_template([{"role": "user", "content": "three"}])))
        answer = model.chat(messages[:1], max_tokens=2, temperature=0)
    assert (code, shown(out, err)) == (0, sizes)
    assert messages[1]["content"] == answer.text


def test_a_saved_conversation_names_pictures_for_any_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    bitnet("chat", folder / "chat", "-i", "dog.png", "-n", "1", stdin=f"one\n/save {tmp_path / 'c.jsonl'}")
    message = json.loads((tmp_path / "c.jsonl").read_text())["messages"][0]
    assert message["content"][0]["image"] == str(folder / "dog.png")


def test_chat_without_a_template_knows_the_pictures_of_one_message(folder: Path) -> None:
    code, out, err = bitnet("chat", folder / "decoder", "-n", "1", stdin=f"ab\n/image {folder / 'dog.png'}\nab\nab\n")
    assert (code, shown(out, err)) == (0, [2, N + 3, 2])


def test_chat_keeps_pictures_that_cannot_go_and_says_why(folder: Path) -> None:
    code, out, err = bitnet("chat", folder / "chat", "-i", folder / "none.png", stdin="a\n")
    assert (code, out) == (1, "") and "none.png: No such file" in err
    typed = f"/image {folder / 'dog.png'}\n{'a' * 200}\nab\n"
    code, out, err = bitnet("chat", folder / "chat", "-n", "1", stdin=typed)
    assert code == 1 and "the message has" in err
    assert len(shown(out, err)) == 1 and shown(out, err)[0] > N
    typed = f"/image none.png\n/image {folder / 'dog.png'}\nnot sent\n/image\n/clear\nab\n"
    code, out, err = bitnet("chat", folder / "decoder", "-n", "1", stdin=typed)
    assert "error: none.png: No such file" in err and "error: /image FILE: name a picture" in err
    assert (code, shown(out, err)) == (1, [2]) and "the message lacks its picture; it was not sent" in err
    code, _, err = bitnet("chat", folder / "towers", "-i", folder / "dog.png", stdin="a\n")
    assert code == 1 and "has no head" in err
