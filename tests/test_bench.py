"""What `bitnet bench` measures; tests/test_cli_runtime.py runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from bitnet.config import ModelConfig
from bitnet_cli import main
from bitnet_export import random_model
from bitnet_runtime import BitnetError, Model, bench, machine, works
from packed_files import SEEING, SMALL, TOWERS

AREAS = """\
7f0000000000-7f0000600000 r--p 00000000 fe:00 12 {file}
Size:               6144 kB
Rss:                4096 kB
FilePmdMapped:      2048 kB
VmFlags: rd mr
7f0000600000-7f0000800000 r--p 00600000 fe:00 12 {file}
Rss:                2048 kB
FilePmdMapped:      2048 kB
7f0000800000-7f0000a00000 r--p 00000000 fe:00 13 {file}.other
Rss:                2048 kB
FilePmdMapped:         0 kB
7f0000a00000-7f0000c00000 rw-p 00000000 00:00 0
Rss:                2048 kB
"""


def test_share_of_a_file_in_huge_pages(tmp_path: Path) -> None:
    file, areas = tmp_path / "a model.bitnet", tmp_path / "smaps"
    areas.write_text(AREAS.format(file=file))
    assert machine.huge_share(str(file), areas) == 4096 / 6144
    assert machine.huge_share(str(tmp_path / "another"), areas) is None
    assert machine.huge_share(str(file), tmp_path / "a system without it") is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it")
def test_share_of_a_mapped_model(tmp_path: Path) -> None:
    file = str(tmp_path / "m.bitnet")
    random_model(SMALL, file, 0)
    with Model.load(file):
        share = machine.huge_share(file)
        assert share is not None and 0 <= share <= 1
    with Model.load(file, mmap=False):
        assert machine.huge_share(file) is None


def test_what_is_short_is_measured_with_warm_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that the limits leave a small model is 3 to 25 times as slow."""
    runs: list[float] = []

    def slow_at_first(work: Callable[[], object]) -> float:
        work()
        runs.append(works.SPAN / (100 if runs else 2))
        return runs[-1]

    monkeypatch.setattr(works, "seconds", slow_at_first)
    random_model(SMALL, tmp_path / "m.bitnet", 0)
    with Model.load(tmp_path / "m.bitnet") as model, model.session() as session:
        assert works._prefill(session, 0, [1, 2, 3]) == runs[-1] < runs[0] and len(runs) > 50
        runs.clear()
        assert works._decode(session, 0, 1, 4) == (runs[-1], 0) and len(session.tokens) == 5


def test_a_prompt_is_timed_after_a_token_that_reads_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 10 million parameters at a depth of 4,096 the first prompt took 8 times as long as the next."""
    calls: list[object] = []
    session = mock.Mock()
    session.rewind.side_effect = lambda depth: calls.append(depth)
    session.feed.side_effect = lambda tokens: calls.append(tokens)

    def timed(work: Callable[[], object]) -> float:
        calls.append("timed")
        work()
        return works.SPAN

    monkeypatch.setattr(works, "seconds", timed)
    assert works._prefill(session, 5, [1, 2, 3]) == works.SPAN
    assert calls == [5, [1], 5, "timed", [1, 2, 3]]


ENCODER = SMALL.replace(mask="bidirectional")
ONLY_IMAGES = TOWERS.vision
WORKS = {
    "decoder": (SMALL, {"prefill", "decode", "rows"}),
    "decoder that sees images": (SEEING, {"prefill", "decode", "rows", "image"}),
    "encoder with a head": (ENCODER, {"embed"}),
    "encoder": (ENCODER.replace(has_head=False, pooling="first"), {"embed"}),
    "towers": (TOWERS, {"embed", "image"}),
    "images alone": (ONLY_IMAGES, {"image"}),
}


@pytest.mark.parametrize(("config", "expected"), WORKS.values(), ids=WORKS)
def test_a_model_is_measured_at_what_it_does(
    config: ModelConfig, expected: set[str], tmp_path: Path, bench_here: None
) -> None:
    random_model(config, tmp_path / "m.bitnet", 0)
    found = bench.bench(tmp_path / "m.bitnet", repeat=1)
    assert {"prefill", "decode", "rows", "embed", "image"} & {*found} == expected
    names = [line.split()[0] for line in bench.table(found).splitlines()[1:]]
    assert names == ["model", "limits", "load", "memory", *(work for work in bench.LINES if work in expected)]
    for work in expected & {"prefill", "embed", "image"}:
        assert 0 < found[work]["int8_peak_share"] < 1 and len(found[work]["runs"]) == 1
    assert bool(found["session_mb"]) == ("decode" in expected)


def test_texts_and_images_are_timed_alone_and_together(tmp_path: Path, bench_here: None) -> None:
    random_model(TOWERS, tmp_path / "m.bitnet", 0)
    found = bench.bench(tmp_path / "m.bitnet", prompt=10, repeat=2)
    embed, image = found["embed"], found["image"]
    with Model.load(tmp_path / "m.bitnet") as model:
        macs = model.info.macs_per_token
    assert (embed["n"], embed["together"]) == (10, 25)  # 256 tokens at most
    assert embed["gmac_s"] == pytest.approx(embed["tok_s"] * macs / 1e9)
    assert image["together"] == 102  # 512 vectors at most, 5 for each
    assert embed["ms"] > 0 and image["ms"] > 0 and len(embed["runs"]) == len(image["runs"]) == 2


@pytest.mark.parametrize(
    ("config", "asked", "message"),
    [
        (ENCODER, {"gen": 4}, "m.bitnet generates no text: leave out --gen"),
        (ENCODER, {"depth": 4}, "m.bitnet generates no text: leave out --depth"),
        (ENCODER, {"prompt": 33}, "--prompt 33 is more than the 32 tokens that a text can have"),
        (ONLY_IMAGES, {"prompt": 3}, "m.bitnet takes no text: leave out --prompt"),
        (SMALL.replace(input="embeddings", vocab_size=0, has_head=False, tie_embeddings=False), {}, "takes vectors"),
    ],
)
def test_what_a_model_cannot_do_is_refused(
    config: ModelConfig, asked: dict[str, int], message: str, tmp_path: Path, bench_here: None
) -> None:
    random_model(config, tmp_path / "m.bitnet", 0)
    with pytest.raises(BitnetError, match=message):
        bench.bench(tmp_path / "m.bitnet", **asked)


def test_a_shape_keeps_its_context_unless_asked_for_more(bench_here: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--shape", "siglip-tiny", "--repeat", "1"]) == 0
    assert "a text of 64 tokens" in capsys.readouterr().out
    assert main(["bench", "--shape", "siglip-tiny", "--repeat", "1", "--prompt", "100"]) == 0
    assert "a text of 100 tokens" in capsys.readouterr().out
