"""Tokenizers, token files, batches."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

import bitnet_cli
from bitnet.data import corpus, dataset, preferences, tokenizer
from bitnet_runtime.tokenizer.text import Tokenizer as Engine

TEXTS = ["def main(argv):\n    return 0  # nothing\n" * 20, "Grüße, 世界 🌍\r\n\tpassé 1234567\n" * 20]
MADE = {kind: tokenizer.build(kind, TEXTS, 300) for kind in tokenizer.KINDS}


def encode(t: Tokenizer, text: str) -> list[int]:
    return list(t.encode(text, add_special_tokens=False).ids)


# ---- tokenizers ----


@pytest.mark.parametrize("kind", tokenizer.KINDS)
@settings(max_examples=150)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives(kind: str, text: str) -> None:
    ids = encode(MADE[kind], text)
    assert MADE[kind].decode(ids, skip_special_tokens=False) == text
    assert tokenizer.END_ID not in ids


@pytest.mark.parametrize("kind", tokenizer.KINDS)
def test_end_token(kind: str, tmp_path: Path) -> None:
    made = MADE[kind]
    assert made.token_to_id(tokenizer.END) == tokenizer.END_ID == 0
    assert sorted(made.get_vocab().values()) == list(range(made.get_vocab_size()))
    text = f"a{tokenizer.END}b"
    file = tmp_path / "tokenizer.json"
    file.write_text(made.to_str(), encoding="utf-8")
    for t in (made, tokenizer.load(file)):
        assert 0 not in encode(t, text) and t.decode(encode(t, text)) == text  # typed by a user, it is plain text
        assert t.decode([0, *encode(t, "x")], skip_special_tokens=True) == "x"


def test_special_tokens_within_reach_of_a_model_are_text_when_spelled(tmp_path: Path) -> None:
    """A Unigram model makes </s> of a text with this tag of HTML, where the engine sees characters."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((chr(code), -8.0) for code in range(33, 127))]
    words = Tokenizer(models.Unigram(pieces, 0, False))
    words.add_special_tokens(["<unk>", "<s>", "</s>"])
    file = tmp_path / "tokenizer.json"
    words.save(str(file))
    words, text = tokenizer.load(file), "a<s>b</s>c"
    expected = Engine(file.read_bytes(), 99).encode(text)
    assert len(expected) == len(text) and encode(words, text) != expected
    assert dataset.tokenize([text, "c"], words, tmp_path, "train", 1).ids.tolist() == [1, *expected, 1, expected[-1]]
    (chosen, _) = preferences.Spelling(words, 1, 2, None).pair(preferences.Preference("a<s>", "b</s>c", "c"))
    assert chosen.ids.tolist() == [1, *expected, 2]
    (unknown,) = tokenizer.encoder(words)(["é</s>"])
    assert unknown[0] == 0 and unknown[1:] == expected[5:9]


def test_a_file_that_cuts_texts_and_fills_them_up(tmp_path: Path) -> None:
    """As those of published models do: documents are nevertheless encoded whole."""
    words, file = tokenizer.build("byte", [], 257), tmp_path / "tokenizer.json"
    words.enable_truncation(3)
    words.enable_padding(pad_id=7, length=20)
    words.save(str(file))
    assert [len(each.ids) for each in tokenizer.load(file).encode_batch(["a", "abcdef"])] == [1, 6]


def test_ids_with_gaps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    definition = json.loads(MADE["byte"].to_str())
    definition["model"]["vocab"]["e"] = 70_000
    file, text = tmp_path / "tokenizer.json", tmp_path / "a.txt"
    file.write_text(json.dumps(definition))
    words = tokenizer.load(file)
    assert tokenizer.vocabulary_size(words) == 70_001
    tokens = dataset.tokenize(["here"], words, tmp_path, "train")
    assert tokens.ids.tolist()[2::2] == [70_000, 70_000], "no id is cut to 16 bits"
    text.write_text("here and there " * 999)
    words_of_run = ["train", "--tokenizer", str(file), "--data", str(text), "--out", str(tmp_path / "run")]
    assert bitnet_cli.main([*words_of_run, "--set", "vocab_size=300"]) == 1
    assert "needs 70,001 tokens, the model has 300; add --set vocab_size=70001" in capsys.readouterr().err


def test_token_ids_are_those_of_their_run_alone(tmp_path: Path) -> None:
    """With its token before documents, and in its folder, whatever path a record names."""
    made = [dataset.tokenize(["a"], MADE["byte"], tmp_path, "train", first) for first in (0, 5, 0)]
    assert [each.first for each in made] == [0, 5, 0]
    said = {"texts": {"train": made[1].to_dict()}}
    assert dataset.recorded(said, "train", tmp_path) is not None
    other = tmp_path / "other"
    other.mkdir()
    for name in (f"../{said['texts']['train']['file']}", str(tmp_path / said["texts"]["train"]["file"])):
        assert dataset.recorded({"texts": {"train": said["texts"]["train"] | {"file": name}}}, "train", other) is None


