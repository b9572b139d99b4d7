"""`up` and `down` stored line by line: the bytes of FORMAT.md §4, and the same logits, bit for bit, as from tiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import packed_files
from bitnet.config import ModelConfig
from bitnet.data import tokenizer
from bitnet.model.transformer import Transformer
from bitnet.train import saving
from bitnet.train.checkpoint import Checkpoint
from bitnet_cli import main
from bitnet_export import PackedFile, PackedFormatError, random_model, repack
from bitnet_export.checkpoint import sparsity
from bitnet_export.checkpoint.findings import ZeroInputs
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.convert.incoming import pack_source
from bitnet_export.convert.verify_source import verify_source
from bitnet_export.foreign.outgoing import value_rows
from bitnet_export.packed import encodings, layout, records
from bitnet_runtime import Model, ModelFormatError, available_isas
from bitnet_runtime.works import skipped_bytes
from packed_source import source_of

sizes = st.integers(1, 600)
seeds = st.integers(0, 2**32 - 1)

# More than one block of 256 codes in a line, the last of them unfinished in unit and field.
MODEL = ModelConfig(
    vocab_size=70, dim=300, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=530, max_context=96,
)  # fmt: skip


def model(path: Path, **changes: object) -> Path:
    random_model(MODEL.replace(**changes), path, 1)
    return path


def logits(path: Path, isa: str | None = None, threads: int = 1, piece: int = 70) -> bytes:
    tokens = list(range(70))
    with Model.load(path, isa=isa, threads=threads) as m, m.session() as session:
        pieces = [session.append(tokens[i : i + piece], "all") for i in range(0, 70, piece)]
        return np.concatenate([p for p in pieces if p is not None]).tobytes()


@given(sizes, sizes, seeds)
def test_lines_follow_the_formula_of_the_format(rows: int, cols: int, seed: int) -> None:
    codes = np.random.default_rng(seed).integers(-1, 2, (rows, cols), np.int8)
    data, blocks = layout.pack_rows(codes), -(-cols // 256)
    assert data.size == layout.rows_size(rows, cols) == layout.columns_size(cols, rows) == 64 * rows * blocks
    i = np.arange(256 * blocks)
    found = data.reshape(rows, -1)[:, i // 64 * 16 + i % 16] >> (i % 64 // 16 * 2) & 3
    assert np.array_equal(found[:, :cols].astype(np.int8) - 1, codes) and (found[:, cols:] == 1).all()
    assert np.array_equal(layout.unpack_rows(data, rows, cols), codes)
    assert np.array_equal(layout.pack_columns(np.ascontiguousarray(codes.T)), data)
    assert np.array_equal(layout.unpack_columns(data, cols, rows), codes.T)


def test_lines_of_another_size_or_code_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a code is 2, expected -1 to 1"):
        layout.pack_rows(np.full((2, 3), 2, np.int8))
    with pytest.raises(ValueError, match=r"128 bytes for a 1 x 256 matrix, expected 64"):
        layout.unpack_rows(bytes(128), 1, 256)


@pytest.mark.parametrize("bits", ["2.0", "1.6"])
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, bits: str) -> None:
    random_model(MODEL, tmp_path / "tiles", 1, encoding=bits)
    report = repack(tmp_path / "tiles", tmp_path / "lines", encoding=bits, sparse=True)
    assert report.logits_equal == 32
    found = {records.ROLES[k.role]: r.encoding for k, r in PackedFile.open(tmp_path / "lines").tensors.items()}
    body = encodings.TERNARY[bits]
    assert (found["gate"], found["up"], found["down"]) == (
        body,
        encodings.TERNARY_2BIT_ROWS,
        encodings.TERNARY_2BIT_COLUMNS,
    )
    repack(tmp_path / "lines", tmp_path / "as_it_is", encoding=bits)
    assert (tmp_path / "as_it_is").read_bytes() == (tmp_path / "lines").read_bytes()
    repack(tmp_path / "lines", tmp_path / "back", encoding=bits, sparse=False)
    assert (tmp_path / "back").read_bytes() == (tmp_path / "tiles").read_bytes()


def test_logits_are_the_same_bits_on_every_tier(tmp_path: Path) -> None:
    """One token, a few, many; one thread, and more threads than blocks of outputs."""
    repack(model(tmp_path / "tiles"), tmp_path / "lines", sparse=True)
    expected = logits(tmp_path / "tiles")
    for isa in available_isas():
        for threads, piece in ((1, 70), (2, 1), (1, 3), (3, 33)):
            assert logits(tmp_path / "lines", isa, threads, piece) == expected, (isa, threads, piece)


FAMILIES: dict[str, dict[str, object]] = {
    "row scales": {"weight_scale": "row"},
    "biases": {"ffn_bias": True},
    "relu": {"activation": "relu"},
    "silu, where all of up matters": {"activation": "silu"},
    "no gate": {"ffn": "plain"},
    "no sub norm": {"sub_norm": False},
    "a norm before every linear": {"linear_norm": True},
    "post norms": {"post_norm": True, "residual_scale": 0.5},
    "lists longer than one": {"ffn_dim": 9001, "dim": 40, "n_layers": 1},
    "more outputs than at a time": {"ffn_dim": 40, "dim": 4400, "n_layers": 1},
    "float down": {"ternary": ("q", "k", "v", "o", "gate", "up")},
}


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES.keys())
def test_families(tmp_path: Path, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparsity, "require_zeros", lambda *_: None)  # versions before wrote such files
    assert repack(model(tmp_path / "a", **changes), tmp_path / "b", sparse=True).logits_equal == 32
    found = {r.encoding for r in PackedFile.open(tmp_path / "b").tensors.values()}
    assert encodings.TERNARY_2BIT_ROWS in found


def test_dead_rows_and_columns_do_not_count(tmp_path: Path) -> None:
    """A gate that is never positive: the FFN adds exactly 0, as from tiles, and no line is read."""
    from bitnet_export.packed.random_model import _draw
    from bitnet_export.packed.writer import Encoded, write_packed

    config = MODEL.replace(ffn_bias=True)

    def source(spec: records.Spec) -> Encoded:
        if spec.key.part == 1:
            negative = records.ROLES[spec.key.role] == "gate"
            return Encoded.f32(np.full((1, spec.cols), -1e6 if negative else 0.0))
        return _draw(spec, config, np.random.default_rng([1, *spec.key]), 1 / 3, encodings.TERNARY_2BIT)

    write_packed(tmp_path / "a", [config], source)
    assert repack(tmp_path / "a", tmp_path / "b", sparse=True).logits_equal == 32
    shape = config.ffn_dim, config.dim
    lines = config.n_layers * (layout.rows_size(*shape) + layout.columns_size(*shape[::-1]))
    for threads, expected in ((1, 5 * lines), (3, 5 * lines)):
        with Model.load(tmp_path / "b", threads=threads) as m, m.session() as session:
            session.append([1, 2, 3])
            session.append([4, 5])
            assert skipped_bytes(session) == expected


def test_group_scales_have_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The format itself refuses them, whoever asks."""
    monkeypatch.setattr(sparsity, "require_zeros", lambda *_: None)
    with pytest.raises(
        ValueError, match=r"up\.weight: stored as TERNARY_2BIT_ROWS with group scale, .* does not allow"
    ):
        repack(model(tmp_path / "a", weight_scale="group"), tmp_path / "b", sparse=True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "silu"}, r"sparse leaves out what relu² makes 0, and .* has activation = 'silu'; leave the"),
        ({"ternary": ("q", "k", "gate")}, r"sparse stores ternary `up` and `down` by lines, those of .* are floats"),
        ({"weight_scale": "group"}, r"sparse stores lines with one scale, and weights of .* have one a group; leave"),
    ],
    ids=["silu", "floats", "groups"],
)
def test_models_without_zeros_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    source = Transformer(MODEL.replace(**changes))
    saving.write(
        tmp_path / "run",
        saving.Snapshot.of(
            source, tokenizer.build("byte", [], 257).to_str(), torch.optim.AdamW(source.parameters()), {"step": 1}
        ),
    )
    for write in (
        lambda out: repack(model(tmp_path / "a", **changes), out, sparse=True),
        lambda out: pack_checkpoint(Checkpoint.open(tmp_path / "run"), out, sparse=True),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "b")
        assert not (tmp_path / "b").exists()


