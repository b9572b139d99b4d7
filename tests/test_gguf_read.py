"""Reading GGUF files: every type and architecture gives the right codes, scales and logits."""

import gguf
import numpy as np
import pytest
import torch

import gguf_models as models
from bitnet_export import PackedFile
from bitnet_export.checkpoint.verify import LOSS
from bitnet_export.convert.incoming import convert, open_source, pack_source
from bitnet_export.foreign.gguf.container import Gguf
from bitnet_export.foreign.gguf.types import TYPES
from bitnet_export.packed.encodings import SCOPE_NAMES
from bitnet_export.packed.records import NONE, ROLE, Key
from bitnet_runtime import Model
from gguf_models import (
    BF16,
    F16,
    F32,
    I2_S,
    IQ1_BN,
    IQ2_BN,
    IQ2_BN_R4,
    PQ2_0,
    Q2_0,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
)  # fmt: skip

torch.set_num_threads(1)

TERNARY = [
    (I2_S, 128, "tensor"), (TQ1_0, 256, "tensor"), (TQ2_0, 256, "tensor"), (TQ2_0, 256, "row"),
    (IQ1_BN, 64, "tensor"), (IQ1_BN, 64, "row"), (IQ2_BN, 64, "row"), (IQ2_BN_R4, 64, "row"),
    (Q2_0, 128, "group"), (Q2_0, 64, "row"), (PQ2_0, 128, "group"),
    (F32, 25, "group"), (F16, 25, "row"), (BF16, 25, "tensor"), (F16, 70, "group"),
]  # fmt: skip


def name_of(case):
    return "-".join(TYPES[case[0]].name if i == 0 else str(part) for i, part in enumerate(case))


RANDOM = np.random.default_rng(7)