def test_a_large_file_is_checked_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first byte to its last, and its size."""
    monkeypatch.setattr(dataset, "CHECKED", 400)
    monkeypatch.setattr(dataset, "PIECE", 100)
    file, data = tmp_path / "ids.bin", np.arange(250, dtype=np.uint32).tobytes()

    def checksum(content: bytes) -> str:
        file.write_bytes(content)
        return dataset.checksum_of(file)

    whole = checksum(data)
    places = (0, 99, 100, 299, 300, 399, 400, 899, 900, 999)
    seen = [at for at in places if checksum(data[:at] + b"\xff" + data[at + 1 :]) != whole]
    assert seen == [0, 99, 300, 399, 900, 999]
    assert checksum(bytes(1000)) != checksum(bytes(1400))
    assert len({start % 4 for size in range(1000, 1040) for start, _ in dataset._checked(size)}) == 1
    file.write_bytes(data)
    assert dataset.Tokens.map(file, "uint32", 1, "").largest == 249
    odd = np.zeros(501, np.uint16)  # two bytes more than the pieces, which begin at multiples of four
    odd[-1] = 9
    file.write_bytes(odd.tobytes())
    assert dataset.Tokens.map(file, "uint16", 1, "").largest == 9


def test_a_disk_that_is_full_says_where(tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(OSError, match="No space") as caught:
        patch.setattr(os, "fsync", full)
        dataset.tokenize(["here"], MADE["byte"], tmp_path, "train")
    assert Path(caught.value.filename).parent == tmp_path and not list(tmp_path.iterdir())


def test_sizes() -> None:
    assert {kind: t.get_vocab_size() for kind, t in MADE.items()} == {
        "bpe": 300, "llama-bpe": 300, "byte": 257, "char": min(300, 257 + len(set("".join(TEXTS)))),
    }  # fmt: skip
    lengths = {kind: len(encode(t, TEXTS[0])) for kind, t in MADE.items()}
    assert lengths["bpe"] < lengths["char"] == lengths["byte"] == len(TEXTS[0])
    assert len(encode(MADE["char"], "é")) == 1 and len(encode(MADE["byte"], "é")) == 2


def test_char_keeps_the_commonest() -> None:
    t = tokenizer.build("char", ["aaab" * 5 + "c"], 259)
    assert t.get_vocab_size() == 259 and t.id_to_token(257) == "a" and t.id_to_token(258) == "b"
    assert encode(t, "abc") == [257, 258, 1 + ord("c")]


@pytest.mark.parametrize("kind", ["bpe", "llama-bpe"])
def test_merges_are_learnt_from_pieces_of_bounded_length(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their cost grows with the square. What is encoded is not cut, and shorter pieces give the same merges."""
    texts = ["ha" * 40 + "h é" + "a" * 19]
    whole = tokenizer.build(kind, texts, 300)
    assert max(map(len, whole.get_vocab())) > len(tokenizer.END) + 20
    monkeypatch.setattr(tokenizer, "LONGEST", 83)
    assert tokenizer.build(kind, texts, 300).to_str() == whole.to_str()
    monkeypatch.setattr(tokenizer, "LONGEST", 16)
    cut = tokenizer.build(kind, texts, 300)
    assert max(len(word) for word in cut.get_vocab() if word != tokenizer.END) == 16
    assert cut.pre_tokenizer.pre_tokenize_str(texts[0]) == whole.pre_tokenizer.pre_tokenize_str(texts[0])
    assert cut.decode(cut.encode(texts[0]).ids) == texts[0]


def test_tokenizers_refuse(tmp_path: Path) -> None:
    for kind, found in (("word", "is not a file"), (str(tmp_path), "is a folder")):
        with pytest.raises(ValueError, match=f"{found}, expected bpe, llama-bpe, byte, char or a tokenizer"):
            tokenizer.build(kind, TEXTS, 300)
    with pytest.raises(ValueError, match="vocab_size is 256, expected at least 257"):
        tokenizer.build("bpe", TEXTS, 256)
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(ValueError, match=r"t\.json is not a tokenizer\.json"):
        tokenizer.load(tmp_path / "t.json")


def test_start_and_end_tokens_beside_a_tokenizer(tmp_path: Path) -> None:
    words = tokenizer.build("byte", [], 257).to_str().replace(tokenizer.END, "<s>")
    (tmp_path / "tokenizer.json").write_text(words)
    file, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    loaded = tokenizer.load(file)
    assert tokenizer.ends_beside(file) == {}
    with pytest.raises(ValueError, match=r"put a tokenizer_config\.json with \"bos_token\" or \"eos_token\" beside"):
        tokenizer.separator(loaded, {})
    for said, expected in (
        ({"bos_token": "<s>"}, {"bos_token_id": 0, "eos_token_ids": [0]}),
        ({"eos_token": {"content": "Ġ"}}, {"eos_token_ids": [221]}),
        ({"bos_token": "<s>", "eos_token": "Ġ"}, {"bos_token_id": 0, "eos_token_ids": [221, 0]}),
        ({"bos_token": None}, {}),
        ([], {}),
    ):
        config.write_text(json.dumps(said))
        assert tokenizer.ends_beside(file) == expected
    assert tokenizer.separator(loaded, {"eos_token_ids": [221]}) == 221
    for text, message in (
        ('{"bos_token": "<S>"}', "bos_token is '<S>', which is no token of tokenizer.json"),
        ('{"eos_token": 3}', "eos_token is 3, which is no token"),
        ("{", "tokenizer_config.json is damaged"),
    ):
        config.write_text(text)
        with pytest.raises(ValueError, match=message):
            tokenizer.ends_beside(file)


