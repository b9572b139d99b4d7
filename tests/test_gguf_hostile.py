"""Damaged and malicious GGUF files: a result or one clear error, and nothing written."""

import random
import struct

import numpy as np
import pytest

import gguf_models as models
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.gguf.container import MAX_ELEMENTS, Gguf
from bitnet_export.foreign.gguf.read import open_gguf
from bitnet_export.foreign.source import SourceError
from gguf_models import F16, F32, I2_S, IQ2_BN_R4, Q2_0, TQ2_0, container


@pytest.fixture
def made(tmp_path):
    return models.example(tmp_path / "m.gguf", "bitnet-b1.58", F16, unit=26)


def refused(path, message):
    """The file is refused, with a message that names the file and what is wrong."""
    with pytest.raises(SourceError, match=message) as caught, open_source(path):
        pass
    assert str(path) in str(caught.value) and len(str(caught.value)) < 600


def header(tensors, pairs, rest=b"", version=3):
    return (b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + rest).ljust(60, b"\0")


def string(text):
    return struct.pack("<Q", len(text)) + text


HUGE = (1 << 64) - 1
BOMBS = {
    "tensors": (header(HUGE, 0), "the number of tensors is 18446744073709551615"),
    "tensors that fit no file": (header(1 << 40, 0), "the number of tensors is"),
    "pairs": (header(0, HUGE), "the number of metadata pairs is"),
    "key": (header(0, 1, struct.pack("<Q", HUGE)), "metadata key 0 has 18446744073709551615 bytes"),
    "long key": (header(0, 1, struct.pack("<Q", 60_000)), "metadata key 0 takes 60000 bytes"),
    "string": (header(0, 1, string(b"a") + struct.pack("<IQ", 8, 1 << 63)), "a has 9223372036854775808 bytes"),
    "array": (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 0, 1 << 62)), "the length of a is"),
    "array of strings": (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 8, 1 << 60)), "the length of a is"),
    "nested array": (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 9, 1)), "array of arrays"),
    "type": (header(0, 1, string(b"a") + struct.pack("<I", 13)), "a is of type 13"),
    "array type": (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 77, 1)), "array of type 77"),
    "bools": (header(0, 1, string(b"a") + struct.pack("<IIQ", 9, 7, 2) + b"\1\2"), "bool with value 2"),
    "bool": (header(0, 1, string(b"a") + struct.pack("<IB", 7, 2)), "bool with value 2"),
    "not UTF-8": (header(0, 1, string(b"\xff\xfe")), "metadata key 0 is not UTF-8"),
    "version 1": (header(0, 0, version=1), "version is 1"),
    "version 4": (header(0, 0, version=4), "version is 4"),
    "big-endian": (header(0, 0, version=0x03000000), "big-endian"),
    "nothing": (header(0, 0), "general.architecture is None"),
    "five dimensions": (header(1, 0, string(b"t") + struct.pack("<I", 5)), "5 dimensions|takes"),
    "magic alone": (b"GGUF", "the version takes 4 bytes"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(name, tmp_path):
    content, message = BOMBS[name]
    path = tmp_path / "bomb.gguf"
    path.write_bytes(content)
    refused(path, message)


def test_arrays_are_limited_all_together(tmp_path):
    path, half = tmp_path / "m.gguf", MAX_ELEMENTS // 2 + 1
    pair = struct.pack("<IIQ", 9, 0, half) + bytes(half)
    path.write_bytes(header(0, 2)[:24] + string(b"a") + pair + string(b"b") + pair)
    refused(path, f"the length of b is {half}, expected at most {half - 2}")


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"t": (F32, (1 << 40, 1 << 40), b"")}, r"expected a vector or a matrix"),
        ({"t": (F32, (2, 3, 4), bytes(96))}, r"shape \[2, 3, 4\], expected a vector or a matrix"),
        ({"t": (F32, (0, 4), b"")}, "expected a vector or a matrix"),
        ({"t": (F32, (1 << 30, 1 << 30), b"")}, "ends at .* the file at"),
        ({"t": (11, (4, 256), bytes(440))}, r"type 11 \(Q3_K\) is not read, expected one of F32"),
        ({"t": (9999, (4, 256), bytes(440))}, r"type 9999 \(unknown\)"),
        ({"t": (I2_S, (4, 64), bytes(96))}, "rows of I2_S have 64 weights, expected a multiple of 128"),
        ({"t": (TQ2_0, (4, 128), bytes(132))}, "rows of TQ2_0 have 128 weights, expected a multiple of 256"),
        ({"t": (IQ2_BN_R4, (6, 64), bytes(120))}, "IQ2_BN_R4 has 6 rows, expected a multiple of 4"),
        ({"t": (Q2_0, (1, 128), bytes(36))}, "too small to tell"),
        ({"t": (Q2_0, (1, 100), bytes(36))}, "rows of Q2_0 have 100 weights, expected a multiple of 64"),
        ({"t" * 65: (F32, (4,), bytes(16))}, "the name of tensor 0 has 65 bytes, expected at most 64"),
        ({"t": (F32, (8,), bytes(32)), "u": (F32, (8,), bytes(64))}, "the last tensor ends at"),
        ({"t": (F32, (8,), bytes(64)), "u": (F32, (8,), bytes(32))}, "u is at 64, expected at 32"),
    ],
)
def test_tensor_table(tensors, message, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(container({"general.architecture": "llama"}, tensors))
    refused(path, message)


def test_names_and_keys_twice(made):
    content = made.path.read_bytes()
    made.path.write_bytes(content.replace(b"blk.1.attn_q.weight", b"blk.0.attn_q.weight"))
    refused(made.path, "tensor blk.0.attn_q.weight occurs twice")
    made.path.write_bytes(content.replace(b"bitnet-b1.58.block_count", b"bitnet-b1.58.head_countX"))
    refused(made.path, "metadata has no key bitnet-b1.58.block_count")
    pair = string(b"a") + struct.pack("<IB", 0, 1)
    made.path.write_bytes(header(0, 2, pair + pair))
    refused(made.path, "metadata key a occurs twice")


def test_overlap(made):
    """Two tensors in one place."""
    content = made.path.read_bytes()
    name = b"blk.1.attn_k.weight"
    at = content.index(name) + len(name) + 4 + 16 + 4
    made.path.write_bytes(content[:at] + struct.pack("<Q", 0) + content[at + 8 :])
    refused(made.path, "tensor blk.1.attn_k.weight is at 0, expected at")


P = "bitnet-b1.58."


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gpt2"}, "'gpt2', expected one of bitnet, "),
        ({"general.architecture": "x\0" * 4000}, "expected one of bitnet, "),
        ({"general.architecture": 3}, "expected one of bitnet, "),
        ({"general.alignment": 48}, "general.alignment is 48, expected a power of two"),
        ({"general.alignment": 64}, "expected at"),
        ({"split.count": 2}, "one part of several"),
        ({P + "block_count": 4}, "tensor blk.3.attn_norm.weight is missing"),
        ({P + "block_count": 2}, "tensor 'blk.2.* is there"),
        ({P + "block_count": 1 << 31}, "n_layers is 2147483648"),
        ({P + "block_count": 1.5}, "block_count is 1.5, expected int"),
        ({P + "context_length": 0}, "max_context is 0"),
        ({P + "embedding_length": "x"}, "embedding_length is 'x', expected int"),
        ({P + "embedding_length": 80}, "has shape"),
        ({P + "attention.head_count": 0}, "head_count is 0"),
        ({P + "attention.head_count": [3, 3, 1]}, "differs between layers"),
        ({P + "attention.head_count": []}, "differs between layers"),
        ({P + "attention.head_count_kv": 2}, "n_heads is 3, expected a multiple"),
        ({P + "attention.value_length": 24}, "values have 24 dimensions and keys 26"),
        ({P + "attention.layer_norm_rms_epsilon": float("nan")}, "norm_eps is nan"),
        ({P + "rope.freq_base": -1.0}, "rope.freq_base is -1.0"),
        ({P + "rope.freq_base": 1.0, P + "rope.scaling.type": "yarn"}, "rope.freq_base is 1.0, expected .* above 1"),
        ({P + "rope.scaling.factor": float("inf")}, "rope.scaling.factor is inf"),
        ({P + "rope.dimension_count": 25}, "rope_dim is 25"),
        ({P + "rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope', expected none, linear or yarn"),
        ({P + "rope.scaling.type": "yarn", P + "rope.scaling.factor": float("nan")}, "factor is nan"),
        ({P + "rope.scaling.type": "yarn", P + "rope.scaling.factor": 0.5}, "factor is 0.5, expected at least 1"),
        (
            {
                P + "rope.scaling.type": "yarn",
                P + "rope.scaling.factor": 4.0,
                P + "rope.scaling.yarn_log_multiplier": 0.5,
            },
            "yarn_log_multiplier is 0.5, expected no such key",
        ),
        (
            {
                P + "rope.scaling.type": "yarn",
                P + "rope.scaling.factor": 4.0,
                P + "rope.scaling.original_context_length": 0,
            },
            "original_context_length is 0, expected 1 to",
        ),
        ({P + "rope.scaling.type": "linear", P + "rope.scaling.factor": -2.0}, "factor is -2.0"),
        ({P + "rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5 with type = 'linear', expected 1 or type = 'yarn'"),
        ({P + "expert_count": 8}, "expert_count is 8, expected 0"),
        ({P + "attention.sliding_window": 512}, "sliding_window is 512"),
        ({P + "hidden_activation": "mish"}, "'mish', expected one of relu2"),
        ({P + "pooling_type": 4}, "pooling_type is 4"),
        ({"tokenizer.ggml.tokens": ["x"] * 132}, "has 132 tokens, token_embd.weight has 131 rows"),
    ],
)
def test_metadata(keys, message, made):
    made.metadata |= keys
    made.write()
    refused(made.path, message)


def test_tensors_that_do_not_fit(made):
    original = dict(made.tensors)

    def check(changes, message):
        made.tensors = {**original, **changes}
        made.tensors = {name: tensor for name, tensor in made.tensors.items() if tensor}
        made.write()
        refused(made.path, message)

    check({"token_embd.weight": None}, "token_embd.weight is missing")
    check({"blk.1.ffn_sub_norm.weight": None}, "tensor blk.1.ffn_sub_norm.weight is missing")
    check({"blk.0.attn_q_norm.weight": (F32, (26,), bytes(104))}, "'blk.0.attn_q_norm.weight' is there")
    check({"blk.0.attn_q.scale": (F32, (1,), bytes(4))}, "'blk.0.attn_q.scale' is there")
    check({"output_norm.weight": (F32, (77,), bytes(308))}, r"output_norm.weight has shape \[77\]")
    noise = np.random.default_rng(0).normal(0, 1, (78, 78)).astype(np.float16)
    floats = r"attn_q.weight \(f16\) is not ternary, .*; convert a model of floats from its Hugging Face folder"
    check({"blk.0.attn_q.weight": (F16, (78, 78), noise.tobytes())}, floats)
    tiny = np.where(noise > 0, np.float32(1e-40), 0).astype(np.float32)
    check({"blk.0.attn_q.weight": (F32, (78, 78), tiny.tobytes())}, "attn_q.weight: a scale is NaN, infinite or too")


def test_numbers_of_another_kind_that_mean_the_same(made):
    """A number for each layer, a whole number where a float is called for, a file that is no file."""
    made.metadata |= {P + "attention.head_count": [3, 3, 3], P + "attention.layer_norm_rms_epsilon": 1}
    made.write()
    with open_source(made.path) as source:
        assert (source.config.n_heads, source.config.norm_eps) == (3, 1.0)
    with pytest.raises(SourceError, match="the file begins with b'GGUX', expected b'GGUF'"):
        Gguf(b"GGUX" + made.path.read_bytes()[4:])
    made.path.write_bytes(b"")
    with pytest.raises(SourceError, match="is empty, expected a GGUF file"), open_gguf(made.path):
        pass


def test_a_table_of_rope_factors(tmp_path):
    """In llama-arch files with Llama 3's scaling: its factors, or all 1, and nothing else."""
    made = models.example(tmp_path / "m.gguf", "llama", F16, unit=26)
    for factors, message in (
        (np.ones(13), ""),
        (np.ones(12), r"rope_freqs.weight has shape \[12\], expected \[13\] floats"),
        (np.linspace(1, 8, 13), "does not hold the factors of Llama 3's RoPE scaling"),
        (np.full(13, np.nan), "does not hold the factors"),
    ):
        made.tensors["rope_freqs.weight"] = (F32, factors.shape, factors.astype(np.float32).tobytes())
        made.write()
        if message:
            refused(made.path, message)
            continue
        with open_source(made.path) as source:
            assert source.config.rope_scaling == "none"
    for more in ({"factor": 2.0}, {"type": "linear", "factor": 2.0}, {"type": "yarn"}):
        made.metadata |= {f"llama.rope.scaling.{key}": value for key, value in more.items()}
        made.write()
        refused(made.path, "RoPE is scaled twice, by llama.rope.scaling.type = .* and by the tensor rope_freqs.weight")


def test_a_scale_beside_a_matrix_with_a_bias(tmp_path):
    """llama.cpp would multiply the bias of the FFN too."""
    made = models.example(tmp_path / "m.gguf", "llama", F16, unit=26)
    for layer in range(3):
        for role in ("gate", "up", "down"):
            rows = made.tensors[f"blk.{layer}.ffn_{role}.weight"][1][0]
            made.tensors[f"blk.{layer}.ffn_{role}.bias"] = (F32, (rows,), bytes(4 * rows))
    made.tensors["blk.0.ffn_up.scale"] = (F32, (1,), np.ones(1, np.float32).tobytes())
    made.write()
    refused(made.path, "tensor blk.0.ffn_up.scale would multiply a bias too")


def test_codes_and_scales_that_are_not_ternary(tmp_path):
    made = models.example(tmp_path / "m.gguf", "bitnet-b1.58", I2_S, unit=128)
    number, shape, data = made.tensors["blk.0.attn_q.weight"]
    for place, value, message in (
        (7, b"\xff", "attn_q.weight: I2_S has code 3"),
        (len(data) - 32, struct.pack("<f", float("nan")), "attn_q.weight: a scale is NaN"),
        (len(data) - 32, struct.pack("<f", 1e-42), "attn_q.weight: a scale is NaN, infinite or too small"),
    ):
        wrong = data[:place] + value + data[place + len(value) :]
        made.tensors["blk.0.attn_q.weight"] = (number, shape, wrong)
        made.write()
        refused(made.path, message)


def test_tensors_of_the_wrong_kind(tmp_path):
    made = models.example(tmp_path / "m.gguf", "bitnet", TQ2_0, unit=256)
    norm = made.tensors["output_norm.weight"]
    made.tensors["output_norm.weight"] = (TQ2_0, norm[1], bytes(66 * 3))
    made.write()
    refused(made.path, "output_norm.weight is TQ2_0, expected floats")
    made.tensors["output_norm.weight"] = norm
    made.tensors["token_embd.scale"] = (F32, (1,), bytes(4))
    made.write()
    refused(made.path, "'token_embd.scale' is there")


def test_scale_tensors_that_are_none(tmp_path):
    made = models.example(tmp_path / "m.gguf", "bitnet", F16, unit=26)
    for shape, value in (((1,), 0.0), ((1,), -1.0), ((1,), float("inf")), ((2,), 1.0)):
        made.tensors["blk.0.attn_q.scale"] = (F32, shape, np.full(shape, value, np.float32).tobytes())
        made.write()
        refused(made.path, "blk.0.attn_q.scale is not one finite number above 0")


def test_groups_of_64_with_scales_of_their_own(tmp_path):
    made = models.example(tmp_path / "m.gguf", "qwen3", Q2_0, unit=64, scope="row")
    number, shape, data = made.tensors["blk.0.ffn_down.weight"]
    made.tensors["blk.0.ffn_down.weight"] = (number, shape, np.float16(9).tobytes() + data[2:])
    made.write()
    refused(made.path, r"blk.0.ffn_down.weight: scales differ within 128 weights \(one for each 64\)")


def outcome(path, content, out):
    """Whether a file is converted; the only other way is one SourceError, and nothing written."""
    path.write_bytes(content)
    try:
        with open_source(path) as source:
            pack_source(source, out, head="f32")
    except SourceError:
        assert not out.exists()
        return False
    out.unlink()
    return True


def tiny(path):
    return models.example(path, "llama", F16, unit=4, ffn=6, biases=True)


def test_every_truncation_of_the_head(tmp_path):
    """Up to the first tensor at each byte; in the data at some."""
    made = tiny(tmp_path / "m.gguf")
    content = made.path.read_bytes()
    data = min(entry.start for entry in Gguf(content).tensors.values())
    for size in [*range(0, data, 3), *range(data, len(content), len(content) // 50)]:
        assert not outcome(made.path, content[:size], tmp_path / "o.bitnet"), size


def test_flipped_bytes(tmp_path):
    made, rng = tiny(tmp_path / "m.gguf"), random.Random(0)
    content = made.path.read_bytes()
    data = min(entry.start for entry in Gguf(content).tensors.values())
    results = set()
    for _ in range(600):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3))):
            changed[rng.randrange(data if rng.random() < 0.8 else len(content))] = rng.choice(
                (0, 1, 255, rng.randrange(256))
            )
        results.add(outcome(made.path, bytes(changed), tmp_path / "o.bitnet"))
    assert results == {True, False}