def test_code_3_is_refused_by_both_readers(tmp_path: Path) -> None:
    repack(model(tmp_path / "a"), tmp_path / "b", sparse=True)
    good = (tmp_path / "b").read_bytes()
    data = packed_files.section_start(good, records.DATA)
    for record in PackedFile(good).tensors.values():
        if record.encoding in encodings.LINES.values():
            bad = packed_files.patch(good, data + record.offset + record.size - 1, "B", 0xD5)
            with pytest.raises(PackedFormatError, match=rf"{record.key.name}: a ternary code is 3"):
                PackedFile(bad)
            (tmp_path / "bad").write_bytes(bad)
            with pytest.raises(ModelFormatError, match=rf"{record.key.name}: a ternary code is 3"):
                Model.load(tmp_path / "bad")


def test_other_roles_have_no_lines(tmp_path: Path) -> None:
    good = model(tmp_path / "a").read_bytes()
    entry = packed_files.tensor_entry(good, "layers.0.gate.weight")
    bad = packed_files.patch(good, entry + 9, "B", encodings.TERNARY_2BIT_ROWS.number)
    with pytest.raises(PackedFormatError, match=r"gate\.weight is TERNARY_2BIT_ROWS"):
        PackedFile(bad)
    (tmp_path / "bad").write_bytes(bad)
    with pytest.raises(ModelFormatError, match=r"gate\.weight: encoding 7 with scale scope 1 is not allowed"):
        Model.load(tmp_path / "bad")