# ---- token files and batches ----


def test_tokenize_writes_once_and_maps(tmp_path: Path) -> None:
    tokens = dataset.tokenize(TEXTS, MADE["bpe"], tmp_path, "train")
    assert tokens.ids.dtype == np.uint16 and tokens.n_bytes == sum(len(t.encode()) for t in TEXTS)
    assert tokens.ids.tolist() == [0, *encode(MADE["bpe"], TEXTS[0]), 0, *encode(MADE["bpe"], TEXTS[1])]
    (file,) = tmp_path.iterdir()
    before = file.stat().st_mtime_ns
    assert dataset.tokenize(TEXTS, MADE["bpe"], tmp_path, "train").digest == tokens.digest
    assert file.stat().st_mtime_ns == before
    assert dataset.tokenize(TEXTS, MADE["byte"], tmp_path, "train").digest != tokens.digest
    sent = pickle.dumps(tokens)
    assert len(sent) < 500 and pickle.loads(sent).ids.tolist() == tokens.ids.tolist()


def test_sides_have_the_digest_of_their_texts(tmp_path: Path) -> None:
    """Runs that were started when texts were kept in lists can be resumed."""
    for validation in (0.5, 1e-6):
        for side in corpus.split([f"{i} {text}" for i in range(9) for text in TEXTS], validation):
            digest = dataset.tokenize(side, MADE["bpe"], tmp_path, "a").digest
            assert digest == dataset.tokenize(list(side), MADE["bpe"], tmp_path, "b").digest


def counting(n: int) -> dataset.Tokens:
    return dataset.Tokens(np.arange(n, dtype=np.uint32), n, "")


def test_batches_visit_every_window_once_an_epoch() -> None:
    batches = dataset.Batches(counting(1000), batch=4, context=10, seed=1)
    assert batches.per_epoch == 98
    starts = []
    for i in range(49):
        inputs, targets = batches.sequences(4 * i, 4 * i + 4)
        assert inputs.shape == targets.shape == (4, 10) and inputs.dtype == torch.int64
        assert (targets == inputs + 1).all()
        starts += inputs[:, 0].tolist()
    for epoch in (starts[:98], starts[98:]):
        assert len(set(epoch)) == 98 and len({s % 10 for s in epoch}) == 1


@given(cuts=st.lists(st.integers(0, 300), max_size=8))
def test_sequences_do_not_depend_on_how_they_are_cut(cuts: list[int]) -> None:
    batches, edges = dataset.Batches(counting(1000), 4, 10, seed=1), sorted({0, 300, *cuts})
    pieces = [batches.sequences(first, last) for first, last in itertools.pairwise(edges)]
    for part, whole in zip(zip(*pieces, strict=True), batches.sequences(0, 300), strict=True):
        assert torch.cat(part).equal(whole)


def test_a_batch_is_a_function_of_seed_and_index() -> None:
    one, two = (dataset.Batches(counting(1000), 4, 10, seed=1) for _ in range(2))
    in_order = [one.sequences(n, n + 4)[0] for n in range(0, 240, 4)]
    assert two.sequences(200, 204)[0].equal(in_order[50]) and two.sequences(28, 32)[0].equal(in_order[7])
    other = dataset.Batches(counting(1000), 4, 10, seed=2)
    assert not other.sequences(0, 20)[0].equal(torch.cat(in_order[:5]))


def test_too_little_text_for_a_batch() -> None:
    assert dataset.Batches(counting(51), 4, 10, 0).per_epoch == 4
    with pytest.raises(corpus.DataError, match="has 50 tokens, one batch of 4 × 10 needs 51"):
        dataset.Batches(counting(50), 4, 10, 0)


def test_a_long_reading_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = itertools.count(step=6.0)  # seconds between two looks at the clock
    monkeypatch.setattr(corpus.time, "monotonic", lambda: next(now))
    said: list[str] = []
    train, held_out = corpus.split([f"{i}" * 100_000 for i in range(10)], 0.3, said.append)
    assert said == ["read 0.2 MB of text", "read 0.6 MB of text"]  # after 10 seconds, and 20 more
    said.clear()
    assert len([*train, *held_out]) == 10
    assert said[0] == f"read 0.2 of {train.n_bytes / 1e6:.1f} MB of text"
