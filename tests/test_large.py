"""Token ids of 100 GB: only small parts of them are checked, shuffled and kept in memory."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bitnet.data import dataset, tokenized, tokenizer
from bitnet.data.corpus import DataError
from bitnet.data.dataset import Batches, Tokens
from bitnet.process import sha256
from training import TINY, bitnet, bits, killed_before

torch.set_num_threads(1)


@pytest.mark.parametrize("windows", [40, 41, 49, 50])
def test_an_epoch_in_parts_visits_every_window_once(windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is spread over all of the text; sequences are cut as without parts."""
    tokens = Tokens(np.arange((windows + 1) * 4 + 1, dtype=np.uint16), 1, "")
    whole = Batches(tokens, 1, 4, seed=5)
    monkeypatch.setattr(dataset, "ORDERED", 10)
    parts = Batches(tokens, 1, 4, seed=5)
    assert parts.per_epoch == whole.per_epoch == windows and parts._parts == -(-windows // 10)
    for epoch in range(2):
        found = [each.sequences(epoch * windows, (epoch + 1) * windows)[0][:, 0] for each in (whole, parts)]
        assert torch.equal(found[0].sort().values, found[1].sort().values)
        order = (found[1] // 4).tolist()
        first = sorted(order[: -(-windows // parts._parts)])
        assert all(b - a == parts._parts for a, b in itertools.pairwise(first))
    cuts = [0, 1, 9, 10, 11, 30, 2 * windows]
    again = [parts.sequences(a, b)[0] for a, b in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(again), parts.sequences(0, 2 * windows)[0])


def test_the_order_of_a_text_of_usual_size() -> None:
    """It never changes, so that existing runs can be resumed."""
    tokens = Tokens(np.arange(401, dtype=np.uint16), 1, "")
    random = torch.Generator().manual_seed(7 * 1_000_003 + 2)
    shift, order = int(torch.randint(4, (), generator=random)), torch.randperm(99, generator=random)
    assert torch.equal(Batches(tokens, 1, 4, seed=7).sequences(198, 297)[0][:, 0], order * 4 + shift)


def test_what_is_checked_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a file; of a large one its size and pieces from beginning to end."""
    file = tmp_path / "x"
    file.write_bytes(raw := np.random.default_rng(0).bytes(10_000))
    whole = dataset.checksum_of(file)
    assert whole == sha256(file)
    monkeypatch.setattr(dataset, "CHECKED", 1000)
    monkeypatch.setattr(dataset, "PIECE", 100)
    before = dataset.checksum_of(file)
    assert before != whole
    for place in (0, 99, 5000, 9999):
        file.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
        seen = any(start <= place < start + n for start, n in dataset._checked(10_000))
        assert (dataset.checksum_of(file) != before) == seen
    file.write_bytes(raw[:5000] + raw[4000:])
    assert dataset.checksum_of(file) != before
    assert sum(n for _, n in dataset._checked(10**14)) == 1000


def test_a_run_on_100_gigabytes_begins_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sparse file: it takes no room on disk, and reading all of it would take minutes."""
    monkeypatch.setattr(dataset, "CHECKED", 1 << 24)
    monkeypatch.setattr(dataset, "ORDERED", 1 << 16)
    ids = tmp_path / "ids"
    ids.mkdir()
    tokenizer.build("byte", [], 257).save(str(ids / "tokenizer.json"))
    contents: dict[str, object] = {"first": 0, "vocab_size": 300}  # asked for, as TINY does
    for side, size in (("train", 10**11), ("validation", 10**9)):
        with (ids / f"{side}-0.bin").open("wb") as file:
            file.truncate(size)
        tokens = Tokens.map(ids / f"{side}-0.bin", "uint16", 2 * size, side)
        contents[side] = tokens.to_dict()
    (ids / tokenized.CONTENTS).write_text(json.dumps(contents))
    words = ["train", *TINY, "--data", ids, "--eval-tokens", "64", "--steps", "4", "--eval-every", "4"]
    killed_before(3, *words, "--save-every", "2", "--out", tmp_path / "run")
    assert "50,000,000,000 training tokens" in capsys.readouterr().err
    for run in ("run", "whole"):
        more = ["--resume"] if run == "run" else words[1:]
        assert bitnet("train", *more, "--out", tmp_path / run) == 0
    assert bits(tmp_path / "run" / "step-000004") == bits(tmp_path / "whole" / "step-000004")
    with (ids / "train-0.bin").open("r+b") as file:
        file.truncate(10**11 - 2)
    with pytest.raises(DataError, match="is damaged"):
        tokenized.read(ids, "train")
