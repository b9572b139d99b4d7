"""Conversations with pictures: what is learnt is what the engine is asked, and each picture is encoded once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet.data import conversations as conversations_of_texts
from bitnet.data import picture_talks, pictures, preferences, tokenizer
from bitnet.data.corpus import DataError
from bitnet.data.dataset import IGNORED
from bitnet.data.pictures import Sight
from bitnet.setup import sights
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import Model
from picture_data import DECODER, TINY, VISION, halves, lines
from training import bitnet, bits, killed_before, losses
from vision_models import CAUSAL, PALIGEMMA, seeded

torch.set_num_threads(1)


WORDS = tokenizer.build("byte", [], 258, tokenizer.IMAGE)
WORDS.encode_special_tokens = True

STACK = [*VISION[:-2], "--set", "vision.dim=24"]  # without a pooling
LEARN = ("--steps", "4", "--save-every", "2", "--eval-every", "4", "--validation", "0.2", "--precision", "fp32")


def talk(name: str, left: str, right: str, openai: bool) -> dict[str, Any]:
    picture = {"type": "image_url", "image_url": {"url": name}} if openai else {"type": "image", "image": name}
    first = {"role": "user", "content": [picture, {"type": "text", "text": "left?"}]}
    more = [("assistant", left), ("user", "right?"), ("assistant", right)]
    return {"messages": [first, *({"role": role, "content": text} for role, text in more)]}


def conversations(folder: Path, n: int = 30) -> Path:
    talks = [talk(name, a, b, i % 2 == 0) for i, (name, a, b) in enumerate(halves(folder, n))]
    return lines(folder, "talks.jsonl", talks)


def talks_of(folder: Path, file: Path, prefix: bool) -> tuple[picture_talks.Talks, str, dict[str, Any]]:
    """Conversations with a byte tokenizer; images of 14 pixels are 9 vectors."""
    template, generation = sights.with_template(WORDS, None, tokenizer.defaults(WORDS, {}))
    side = pictures.every(picture_talks.read([file]))
    sight = Sight(14, 3, 9, (0.5, 0.4, 0.3), (0.5, 0.25, 0.3))
    kept = pictures.decode(side, sight, folder, "text")
    image = tokenizer.image_token(WORDS)
    return picture_talks.Talks(side, kept, sight, WORDS, template, generation, image, prefix), template, generation


@pytest.mark.parametrize("prefix", [False, True])
def test_rows_of_a_conversation(prefix: bool, tmp_path: Path) -> None:
    """A causal model learns both answers in one row; of a prefix each has its own, and the picture is there once."""
    talks, _, _ = talks_of(tmp_path, conversations(tmp_path / "data", 3), prefix)
    n = 2 if prefix else 1
    assert talks.count(400) == talks.total == 3 * n
    assert talks.fitting(400) is talks.fitting(400)  # every batch asks
    assert len(talks.fitting(9)) == 0
    inputs, targets, documents, lengths, pixels, which = talks.rows(range(n), 400)
    assert pixels.shape == (1, 3, 14, 14) and which.tolist() == [0] * n
    assert ((inputs == talks.image).sum(1) == 9).all()
    said = [WORDS.decode(row[row != IGNORED].tolist()) for row in targets]
    known = [line["messages"] for line in map(json.loads, (tmp_path / "data" / "talks.jsonl").read_text().splitlines())]
    answers = [message["content"] for message in known[0] if message["role"] == "assistant"]
    assert said == (answers if prefix else ["".join(answers)])
    for row in range(n):
        assert (targets[row, : int(lengths[row]) - 1] == IGNORED).all() and targets[row, int(lengths[row]) - 1] >= 0
    assert not documents[:, : int(lengths[0])].any() and documents[0].any() == prefix  # the first is shorter


def test_answers_in_parts_are_those_in_texts(tmp_path: Path) -> None:
    file = conversations(tmp_path / "data", 3)
    plain = talks_of(tmp_path, file, False)[0].rows(range(3), 400)
    talks = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    for message in (message for talk in talks for message in talk if isinstance(message["content"], str)):
        message["content"] = [{"type": "text", "text": message["content"]}]
    file = lines(tmp_path / "data", "parts.jsonl", [{"messages": talk} for talk in talks])
    for one, other in zip(plain, talks_of(tmp_path, file, False)[0].rows(range(3), 400), strict=True):
        assert torch.equal(one, other)


def test_a_picture_is_looked_at_once(tmp_path: Path) -> None:
    """For several questions, with the same loss as for each separately; augmented equally within a conversation."""
    talks, _, _ = talks_of(tmp_path, conversations(tmp_path / "data", 3), True)
    batches = picture_talks.Batches(talks, 4, 400, 0, "none")
    inputs, _, documents, prefix, pixels, which = batches.sequences(0, 4)
    assert len(pixels) == 2 and which.tolist() == [0, 0, 1, 1]  # rows of a conversation follow each other
    model = seeded(PALIGEMMA.replace(vocab_size=262, max_context=400, image_token=talks.image)).double()
    with torch.no_grad():
        together = model(inputs, documents, prefix, pixels.double(), which)
        apart = model(inputs, documents, prefix, pixels.double()[which])
    assert torch.allclose(together, apart, atol=1e-9)
    visits = [batches.sequences(i, i + 1) for i in range(12)]  # two epochs
    for epoch in (visits[:6], visits[6:]):
        assert len({row[0].numpy().tobytes() + row[4].numpy().tobytes() for row in epoch}) == 6
    first, again = (picture_talks.Batches(talks, 4, 400, 0, "crop") for _ in range(2))
    for a, b in zip(first.sequences(4, 8), again.sequences(4, 8), strict=True):
        assert a.equal(b)
    changed = first.sequences(0, 4)
    assert len(changed[4]) == 2 and not changed[4].equal(pixels)


@pytest.mark.parametrize("config", [CAUSAL, PALIGEMMA], ids=["causal", "prefix"])
def test_the_engine_is_asked_what_was_learnt(config: Any, tmp_path: Path) -> None:
    """A run of either mask; then the prompt of `Model.chat` is, token for token, what stood before an answer."""
    data, out = conversations(tmp_path / "data"), tmp_path / "run"
    mask = ["--set", f"mask={config.mask}", "--set", "max_context=120", "--tokenizer", "byte"]
    command = [*TINY, *mask, *STACK, "--chat", data, *LEARN]
    assert bitnet("train", *command, "--out", out) == 0
    killed_before(3, "train", *command, "--out", tmp_path / "killed")
    assert bitnet("train", "--resume", "--out", tmp_path / "killed") == 0
    assert bits(tmp_path / "killed" / "step-000004") == bits(out / "step-000004")
    final = next(record["validation"] for record in losses(out) if record.get("final"))
    assert final["answers"] >= 2 and bitnet("eval", out, "--data", data) == 0
    run = Checkpoint.open(out)
    pack_checkpoint(run, tmp_path / "m.bitnet")
    assert run.template and run.config.vision
    side = pictures.every(picture_talks.read([data]))
    kept = pictures.decode(side, Sight.of(run.config.vision, run.generation), tmp_path, "text")
    learnt = sights.talks(run.config, run.words, run.template, run.generation, side, kept, 120)
    inputs, _, _, lengths, _, _ = learnt.rows([0], 120)
    messages = json.loads(data.read_text().splitlines()[0])["messages"]
    messages[0]["content"][0]["image_url"]["url"] = str(data.parent / messages[0]["content"][0]["image_url"]["url"])
    with Model.load(tmp_path / "m.bitnet", threads=1) as model:
        assert model.apply_template(messages[:1]) == inputs[0, : int(lengths[0])].tolist()
        assert model.chat(messages[:1], max_tokens=3, temperature=0).usage.prompt_tokens == int(lengths[0])
        if config.mask == "causal":  # the second question goes on behind the first answer
            more = model.apply_template(messages[:3])
            assert more == inputs[0, : len(more)].tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"type": "image", "image": "none.png"}], "line 1: there is no file 'none.png'; a picture is the path of one"),
        ([{"type": "image", "image": "data:image/png;base64," + 999 * "AA"}], "there is no file 'data:image"),
        ([{"type": "image", "image": "a\0b.png"}], "there is no file"),
        ([{"type": "image", "image": 3}], "there is no file 3"),
        ([{"type": "image"}], r"line 1: messages has .* expected"),
        ([{"type": "text", "text": 3}], r"line 1: messages has .* expected"),
        ([{"type": "video", "video": "a"}], "line 1: a part is .*video"),
        (["a"], "line 1: a part is 'a'"),
        ({"type": "text"}, "line 1: a message is"),
    ],
)
def test_conversations_that_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    asked = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}
    file = lines(tmp_path, "talks.jsonl", [asked])
    with pytest.raises(DataError, match=message):
        list(picture_talks.read([file]))


@pytest.mark.parametrize(
    ("beside", "answer", "message"),
    [
        ({"images": ["0.png"]}, "x", r'line 1: a text spells <image>, expected a part {"type": "image"} in its place'),
        ({"images": [{"path": "0.png"}]}, "x", 'line 1: beside "messages" stands .*, expected a list of paths'),
        ({"images": ["0.png"], "image": "0.png"}, "x", 'line 1: beside "messages" stands'),
        ({}, [{"type": "image", "image": "0.png"}], "line 1: an answer has an image, expected text alone"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "x", "line 1: .* with pictures calls no tools"),
    ],
)
def test_pictures_that_stand_elsewhere_are_refused(beside: Any, answer: Any, message: str, tmp_path: Path) -> None:
    list(halves(tmp_path, 1))
    asked = {"messages": [{"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": answer}]}
    file = lines(tmp_path, "talks.jsonl", [asked | beside])
    with pytest.raises(DataError, match=message):
        list(picture_talks.read([file]))


def asked(content: Any, beside: dict[str, Any], role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content}, {"role": "assistant", "content": "x"}], **beside}


def test_pictures_beside_the_messages(tmp_path: Path) -> None:
    """As data sets of TRL have them: in their places, which may have empty fields, or before the first question."""
    list(halves(tmp_path, 2))
    text = {"type": "text", "text": "which?"}
    own = [{"type": "image", "image": "0.png"}, text, {"type": "image", "image": "1.png"}]
    place = {"type": "image", "image": None, "text": None}
    both = {"images": ["0.png", "1.png"]}
    file = lines(tmp_path, "talks.jsonl", [asked(own, {}), asked([{"type": "image"}, text, place], both)])
    named, filled = picture_talks.read([file])
    assert (named.images, named.prefix) == (filled.images, filled.prefix)
    file = lines(
        tmp_path,
        "before.jsonl",
        [asked([own[0], text], {}), asked("which?", {"images": ["0.png"]}), asked([text], {"image": "0.png"})],
    )
    first, *others = picture_talks.read([file])
    assert all((each.images, each.prefix) == (first.images, first.prefix) for each in others)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (asked([{"type": "image"}], {"images": ["0.png", "1.png"]}), "there are 2 pictures .* and 1 places for them"),
        (asked("what?", {"images": ["0.png"]}, "system"), "no message of user asks about them"),
    ],
)
def test_pictures_beside_without_a_place_are_refused(record: Any, message: str, tmp_path: Path) -> None:
    list(halves(tmp_path, 2))
    with pytest.raises(DataError, match=f"talks.jsonl, line 1: .*{message}"):
        list(picture_talks.read([lines(tmp_path, "talks.jsonl", [record])]))


@pytest.mark.parametrize(
    "record", [asked([{"type": "image", "image": "0.png"}], {}), asked("what?", {"images": ["0.png"]})]
)
def test_a_model_of_texts_is_not_given_pictures(record: Any, tmp_path: Path) -> None:
    file = lines(tmp_path, "talks.jsonl", [record])
    with pytest.raises(DataError, match=r"line 1: the conversation has a picture, and the model sees none.* --vision"):
        list(conversations_of_texts.read([file]))
    with pytest.raises(DataError, match="line 1: the preference has a picture"):
        answers = {"prompt": "p", "chosen": record["messages"], "rejected": record["messages"]}
        list(preferences.read([lines(tmp_path, "p.jsonl", [record | answers])]))


def test_a_row_that_does_not_fit_and_a_picture_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = conversations(tmp_path / "data", 10)
    command = [*DECODER, *STACK, "--chat", data, *LEARN, "--out", tmp_path / "run"]
    assert bitnet("train", *command, "--context", "8") == 1
    assert "no conversation fits --context 8: the shortest has" in capsys.readouterr().err
    (tmp_path / "data" / "3.png").write_bytes(b"no picture")
    assert bitnet("train", *command) == 1
    assert "talks.jsonl, line 4: " in capsys.readouterr().err
