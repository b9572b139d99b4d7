"""Near duplicates, compared with the true share of common pieces."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

import bitnet_cli
from bitnet.data import alike, corpus
from bitnet.data.alike import Index

pytest.importorskip("datasketch")


def words(seed: int, n: int) -> list[str]:
    return random.Random(seed).choices([f"word{i}" for i in range(5000)], k=n)


@pytest.mark.parametrize("pieces", [alike.runs_of_words, alike.lines])
def test_texts_that_are_alike_are_found(pieces: alike.Pieces) -> None:
    """Pairs that share 0 to 100 % of their pieces. 64 hashes: a standard deviation of 0.0625; three are allowed."""
    between = " " if pieces is alike.runs_of_words else "\n   "
    base = words(0, 900)
    for changed in range(0, 900, 30):
        text, other = between.join(base), between.join(base[changed:] + words(1 + changed, changed))
        a, b = (set(pieces(each)) for each in (text, other))
        share = len(a & b) / len(a | b)
        index = Index(0.75, pieces)
        assert abs(index.signature(text).jaccard(index.signature(other)) - share) < 0.19
        assert index.add(text)
        if not 0.56 < share < 0.94:
            assert index.add(other) == (share < 0.75)
        assert not index.add(text)


def test_bands_find_the_share_that_is_asked_for() -> None:
    """999 of 1,000 pairs, where 16 bands of four can; and no more pairs with less in common than needed."""
    assert [alike.rows(share) for share in (0.5, 0.6, 0.8, 0.9, 0.95, 1.0)] == [4, 4, 4, 6, 9, 16]
    shared = [f"license {i} " * 5 for i in range(300)]
    texts = ["\n".join(shared + words(seed, 100)) for seed in range(400)]  # of any two 60 % is the same
    index = Index(0.95, alike.lines)
    assert all(map(index.add, texts))
    asked = [len(index._near.query(index.signature(text))) for text in texts]
    assert sum(asked) < 0.2 * 400**2
    assert not any(map(index.add, (text + "\nand a line" for text in texts)))


def test_texts_of_few_words() -> None:
    index = Index(0.8)
    assert [index.add(text) for text in ("", "a b", " a\nb ", "a c", "\n", "a b c d e f")] == [
        True, True, False, True, False, True,
    ]  # fmt: skip


def test_pieces_are_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Index(0.8).signature(text := " ".join(words(0, 1000)))
    monkeypatch.setattr(alike, "AT_ONCE", 7)
    assert (Index(0.8).signature(text).hashvalues == whole.hashvalues).all()


def test_tokenize_leaves_them_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first is kept, and what is left out is on neither side."""
    texts = [" ".join(words(i, 400)) for i in range(60)]
    copies = [f"{text} and some words of its own" for text in texts[:20]]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts + copies + texts[:5]))
    argv = ["tokenize", str(tmp_path / "ids"), "--data", str(tmp_path / "a.jsonl"), "--tokenizer", "byte", "--json"]
    for share in ("0.3", "2"):
        assert bitnet_cli.main([*argv, "--near-duplicates", share]) == 1
        assert "expected 0.5 to 1" in capsys.readouterr().err
    assert bitnet_cli.main([*argv, "--near-duplicates", "0.8", "--workers", "1"]) == 0
    output = capsys.readouterr()
    assert "20 of 85 documents are near duplicates and were left out" in output.err
    assert "5 of 85 documents are repetitions" in output.err
    made = json.loads(output.out)
    assert made["train"]["bytes"] + made["validation"]["bytes"] == sum(len(text) for text in texts)
    again = corpus.split(texts, 0.05)
    assert [made[side]["bytes"] for side in ("train", "validation")] == [side.n_bytes for side in again]
