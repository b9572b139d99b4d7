"""The packed file: written, read back, and refused when anything about it is wrong."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.config import CHOICES, ModelConfig
from bitnet.presets import PRESETS
from bitnet_export import PackedFile, random_model
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import expected_tensors
from bitnet_export.packed.stacks import pack_stack, unpack_stack
from bitnet_export.packed.writer import Encoded, write_packed
from packed_files import SMALL, packed_bytes, swap, values_of, with_section, write_values

EVERYTHING = SMALL.replace(
    n_layers=1, post_norm=True, linear_norm=True, norm_bias=True, qk_norm=True, norm="layer", qkv_bias=True,
    o_bias=True, ffn_bias=True, head_bias=True, tie_embeddings=False, n_experts=3, experts_per_token=2, name="größer",
    embedding_norm=True, activation="gelu_erf", normalize_routing=False, first_position=1, image_token=5,
    adapter_rank=3, adapters=("k", "down"),
)  # fmt: skip
IMAGES = SMALL.replace(
    name="vision", input="images", vocab_size=0, has_head=False, tie_embeddings=False, mask="bidirectional",
    position="learned", max_context=5, image_size=5, patch_size=2, channels=2, pixel_mean=(0.5, 0.25),
    pixel_std=(0.5, 1.0), class_token=True, patch_bias=True, out_dim=7, projector_bias=True, pooling="attention",
    residual_norm=True, final_norm=False, n_heads=3, n_kv_heads=1, o_bias=True, similarity_scale=10.0,
    similarity_bias=-10.0,
)  # fmt: skip
DRAFT = SMALL.replace(name="draft", input="draft", vocab_size=0, has_head=False, tie_embeddings=False, n_layers=1)


# ---- the rule: which tensors ----


def names(config: ModelConfig) -> list[str]:
    return [spec.key.name for spec in expected_tensors(config)]


def test_tensors_of_a_plain_decoder() -> None:
    layer = ["attn_norm", "q", "k", "v", "attn_sub_norm", "o", "ffn_norm", "gate", "up", "ffn_sub_norm", "down"]
    expected = [f"layers.{i}.{role}.weight" for i in range(2) for role in layer]
    assert names(SMALL) == [*expected, "embedding.weight", "final_norm.weight", "rope_frequencies"]


def test_tensors_of_a_stack_with_everything() -> None:
    def both(name: str) -> list[str]:
        return [f"{name}.weight", f"{name}.bias"]

    def experts(role: str) -> list[str]:
        parts = [f"layers.0.experts.{{}}.{role}.adapter_{end}" for end in ("in", "out") if role == "down"]
        return [
            name
            for e in range(3)
            for name in [*both(f"layers.0.experts.{e}.{role}"), *(part.format(e) for part in parts)]
        ]

    expected: list[str] = []
    for role in ("attn_norm", "q", "k", "v", "q_norm", "k_norm", "attn_sub_norm", "o", "attn_post_norm", "ffn_norm"):
        expected += both(f"layers.0.{role}")
        expected += ["layers.0.k.adapter_in", "layers.0.k.adapter_out"] if role == "k" else []
    expected += ["layers.0.router.weight"]
    expected += [name for role in ("gate", "up", "ffn_sub_norm", "down") for name in experts(role)]
    expected += both("layers.0.ffn_post_norm")
    expected += [name for role in ("q", "k", "v", "o") for name in both(f"layers.0.{role}_linear_norm")]
    expected += [name for role in ("gate", "up", "down") for name in experts(f"{role}_linear_norm")]
    expected += ["embedding.weight", *both("final_norm"), *both("head"), *both("embedding_norm"), "rope_frequencies"]
    assert names(EVERYTHING) == expected


def test_tensors_of_images_and_of_a_draft() -> None:
    def outside(config: ModelConfig) -> dict[str, tuple[int, int]]:
        return {s.key.name: (s.rows, s.cols) for s in expected_tensors(config) if s.key.layer == records.NONE}

    assert outside(IMAGES) == {
        "position.weight": (5, 24), "patch.weight": (24, 8), "patch.bias": (1, 24), "class_embedding": (1, 24),
        "projector.weight": (7, 24), "projector.bias": (1, 7), "pool_probe": (1, 24),
        "pool_q.weight": (24, 24), "pool_k.weight": (24, 24), "pool_v.weight": (24, 24),
        "pool_o.weight": (24, 24), "pool_o.bias": (1, 24), "pool_norm.weight": (1, 24),
        "pool_up.weight": (20, 24), "pool_down.weight": (24, 20),
    }  # fmt: skip
    assert outside(DRAFT) == {
        "final_norm.weight": (1, 24), "rope_frequencies": (1, 4), "draft_hidden_norm.weight": (1, 24),
        "draft_embedding_norm.weight": (1, 24), "draft_projection.weight": (24, 48),
    }  # fmt: skip
    adapted = {s.key.name: (s.rows, s.cols) for s in expected_tensors(EVERYTHING) if s.key.part > 1}
    assert adapted["layers.0.k.adapter_in"] == (3, 24) and adapted["layers.0.k.adapter_out"] == (3, 8)
    assert adapted["layers.0.experts.1.down.adapter_in"] == (3, 20)


@pytest.mark.parametrize(
    ("changes", "there", "not_there"),
    [
        ({"position": "learned", "rope_dim": 0}, "position.weight", "rope_frequencies"),
        ({"position": "none", "rope_dim": 0}, "embedding.weight", "rope_frequencies"),
        ({"ffn": "plain"}, "layers.0.up.weight", "layers.0.gate.weight"),
        ({"has_head": False, "tie_embeddings": False}, "embedding.weight", "head.weight"),
        ({"head_bias": True}, "head.bias", "head.weight"),
        ({"head_bias": True, "has_head": False}, "final_norm.weight", "head.bias"),
        ({"input": "embeddings", "tie_embeddings": False}, "head.weight", "embedding.weight"),
        ({"input": "embeddings"}, "embedding.weight", "head.weight"),
        ({"sliding_window": 3}, "rope_frequencies", "rope_local_frequencies"),
        ({"sliding_window": 3, "global_every": 2}, "rope_local_frequencies", "head.weight"),
        ({"linear_norm": True, "ffn": "plain"}, "layers.1.up_linear_norm.weight", "layers.1.gate_linear_norm.weight"),
        ({"residual_norm": True}, "layers.1.ffn_post_norm.weight", "embedding_norm.weight"),
        ({"embedding_norm": True, "final_norm": False}, "embedding_norm.weight", "final_norm.weight"),
        ({"position": "sinusoidal", "rope_dim": 0}, "position.weight", "rope_frequencies"),
        ({"pre_norm": False}, "final_norm.weight", "layers.1.attn_norm.weight"),
        ({"sub_norm": False}, "layers.1.ffn_norm.weight", "layers.1.ffn_sub_norm.weight"),
    ],
)
def test_tensors_come_and_go_with_the_options(changes: dict[str, Any], there: str, not_there: str) -> None:
    found = names(SMALL.replace(**changes))
    assert there in found and not_there not in found


STACKS = [stack for preset in PRESETS.values() for stack in preset.stacks]


@pytest.mark.parametrize("config", [SMALL, EVERYTHING, *STACKS])
def test_order_and_shapes(config: ModelConfig) -> None:
    specs = list(expected_tensors(config))
    assert [s.key for s in specs] == sorted({s.key for s in specs})
    shapes = {s.key.name: (s.rows, s.cols) for s in specs}
    attention = config.n_heads * config.head_dim
    assert shapes["layers.0.q.weight"] == (attention, config.dim)
    assert shapes["layers.0.v.weight"] == (config.n_kv_heads * config.head_dim, config.dim)
    assert shapes["layers.0.o.weight"] == (config.dim, attention)
    assert shapes.get("layers.0.attn_sub_norm.weight") == ((1, attention) if config.sub_norm else None)
    assert shapes.get("embedding.weight") == ((config.vocab_size, config.dim) if config.vocab_size else None)
    patch = config.dim, config.channels * config.patch_size**2
    assert shapes.get("patch.weight") == (patch if config.input == "images" else None)
    assert shapes.get("pool_k.weight") == ((attention, config.dim) if config.pooling == "attention" else None)
    assert shapes.get("projector.weight") == ((config.out_dim, config.dim) if config.out_dim else None)
    assert shapes.get("rope_frequencies") == ((1, config.rope_dim // 2) if config.position == "rope" else None)
    if config is EVERYTHING:
        assert shapes["layers.0.experts.2.down_linear_norm.bias"] == (1, config.ffn_dim)
        assert shapes["layers.0.experts.2.down.bias"] == (1, config.dim)
        assert shapes["layers.0.router.weight"] == (3, config.dim)
        assert shapes["head.bias"] == (1, config.vocab_size)


# ---- stack records ----


@pytest.mark.parametrize("config", [SMALL, EVERYTHING, IMAGES, DRAFT, *STACKS])
def test_stack_record_round_trip(config: ModelConfig) -> None:
    record = pack_stack(config)
    assert len(record) == 256
    back = unpack_stack(record)
    assert pack_stack(back) == record
    other = {field for field in config.to_dict() if getattr(back, field) != getattr(config, field)}
    assert other <= {  # what only training needs, and what a float of 32 bits rounds
        "rope_theta", "weight_scale", "head_format", "dropout", "ternary", "norm_eps", "attention_scale",
        "embedding_scale", "similarity_scale", "pixel_mean", "pixel_std",
    }  # fmt: skip
    assert back.norm_eps == pytest.approx(config.norm_eps, rel=1e-7)


def test_stack_words_are_where_the_format_says() -> None:
    words = np.frombuffer(pack_stack(EVERYTHING), "<u4")
    assert words[[2, 3, 4, 5, 6, 7, 8, 9]].tolist() == [19, 24, 1, 2, 1, 8, 20, 32]
    assert words[11] == 1 and words[12] == 0b110111111 and words[16] == 3 and words[17] == 2 and words[20] == 0b1111
    assert words[15] == 4 and words[31] == 0 and words[32] == 1 and words[46] == 5
    assert words[47] == 3 | 1 << 17 | 1 << 22
    assert words[13:14].view("<f4")[0] == np.float32(1e-5) and words[29] == 8
    assert words[30] == 0 and not words[33:46].any() and pack_stack(EVERYTHING)[192:].rstrip(b"\0").decode() == "größer"


def test_words_of_images_are_where_the_format_says() -> None:
    words = np.frombuffer(pack_stack(IMAGES), "<u4")
    assert words[0] == 2 and words[12] == 0b1000101 and words[20] == 0b110010 and words[27] == 4
    assert words[33:36].tolist() == [5, 2, 2] and words[42] == 1 and words[43] == 7
    assert words[36:42].view("<f4").tolist() == [0.5, 0.25, 0, 0.5, 1, 0]
    assert words[44:46].view("<f4").tolist() == [10, -10]


# ---- writing and reading ----


def test_every_number_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "m.bitnet"
    tokenizer, template = b'{"model": {}}', "{{ messages }} \N{SNOWMAN}".encode()
    write_values(
        path, EVERYTHING, metadata={"generation": {"eos_token_ids": [7]}}, tokenizer=tokenizer, template=template
    )
    file = PackedFile.open(path)
    assert file.configs == (EVERYTHING,)
    assert file.metadata["generation"] == {"eos_token_ids": [7]} and file.metadata["format"] == "bitnet-edge"
    assert file.section(records.TOKENIZER) == tokenizer and file.section(records.TEMPLATE) == template
    for spec in expected_tensors(EVERYTHING):
        assert np.array_equal(file.values(file.tensors[spec.key]), values_of(spec))
    assert file.file_size == path.stat().st_size and file.file_size % 64 == 0
    assert os.listdir(tmp_path) == ["m.bitnet"]


def test_metadata_may_name_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9.txt")
    write_values(tmp_path / name, EVERYTHING, metadata={"provenance": {"data": [name]}})
    assert PackedFile.open(tmp_path / name).metadata["provenance"] == {"data": ["caf?.txt"]}


@pytest.mark.parametrize("scope", ["tensor", "row", "group"])
@pytest.mark.parametrize("head_format", ["int8", "f16", "f32", "ternary"])
def test_encodings_and_scopes(scope: str, head_format: str, tmp_path: Path) -> None:
    config = SMALL.replace(dim=130, ffn_dim=300, weight_scale=scope, head_format=head_format, n_layers=1)
    path = tmp_path / "m.bitnet"
    random_model(config, path, 5)
    file = PackedFile.open(path)
    assert file.configs == (config,)
    down = file.tensors[next(key for key in file.tensors if key.name == "layers.0.down.weight")]
    assert file.scales(down).size == {"tensor": 1, "row": 130, "group": 130 * 3}[scope]
    codes, values = file.codes(down), file.values(down)
    assert set(np.unique(codes)) == {-1, 0, 1}
    for row, col in ((0, 0), (129, 299), (7, 128), (64, 127)):
        index = {"tensor": 0, "row": row, "group": row * 3 + col // 128}[scope]
        assert values[row, col] == codes[row, col] * file.scales(down)[index]
    table = file.tensors[next(key for key in file.tensors if key.name == "embedding.weight")]
    assert table.encoding.name.lower().startswith(head_format)
    assert head_format != "ternary" or table.scope == encodings.SCOPE_NAMES.index(scope)


def test_group_scales_lie_by_panels(tmp_path: Path) -> None:
    config = SMALL.replace(dim=300, vocab_size=37, weight_scale="group", head_format="ternary")
    random_model(config, tmp_path / "m", 1)
    file = PackedFile.open(tmp_path / "m")
    table = file.tensors[next(key for key in file.tensors if key.name == "embedding.weight")]
    halves = np.frombuffer(file.section(records.DATA) or b"", np.float16, table.scale_size // 2, table.scale_offset)
    assert halves.size == 3 * 3 * 16
    scales = file.scales(table).reshape(37, 3)
    for row, group in itertools.product(range(48), range(3)):  # FORMAT.md: padding rows hold 1
        expected = scales[row, group] if row < 37 else 1
        assert halves[(row // 16 * 3 + group) * 16 + row % 16] == expected
    assert len(np.unique(scales)) > 50


def test_group_scales_are_stored_exactly_or_not_at_all(tmp_path: Path) -> None:
    config = SMALL.replace(weight_scale="group", n_layers=1)
    for value, fits in ((2.0**-24, True), (65504.0, True), (1 / 3, False), (65520.0, False), (2.0**-25, False)):
        scales = np.full(16, value, np.float32)
        tensor = Encoded(encodings.TERNARY_2BIT, encodings.SCALE_GROUP, np.full(128, 0x55, np.uint8), scales)
        source = swap("layers.0.q.weight", lambda s, tensor=tensor: tensor)
        if fits:
            write_packed(tmp_path / "m", [config], source)
            file = PackedFile.open(tmp_path / "m")
            q = file.tensors[next(key for key in file.tensors if key.name == "layers.0.q.weight")]
            assert np.array_equal(file.scales(q), scales)
        else:
            with pytest.raises(ValueError, match=r"layers\.0\.q\.weight: a group scale is .*, which fp16"):
                write_packed(tmp_path / "n", [config], source)
    assert os.listdir(tmp_path) == ["m"]


def test_several_stacks(tmp_path: Path) -> None:
    encoder = SMALL.replace(
        name="vision", input="embeddings", vocab_size=0, has_head=False, tie_embeddings=False, mask="bidirectional",
        position="learned", rope_dim=0,
    )  # fmt: skip
    path = tmp_path / "m.bitnet"
    write_packed(path, [encoder, SMALL], lambda spec: Encoded.f32(values_of(spec)))
    file = PackedFile.open(path)
    assert file.configs == (encoder, SMALL)
    assert {key.stack for key in file.tensors} == {0, 1}


def test_a_file_without_metadata_still_has_its_configuration() -> None:
    file = PackedFile(with_section(packed_bytes(), records.METADATA, b""))
    assert file.metadata == {}
    assert pack_stack(file.configs[0]) == pack_stack(SMALL)


def test_writing_holds_one_tensor_in_memory(tmp_path: Path) -> None:
    """A 190 MB model within 100 MB beyond the interpreter: its largest tensor has 33 MB."""
    script = """