def zeros(before: float, after: float) -> ZeroInputs:
    return ZeroInputs(before=(before, before), after=(after, after))


def test_lines_are_chosen_where_they_pay() -> None:
    large = MODEL.replace(dim=2560, ffn_dim=6912, n_layers=30)
    assert sparsity.pays(large, zeros(0.78, 0.88))
    assert not sparsity.pays(large, zeros(0.2, 0.6))
    assert not sparsity.pays(MODEL, zeros(0.9, 0.9))  # fits in a cache
    assert sparsity.pays(large, zeros(0.5, 0.55)) and not sparsity.pays(
        large, zeros(0.5, 0.55), encodings.TERNARY_5TRIT
    )  # next to fewer bits a weight
    assert sparsity.rectified(large) and sparsity.rectified(large.replace(activation="relu"))
    for changes in ({"activation": "silu"}, {"ffn": "plain"}, {"weight_scale": "group"}, {"ternary": ("up",)}):
        assert not sparsity.rectified(large.replace(**changes))


def test_export_measures_and_stores_by_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = MODEL.replace(dim=64, ffn_dim=96, vocab_size=257, max_context=32)
    torch.manual_seed(1)
    trained = Transformer(config)
    words = tokenizer.build("byte", [], config.vocab_size).to_str()
    saving.write(
        tmp_path / "run", saving.Snapshot.of(trained, words, torch.optim.AdamW(trained.parameters()), {"step": 1})
    )
    out = tmp_path / "m.bitnet"
    for words, sparse in (([], False), (["--sparse", "on"], True), (["--sparse", "off"], False)):
        assert main(["export", str(tmp_path / "run"), str(out), "--tokens", "512", *words]) == 0
        assert ("the engine leaves them out" in capsys.readouterr().err) == sparse
        file = PackedFile.open(out)
        assert file.sparse == sparse and {len(v) for v in file.metadata["zero_inputs"].values()} == {config.n_layers}
    assert main(["inspect", str(out)]) == 0
    assert "zero_inputs" in capsys.readouterr().out


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_published_models_become_lines(tmp_path: Path, scope: str) -> None:
    """Codes and values read back from lines equal those of tiles."""
    source = source_of(model(tmp_path / "a", weight_scale=scope))
    checks = []
    pack_source(
        source, tmp_path / "b", sparse=True, check=lambda file: checks.append(verify_source(source, file, tokens=64))
    )
    before, after = PackedFile.open(tmp_path / "a"), PackedFile.open(tmp_path / "b")
    assert after.sparse and len(checks) == 1
    for key, record in after.tensors.items():
        if record.encoding.ternary:
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(np.concatenate(list(value_rows(after, record))), before.values(before.tensors[key]))


def test_scales_of_groups_have_no_lines(tmp_path: Path) -> None:
    source = source_of(model(tmp_path / "a", weight_scale="group"))
    with pytest.raises(ValueError, match=r"up\.weight cannot be stored as TERNARY_2BIT_ROWS with group scale"):
        pack_source(source, tmp_path / "b", sparse=True)
    assert not (tmp_path / "b").exists()
