"""`bitnet report --attention`: a picture for each layer and head, showing `attention_weights`."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bitnet.report.attention import weights_of
from bitnet.train.checkpoint import Checkpoint
from training import TINY, bitnet

torch.set_num_threads(1)


def test_weights(finished: Path) -> None:
    """A row for every token, from the first of the document on; spaces are visible."""
    names, layers = weights_of(Checkpoint.open(finished), "the cat\nsees")
    assert names[0] == "<|endoftext|>" and "".join(names[1:]) == "the·cat↵sees"
    n = len(names)
    assert [heads.shape for heads in layers] == [(2, n, n)] * 2
    for heads in layers:
        assert np.allclose(heads.sum(-1), 1, atol=1e-6) and not np.triu(heads, 1).any()


def test_a_picture_for_each_layer_and_head(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.axes import Axes

    titles: list[str] = []
    title = Axes.set_title
    monkeypatch.setattr(Axes, "set_title", lambda self, text, **more: (titles.append(text), title(self, text, **more)))
    out = tmp_path / "page.html"
    assert bitnet("report", finished, "--attention", "the $cat$ <b>", "--out", out) == 0
    text = out.read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"{out}\n" and len(set(re.findall(r'src="([^"]*)"', text))) == 2
    assert "<b>" not in text and "&lt;b&gt;" in text.replace(" ", "")
    assert titles == [f"layer {layer}, head {head}" for layer in range(2) for head in range(2)]
    assert bitnet("report", finished, "--attention", "the cat", "--out", tmp_path / "page.png") == 0
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG") and len(titles) == 8


def test_an_encoder_looks_both_ways(sentences: str, tmp_path: Path) -> None:
    options = (*TINY, "--set", "mask=bidirectional", "--objective", "mlm", "--steps", "2")
    assert bitnet("train", *options, "--data", sentences, "--out", tmp_path / "run") == 0
    _, layers = weights_of(Checkpoint.open(tmp_path / "run"), "the red house")
    assert all((heads > 0).all() for heads in layers)
    assert bitnet("report", tmp_path / "run", "--attention", "the red house") == 0
    assert (tmp_path / "run" / "attention.html").is_file()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--attention", "the cat " * 40), "tokens, expected 1 to 31; give a shorter text"),
        (("--attention", "the cat", "--prompt", "a"), "--prompt and --tokens are for the sample, which is not drawn"),
        (("--attention", "the cat", "--tokens", "5"), "--prompt and --tokens are for the sample, which is not drawn"),
        (("--attention", ""), "--attention has 0 tokens, expected 1 to 31; give a text"),
        (("--attention", "x", "--out", "page.pdf"), "expected a name that ends in .html or .png"),
        (("--attention", "x", "--out", "/nowhere/page.png"), "the folder /nowhere does not exist"),
    ],
)
def test_refusals(options: tuple[str, ...], said: str, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bitnet("report", finished, *options) == 1
    assert said in capsys.readouterr().err
    assert not (finished / "attention.html").exists()