import resource, sys
from bitnet.presets import PRESETS
from bitnet_export import random_model
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
random_model(PRESETS["bitnet-2b4t"].replace(n_layers=9, vocab_size=12_800), sys.argv[1])
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    path = tmp_path / "m.bitnet"
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=True)
    assert path.stat().st_size > 180e6
    assert int(done.stdout) < 100_000  # kB


def all_right(file: PackedFile, expected: dict[records.Key, bytes]) -> bool:
    return all(file.stored(record).tobytes() == expected[key] for key, record in file.tensors.items())


@pytest.fixture
def many(tmp_path: Path) -> tuple[PackedFile, dict[records.Key, bytes]]:
    (tmp_path / "m").write_bytes(packed_bytes())
    file = PackedFile.open(tmp_path / "m")
    return file, {key: file.stored(record).tobytes() for key, record in file.tensors.items()}


def test_threads_read_one_file_at_once(many: tuple[PackedFile, dict[records.Key, bytes]]) -> None:
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(lambda _: all_right(*many), range(200)))


def test_a_forked_process_reads_on(many: tuple[PackedFile, dict[records.Key, bytes]]) -> None:
    """It and its parent have one open file between them."""
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            os._exit(not all(all_right(*many) for _ in range(1000)))
        children.append(child)
    here = all(all_right(*many) for _ in range(1000))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0] and here


