"""Models that llama.cpp does not compute are refused as GGUF, with all that is in the way; no file is left half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import normalizers

from bitnet.data import tokenizer as built_in
from bitnet_export import random_model
from bitnet_export.foreign.gguf.write import write_gguf
from gguf_written import BITNET, build


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"activation": "relu2"}, {}, "bitnet: activation is 'relu2', it computes 'silu'"),
        ({"tie_embeddings": False}, {}, "bitnet: tie_embeddings is False"),
        ({"sliding_window": 8}, {}, "sliding_window is 8"),
        ({"head_dim": 32}, {}, "n_heads · head_dim is 128, it wants dim = 256"),
        ({"ffn_dim": 320}, {}, "ffn_down.weight: rows of 320 weights, TQ2_0 has blocks of 256; write"),
        ({"dim": 100, "head_dim": 25 * 2, "n_heads": 2}, {"body": "F16"}, "token_embd.weight: rows of 100 weights"),
        ({"logit_softcap": 30.0}, {}, "logit_softcap is 30.0"),
        ({"rope_dim": 32}, {}, "rope_dim is 32, only models whose whole heads turn"),
        ({}, {"body": "I2_S"}, "body is 'I2_S', expected one of TQ2_0"),
        ({}, {"head": "Q4_0"}, "head is 'Q4_0', expected one of Q8_0"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    path, out = tmp_path / "m.bitnet", tmp_path / "m.gguf"
    random_model(BITNET.replace(**change), path)
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        write_gguf(path, out, **options)
    assert sorted(tmp_path.iterdir()) == [path]


def test_everything_in_the_way_is_said_at_once(tmp_path: Path) -> None:
    """What a model of `bitnet train` without --preset gguf lacks: activation, widths, pre-tokenizer."""
    config = BITNET.replace(activation="relu2", dim=192, n_heads=3, n_kv_heads=1, vocab_size=300)
    path, words = tmp_path / "m.bitnet", built_in.build("bpe", ["some text"], 300)
    words.normalizer = normalizers.Lowercase()
    random_model(config, path, tokenizer=words.to_str().encode())
    with pytest.raises(ValueError) as refused:
        write_gguf(path, tmp_path / "m.gguf")
    for problem in (
        "(1) no architecture of llama.cpp computes this model, the nearest is bitnet: activation is 'relu2'",
        "(2) attn_q.weight, attn_k.weight, attn_v.weight, attn_output.weight, ffn_gate.weight, ffn_up.weight: "
        "rows of 192 weights",
        "(3) the tokenizer cuts text by split",
        "and normalizes text by Lowercase, llama.cpp does not; write the file for token ids (--no-tokenizer)",
        "`bitnet train --preset gguf` trains a model that llama.cpp takes",
    ):
        assert problem in str(refused.value)
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path, out = build(tmp_path, BITNET), tmp_path / "m.gguf"
    older = b"GGUF, an older one of bitnet-edge"
    out.write_bytes(older)

    def stop(line: str) -> None:
        if line.startswith("writing tensor 5 of "):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, out, progress=stop)
    assert out.read_bytes() == older
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(FileNotFoundError, match="create it first"):
        write_gguf(path, tmp_path / "none" / "m.gguf")
