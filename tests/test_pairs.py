"""Pairs of texts: finding them, rows, refusals; and the contrastive loss."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitnet.config import ModelConfig
from bitnet.data import corpus, pairs
from bitnet.data.corpus import DataError
from bitnet.data.dataset import Tokens
from bitnet.data.frames import Frame
from bitnet.evaluate import contrast
from bitnet.model.transformer import Transformer
from bitnet.setup.texts import note, note_cut

torch.set_num_threads(1)


def tokens_of(*documents: int) -> Tokens:
    """Documents of so many tokens, counted through, each behind a 0."""
    ids, n = [], 1
    for length in documents:
        ids += [0, *range(n, n + length)]
        n += length
    return Tokens(np.array(ids, np.uint16), 4 * n, "digest")


def test_adjacent_pieces_of_documents() -> None:
    """Each document is used completely, in an even number of pieces, none longer than a row."""
    text = pairs.Pairs(tokens_of(40, 3, 0, 16), 0, given=False, frame=Frame((0,)))
    assert text.count(12) == 3  # 40 tokens in 2 pairs of pieces of at most 11; 3 are too few; 16 in one pair
    inputs, targets, documents = text.rows(range(3), 12)
    assert targets.tolist() == [0, 1, 2] and inputs.shape == documents.shape == (6, 12)
    pieces = [row[own == 0].tolist() for row, own in zip(inputs, documents, strict=True)]
    assert all(piece[0] == 0 for piece in pieces)
    assert pieces[0][1:] + pieces[3][1:] + pieces[1][1:] + pieces[4][1:] == list(range(1, 41))
    assert pieces[2][1:] + pieces[5][1:] == list(range(44, 60))
    assert {len(piece) for piece in pieces} == {9, 11}
    assert (inputs[documents == -1] == 0).all()


def test_given_pairs_and_long_ones() -> None:
    text = pairs.Pairs(tokens_of(2, 30, 1, 1), 0, given=True, frame=Frame((0,)))
    assert text.count(5) == 2
    inputs, _, documents = text.rows([1, 0], 5)
    assert inputs.tolist() == [[0, 33, 0, 0, 0], [0, 1, 2, 0, 0], [0, 34, 0, 0, 0], [0, 3, 4, 5, 6]]
    assert documents.sum(1).tolist() == [-3, -2, -3, 0]


def test_how_many_pairs_lose_the_end_of_a_text_is_said() -> None:
    """Pieces of other text are as long as fits."""
    framed, said = Frame((0,), (99,)), list[str]()
    text = pairs.Pairs(tokens_of(2, 30, 3, 3, 4, 1), 0, given=True, frame=framed)
    note_cut(text, 5, said.append)
    assert said == ["2 of 3 pairs have a text of more than 5 tokens, which loses its end; see --context"]
    assert [text.too_long(context) for context in (4, 6, 31, 32)] == [3, 1, 1, 0]
    note_cut(text, 32, said.append)
    note_cut(pairs.Pairs(tokens_of(40, 17), 0, given=False, frame=framed), 8, said.append)
    assert len(said) == 1


def test_equal_texts_are_as_good_as_its_own() -> None:
    ids = [0, 1, 0, 9, 0, 2, 0, 9, 0, 1, 0, 8, 0, 3, 0, 7]  # the first has the second's label, and the third's text
    text = pairs.Pairs(Tokens(np.array(ids, np.uint16), 1, "x"), 0, given=True, frame=Frame((0,)))
    assert text.count(4) == 4
    assert text.alike(range(4)).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 1]]


def test_what_stands_around_a_text() -> None:
    text = pairs.Pairs(tokens_of(2, 30), 0, given=True, frame=Frame((0,), (99,)))
    inputs, _, documents = text.rows([0], 6)
    assert inputs.tolist() == [[0, 1, 2, 99, 0, 0], [0, 3, 4, 5, 6, 99]] and documents.sum(1).tolist() == [-2, 0]


def test_a_row_has_room_for_more_than_the_token_before_a_text() -> None:
    for given in (True, False):
        with pytest.raises(DataError, match=r"--context is 1, .* give 2 or more"):
            pairs.Pairs(tokens_of(20, 20), 0, given, Frame((0,))).count(1)


def test_pair_n_is_a_function_of_the_seed_and_n() -> None:
    text = pairs.Pairs(tokens_of(*[20] * 9), 0, given=False, frame=Frame((0,)))
    batches = pairs.Batches(text, 2, 12, 5)
    one_by_one = torch.cat([batches.sequences(n, n + 1)[0][:1] for n in range(18)])
    two = torch.cat([batches.sequences(n, n + 2)[0][:2] for n in range(0, 8, 2)])
    assert two.equal(one_by_one[:8])
    assert len({tuple(row) for row in one_by_one[:9].tolist()}) == 9  # an epoch visits each once
    other = pairs.Batches(text, 2, 12, 6)
    assert not two.equal(torch.cat([other.sequences(n, n + 2)[0][:2] for n in range(0, 8, 2)]))
    with pytest.raises(DataError, match=r"has 9 pairs, one batch needs 10; add data, or lower --batch"):
        pairs.Batches(text, 10, 12, 5)


def test_no_batch_has_a_pair_twice() -> None:
    """Over the end of an epoch either: the second copy would count as a wrong partner of the first."""
    text = pairs.Pairs(tokens_of(*[20] * 9), 0, given=False, frame=Frame((0,)))
    for size in (4, 9):
        batches = pairs.Batches(text, size, 12, 5)
        for n in range(0, 90, size):
            rows = batches.sequences(n, n + size)[0][:size]
            assert len({tuple(row) for row in rows.tolist()}) == size


def written(folder: Path, *records: Any) -> Path:
    file = folder / "pairs.jsonl"
    lines = (record if isinstance(record, bytes) else json.dumps(record).encode() for record in records)
    file.write_bytes(b"\n".join(lines))
    return file


def test_pairs_of_files_stay_together(tmp_path: Path) -> None:
    file = written(tmp_path, *({"question": f"q{i}", "n": i, "answer": f"a{i}"} for i in range(60)))
    assert pairs.files_of([str(file)]) == [file]
    sides = pairs.separate(*corpus.split(pairs.Joined([file]), 0.2))
    train, held_out = (list(side) for side in sides)
    assert len(train) + len(held_out) == 120 and 2 <= len(held_out) < 60
    for texts in (train, held_out):
        assert all(second == "a" + first[1:] for first, second in zip(texts[::2], texts[1::2], strict=True))


def test_what_the_pairs_are_of_is_said(tmp_path: Path) -> None:
    """A record of a name and a text is a pair, too, and perhaps was not meant as one."""
    joined, said = pairs.Joined([written(tmp_path, {"id": "7", "text": "b", "n": 1})]), list[str]()
    assert list(joined) == ['["7", "b"]']
    note(joined, said.append)
    assert said == ['the pairs are "id" and "text"']


def test_pairs_may_be_compressed(tmp_path: Path) -> None:
    file = tmp_path / "Pairs.JSONL.gz"
    file.write_bytes(gzip.compress(written(tmp_path, {"a": "x", "b": "y"}).read_bytes()))
    assert pairs.files_of([str(file)]) == [file] and list(pairs.Joined([file])) == ['["x", "y"]']


def test_other_text_holds_no_pairs(tmp_path: Path) -> None:
    file = written(tmp_path, {"text": "alone"})
    (tmp_path / "a.txt").write_text("text")
    assert pairs.files_of([]) == [] and pairs.files_of(["hf:x"]) == []
    assert pairs.files_of([str(file)]) == pairs.files_of([str(tmp_path / "a.txt")]) == []
    written(tmp_path, {"a": "x", "b": "y"})
    with pytest.raises(DataError, match=r"pairs\.jsonl holds pairs of texts and .*a\.txt does not"):
        pairs.files_of([str(tmp_path)])


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"a": "x", "c": "y"}, 'line 2: found a, c; expected an object with the texts "a" and "b", neither empty'),
        ({"a": "x", "b": " "}, "line 2: \"b\" is ' '; expected"),
        ({"a": "x", "b": 3}, 'line 2: "b" is 3; expected'),
        ([1], "line 2: found [1]; expected"),
        ({"a": "x", "b": "\ud800"}, "half of a surrogate pair"),
        (b"{", "line 2: not JSON"),
        (b"[" * 100_000, "line 2: not JSON"),
        (b'{"a": "\xff"}', "line 2 is not UTF-8"),
    ],
)
def test_damaged_pairs_are_refused(record: Any, said: str, tmp_path: Path) -> None:
    file = written(tmp_path, {"a": "x", "b": "y"}, record)
    with pytest.raises(DataError) as error:
        list(pairs.Joined([file]))
    assert said in str(error.value)


def test_records_of_images_are_no_pairs_of_texts(tmp_path: Path) -> None:
    file = written(tmp_path, {"image": "a.png", "caption": "a cat"})
    with pytest.raises(DataError, match=r"line 1 has an image, and this model sees none; add --preset siglip-tiny"):
        list(pairs.Joined([file]))


def test_too_few_pairs_to_hold_some_out(tmp_path: Path) -> None:
    file = written(tmp_path, {"a": "x", "b": "y"})
    with pytest.raises(DataError, match="1 pairs of texts, none of which happens to be held out"):
        pairs.separate(*corpus.split(pairs.Joined([file]), 0.05))


def test_info_nce_by_hand() -> None:
    """Two pairs in a plane: the right ones at cosines 1 and 0.8, the wrong ones at 0 and 0.6."""
    vectors = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.6, 0.8]])
    table = [[2.0, 1.2], [0.0, 1.6]]  # over a temperature of 0.5

    def missed(right: float, wrong: float) -> float:
        return math.log(1 + math.exp(wrong - right))

    rows = missed(table[0][0], table[0][1]) + missed(table[1][1], table[1][0])
    columns = missed(table[0][0], table[1][0]) + missed(table[1][1], table[0][1])
    found = contrast.softmax(contrast.cosines(0.5), *vectors.chunk(2))
    assert found.item() == pytest.approx((rows + columns) / 2)


@pytest.mark.parametrize("pooling", ["last", "mean", "first"])
@pytest.mark.parametrize("mask", ["bidirectional", "causal"])
def test_what_fills_a_row_changes_no_vector(pooling: str, mask: str) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=61, dim=32, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=16,
        has_head=False, pooling=pooling, mask=mask,
    )  # fmt: skip
    model, text = Transformer(config).double().eval(), pairs.Pairs(tokens_of(3, 9), 0, given=True, frame=Frame((0,)))
    inputs, _, documents = text.rows([0], 12)
    with torch.no_grad():
        together = model(inputs, documents)
        for row, n in enumerate((4, 10)):
            assert torch.allclose(together[row], model.embed(inputs[row : row + 1, :n])[0], atol=1e-9)


def test_evaluation_finds_the_right_one() -> None:
    """A model whose vectors are those of the texts' first tokens: all pairs of equal ones are found, no others."""
    config = ModelConfig(
        vocab_size=400, dim=32, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=32, ffn_dim=8, max_context=8,
        has_head=False, pooling="last", mask="causal", head_format="f32", residual_scale=1e-9,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Transformer(config)
    same = [token for i in range(1, 31) for token in (0, i, 0, i if i <= 20 else i + 300)]
    text = pairs.Pairs(Tokens(np.array(same, np.uint16), 1, "x"), 0, given=True, frame=Frame((0,)))
    measure = contrast.cosines(0.05), contrast.softmax
    found = contrast.evaluate(model, text, 8, *measure, batch=7)
    assert (found.pairs, found.pool) == (30, 30) and 20 <= 30 * found.recall < 27 and 20 <= 30 * found.recall_back < 27
    assert contrast.evaluate(model, text, 8, *measure, batch=4).nats_per_pair == pytest.approx(found.nats_per_pair)
    assert contrast.evaluate(model, text, 8, *measure, limit=160).pairs == 10