def test_a_read_in_parts_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux gives at most 2 GiB at once, a network file system less."""
    (tmp_path / "m").write_bytes(packed_bytes())
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: preadv(fd, [buffers[0][:1000]], at))
    file, whole = PackedFile.open(tmp_path / "m"), PackedFile(packed_bytes())
    assert all_right(file, {key: whole.stored(record).tobytes() for key, record in whole.tensors.items()})


# ---- small print ----


def test_crc_is_that_of_zlib() -> None:
    for section in PackedFile(packed_bytes()).sections:
        assert section.crc == zlib.crc32(packed_bytes()[section.offset : section.offset + section.size])


def test_import_needs_numpy_alone(tmp_path: Path) -> None:
    script = """
import sys
for name in ("torch", "safetensors", "tokenizers", "bitnet_runtime"):
    sys.modules[name] = None
import bitnet_export
from bitnet.presets import PRESETS
bitnet_export.random_model(PRESETS["mini-gpt"], sys.argv[1])
print(len(bitnet_export.PackedFile.open(sys.argv[1]).tensors))
"""
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "m"], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 58


def test_every_encoding_is_one_row() -> None:
    table = encodings.ENCODINGS.values()
    assert [row.number for row in table] == sorted({row.number for row in table})
    assert len({row.name for row in table}) == len(table)
    assert set(encodings.TABLES) == set(CHOICES["head_format"])
    assert all(encodings.TABLES[word].allows("table", "head", 7) for word in encodings.TABLES)
    root = Path(__file__).parents[1]
    assert all(f"| {row.number} | {row.name} |" in (root / "export" / "FORMAT.md").read_text() for row in table)
    (engine,) = (root / "runtime_c" / "src").rglob("encodings.h")
    assert re.findall(r"BN_(\w+) = (\d+),?\n", engine.read_text()) == [(row.name, str(row.number)) for row in table]