@pytest.mark.parametrize("number", [Q4_0, Q8_0, Q4_K, Q6_K, BF16, F16, F32, TQ1_0, TQ2_0])
def test_blocks_as_the_gguf_package_reads_them(number):
    """Bit for bit, also of bytes that no quantizer writes."""
    kind, rows, cols = TYPES[number], 5, 768
    data = RANDOM.integers(0, 256, (rows, kind.tensor_size((rows, cols)) // rows), np.uint8)
    if number == TQ2_0:
        data &= ~(data >> 1 & 0x55)  # no code 3
    for place in {Q4_0: (0,), Q8_0: (0,), Q4_K: (0, 2), Q6_K: (208,), TQ1_0: (52,), TQ2_0: (64,)}.get(number, ()):
        scales = RANDOM.uniform(0.01, 1, (rows, cols // kind.block)).astype(np.float16)
        if number in (TQ1_0, TQ2_0):
            scales[:] = scales[:, :1]
        data.reshape(rows, -1, kind.size)[:, :, place : place + 2] = scales.view(np.uint8).reshape(rows, -1, 2)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType(number))
    tensor = kind.tensor(lambda start, size: data.reshape(-1)[start : start + size], (rows, cols))
    found = models.dense(*tensor) if kind.codes else np.concatenate([tensor.rows(0, 2), tensor.rows(2, 5)])
    assert found.dtype == np.float32 and np.array_equal(found, expected, equal_nan=True)


def check_weights(made, file):
    """Every code and scale in the packed file is the one that was written."""
    packed, seen = PackedFile.open(file), 0
    for key, record in packed.tensors.items():
        if key.name in made.codes:
            seen += 1
            expected = made.scales[key.name]
            if expected.ndim == 2 and expected.shape[1] == 1:
                expected = expected[:, 0]  # one group a row
            assert SCOPE_NAMES[record.scope] == {1: "tensor"}.get(expected.size, ("", "row", "group")[expected.ndim])
            assert np.array_equal(packed.codes(record), made.codes[key.name]), key.name
            assert np.array_equal(packed.scales(record).reshape(expected.shape), expected), key.name
    assert seen == len(made.codes) == 21


@pytest.mark.parametrize("case", TERNARY, ids=name_of)
def test_codes_and_scales(case, tmp_path):
    number, unit, scope = case
    arch = "llama" if unit % 2 == 0 and number != TQ2_0 else "bitnet-b1.58"
    made = models.example(
        tmp_path / "m.gguf", arch, number, unit=unit, scope=scope, head_dim=unit + unit % 2, seed=number
    )
    with open_source(made.path) as source:
        assert source.config.weight_scale == ("row" if scope == "group" and unit * 5 <= 128 else scope)
        pack_source(source, tmp_path / "m.bitnet", head="f32")
    check_weights(made, tmp_path / "m.bitnet")


# ---- the arithmetic: log-probabilities against transformers ----


def text(vocab, n, seed):
    return np.random.default_rng(seed).integers(0, vocab, n)


def scores(model, rows):
    """log p(token | those before it) in torch: (n, T - 1), in the model's own precision."""
    tokens = torch.from_numpy(rows)
    with torch.inference_mode():
        logits = model(input_ids=tokens[:, :-1]).logits.double()
    return (logits.gather(-1, tokens[:, 1:, None])[..., 0] - logits.logsumexp(-1)).numpy()


def engine_scores(file, rows):
    with Model.load(file, kv_type="f32") as engine, engine.session() as session:
        found = []
        for row in rows:
            session.reset()
            found.append(session.score(row.tolist())[1:])
    return np.array(found)


def check_logits(made, kind, tmp_path):
    """Design §10, the noise floor: exact where no activation changed its code, else like fp32 against fp64."""
    with open_source(made.path) as source:
        pack_source(source, tmp_path / "m.bitnet", head="f32")
    check_weights(made, tmp_path / "m.bitnet")
    reference = made.transformer(kind)
    vocab = made.hf["vocab_size"]
    short, long = text(vocab, 8 * 32, 1).reshape(-1, 8), text(vocab, 1600, 2).reshape(-1, 40)
    difference = np.abs(engine_scores(tmp_path / "m.bitnet", short) - scores(reference, short)).max(axis=1)
    assert np.median(difference) < 1e-5  # fp32 noise; half of the prompts have no rounding event at all
    engine, single = engine_scores(tmp_path / "m.bitnet", long), scores(reference, long)
    ours = np.abs(engine - single).mean(axis=1)
    floor = np.abs(single - scores(models.in_fp64(reference), long)).mean(axis=1)
    error = 2 * np.sqrt((ours.var() + 1.5**2 * floor.var()) / len(long))  # of both means: most texts have no such event
    assert ours.mean() <= 1.5 * floor.mean() + error


LOGITS = {
    "bitnet-b1.58": ("bitnet-b1.58", I2_S, 128, "tensor", "BitNet", {"hidden_act": "relu2"}, {}),
    "bitnet-25": ("bitnet-25", TQ2_0, 256, "tensor", "BitNet", {"hidden_act": "relu2"}, {}),
    "bitnet": ("bitnet", IQ2_BN, 64, "row", "BitNet", {"hidden_act": "silu"}, {}),
    "llama": ("llama", IQ1_BN, 64, "row", "Llama", {}, {"tied": False}),
    "llama-group": ("llama", F16, 70, "group", "Llama", {}, {"biases": True}),
    "qwen3": ("qwen3", Q2_0, 128, "group", "Qwen3", {}, {}),
}


@pytest.mark.parametrize("name", LOGITS)
def test_logits(name, tmp_path):
    arch, number, unit, scope, kind, hf, options = LOGITS[name]
    made = models.example(tmp_path / "m.gguf", arch, number, unit=unit, scope=scope, **options)
    made.hf |= hf
    check_logits(made, kind, tmp_path)


# ---- tables, scales beside the weights, embedding models ----


def small(tmp_path, arch="llama", number=F16, **options):
    """An example of odd sizes, cheap to write, and its Source's configuration and assumptions."""
    made = models.example(tmp_path / "m.gguf", arch, number, unit=26, **options)
    with open_source(made.path) as source:
        return made, source


def test_scale_tensors_multiply(tmp_path):
    made, _ = small(tmp_path, "bitnet")
    made.tensors["blk.0.attn_q.scale"] = (F32, (1,), np.float32([2.5]).tobytes())
    made.write()
    with open_source(made.path) as source:
        found, other = (source.load(Key(0, layer, ROLE["q"], NONE, 0)) for layer in (0, 1))
    assert np.array_equal(found.codes, made.codes["layers.0.q.weight"])
    assert np.array_equal(found.scales, made.scales["layers.0.q.weight"] * np.float32(2.5))
    assert np.array_equal(other.scales, made.scales["layers.1.q.weight"])


def test_a_head_stored_twice_is_tied(tmp_path):
    made, source = small(tmp_path, tied=False)
    assert not source.config.tie_embeddings
    made.tensors["output.weight"] = made.tensors["token_embd.weight"]
    made.write()
    with open_source(made.path) as source:
        assert source.config.tie_embeddings


@pytest.mark.parametrize("group", [64, 128])
def test_q2_0_of_both_groups(group, tmp_path):
    """One type id, two layouts, distinguished by the offsets of the tensors."""
    made, _ = small(tmp_path, "qwen3")
    made = models.example(made.path, "qwen3", Q2_0 if group == 64 else PQ2_0, unit=128, scope="group")
    made.tensors = {name: (Q2_0 if n == PQ2_0 else n, *rest) for name, (n, *rest) in made.tensors.items()}
    made.write()
    with open_source(made.path) as source:
        found = source.load(Key(0, 2, ROLE["down"], NONE, 0))
    assert np.array_equal(found.codes, made.codes["layers.2.down.weight"])
    assert np.array_equal(found.scales, made.scales["layers.2.down.weight"])


def test_tables_are_the_gguf_packages(tmp_path):
    """An embedding in Q8_0 and a head in Q8_0, whose rows the packed file has as the package dequantizes them."""
    made = models.example(tmp_path / "m.gguf", "llama", IQ2_BN, unit=64, scope="row", table=Q8_0, tied=False)
    with open_source(made.path) as source:
        pack_source(source, tmp_path / "m.bitnet", head="f32")
    packed = PackedFile.open(tmp_path / "m.bitnet")
    for role, name in (("embedding", "token_embd.weight"), ("head", "output.weight")):
        _, shape, data = made.tensors[name]
        rows = np.frombuffer(data, np.uint8).reshape(shape[0], -1)
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(packed.values(packed.tensors[Key(0, NONE, ROLE[role], NONE, 0)]), expected)


def test_ternary_tables_stay_ternary(tmp_path):
    """As in Ternary-Bonsai, whose embedding has the type of the linear layers."""
    made = models.example(tmp_path / "m.gguf", "qwen3", PQ2_0, unit=128, scope="group")
    codes = RANDOM.integers(-1, 2, (131, 384)).astype(np.int8)
    codes[:, ::32] = 1
    scales = RANDOM.uniform(0.5, 1.5, (131, 3)).astype(np.float16).astype(np.float32)
    made.tensors["token_embd.weight"] = (PQ2_0, codes.shape, models.encoded(PQ2_0, codes, scales))
    made.write()
    with open_source(made.path) as source:
        pack_source(source, tmp_path / "m.bitnet")
    packed = PackedFile.open(tmp_path / "m.bitnet")
    record = packed.tensors[Key(0, NONE, ROLE["embedding"], NONE, 0)]
    assert np.array_equal(packed.codes(record), codes)
    assert np.array_equal(packed.scales(record).reshape(scales.shape), scales)


def test_an_embedding_model(tmp_path):
    """A norm before every projection and one vector a text, as microsoft/BitNet writes its Qwen3 models."""
    made, _ = small(tmp_path, "qwen3")
    norms = {}
    for layer in range(3):
        for role, name in models.GGUF_NAMES.items():
            width = made.codes[f"layers.{layer}.{role}.weight"].shape[1]
            norms[f"layers.{layer}.{role}_linear_norm.weight"] = values = RANDOM.uniform(0.5, 2, width).astype(
                np.float32
            )
            made.tensors[f"blk.{layer}.{name}_norm_in.weight"] = (F32, values.shape, values.tobytes())
    made.metadata["qwen3.pooling_type"] = 3
    made.write()
    with open_source(made.path) as source:
        config = source.config
        pack_source(source, tmp_path / "m.bitnet")
    assert (config.pooling, config.has_head, config.linear_norm) == ("last", False, True)
    check_weights(made, tmp_path / "m.bitnet")
    packed = PackedFile.open(tmp_path / "m.bitnet")
    found = {key.name: packed.values(record) for key, record in packed.tensors.items() if key.name in norms}
    assert all(np.array_equal(found[name].reshape(-1), values) for name, values in norms.items())


def test_an_embedding_model_whose_vectors_have_another_mean(tmp_path):
    """Rounding moves all numbers of a text, so that of two right programs they have not the same mean."""
    made = models.example(tmp_path / "m.gguf", "qwen3", TQ2_0, unit=256, seed=14)
    made.metadata["qwen3.pooling_type"] = 3
    made.write()
    long = convert(made.path, tmp_path / "m.bitnet").checked.long
    assert abs(long.loss_engine - long.loss_torch) > LOSS + 3 * long.loss_error


def test_a_file_of_the_gguf_package(tmp_path):
    """The container as gguf-py writes it, with every kind of value, and the same values as its reader finds."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 65_000)
    writer.add_int16("a.i16", -3000)
    writer.add_int32("a.i32", -(1 << 30))
    writer.add_uint64("a.u64", 1 << 60)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 1e300)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "größe\n")
    writer.add_array("a.strings", ["", "x", "é"])
    writer.add_array("a.numbers", [1, 2, -3])
    writer.add_array("a.floats", [0.5, -2.0])
    values = {"m": RANDOM.normal(0, 1, (3, 512)).astype(np.float32), "v": RANDOM.normal(0, 1, 7).astype(np.float32)}
    for name, value in values.items():
        writer.add_tensor(name, value)
    packed = gguf.quants.quantize(values["m"], gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("q", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = Gguf(path.read_bytes())
    for key, there in gguf.GGUFReader(path).fields.items():
        if not key.startswith("GGUF."):
            assert found.metadata[key] == there.contents()
    assert found.tensors["m"].shape == (3, 512) and found.tensors["v"].shape == (7,)
    assert all(np.array_equal(found.tensor(name).all(), value) for name, value in values.items())
    expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(found.tensor("q").all(), expected)
