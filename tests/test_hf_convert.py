"""Full-precision Hugging Face folders converted: the engine gives what `transformers` gives."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoModel, AutoModelForCausalLM

import hf_families
from bitnet_cli import main
from bitnet_export import PackedFile
from bitnet_export.checkpoint.verify import VerificationError
from bitnet_export.convert.incoming import convert, open_source, pack_source
from bitnet_export.foreign.hf.write import write_folder
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import encodings, records
from bitnet_runtime import Model

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##s", "a", "b"]
LINEARS = {records.ROLE[role] for role in ("q", "k", "v", "o", "gate", "up", "down")}


def stored(path: Path) -> set[str]:
    tensors = PackedFile.open(path).tensors.values()
    return {record.encoding.name for record in tensors if record.key.role in LINEARS and record.key.part == 0}


def engine(path: Path, tokens: torch.Tensor, **options: Any) -> np.ndarray[Any, Any]:
    """Logits (n, T, V); of a model without a head the vectors of the texts (n, D)."""
    with Model.load(path, kv_type="f32", **options) as model:
        if not PackedFile.open(path).configs[0].has_head:
            return model.embed(tokens.tolist())
        rows = []
        for text in tokens.tolist():
            with model.session(n_ctx=len(text)) as session:
                rows.append(session.append(text, "all"))
    return np.array(rows)


@pytest.mark.parametrize("name", hf_families.MAKE)
def test_the_engine_gives_what_transformers_gives(name: str, tmp_path: Path) -> None:
    """The weights are numbers that f16 holds, so that nothing but the order of sums differs."""
    theirs = hf_families.save(name, tmp_path / "model")
    report = convert(tmp_path / "model", tmp_path / "m.bitnet", head="f32", tokens=100)
    assert stored(tmp_path / "m.bitnet") == {"F16"} and report.checked.ternary_weights == 0
    assert "nothing of it is ternary" in str(report) and "nothing is ternary, linear layers are F16" in str(report)
    assert "f32, as published" in str(report)
    tokens = hf_families.tokens_of(3, 41)
    expected = hf_families.result(theirs, tokens).numpy()
    if hf_families.is_encoder(name):
        expected = expected.mean(1) / np.linalg.norm(expected.mean(1), axis=-1, keepdims=True)
    found = engine(tmp_path / "m.bitnet", tokens)
    # fp32 sums of up to a hundred products in another order, and another exp.
    assert np.abs(found - expected).max() <= 1e-5 * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "gpt2", "bert"])
def test_int8_linears(name: str, tmp_path: Path) -> None:
    """`convert` holds the engine against torch; what the model computes moves a little, and the report says so."""
    theirs = hf_families.save(name, tmp_path / "model")
    report = convert(tmp_path / "model", tmp_path / "m.bitnet", head="f32", linears="int8", tokens=100)
    assert stored(tmp_path / "m.bitnet") == {"INT8_ROWS"} and "INT8_ROWS" in str(report)
    cost = "vectors move by" if hf_families.is_encoder(name) else "cost"
    assert report.checked.head.worst > 0 and cost in str(report)
    tokens = hf_families.tokens_of(3, 41)
    expected = hf_families.result(theirs, tokens).numpy()
    if hf_families.is_encoder(name):
        expected = expected.mean(1) / np.linalg.norm(expected.mean(1), axis=-1, keepdims=True)
    found = engine(tmp_path / "m.bitnet", tokens)
    apart = np.abs(found - expected).mean() / np.abs(expected).mean()
    assert 1e-4 < apart < 0.1  # codes of 7 bits; three layers
    small, large = (tmp_path / "m.bitnet").stat().st_size, tmp_path / "f32.bitnet"
    convert(tmp_path / "model", large, head="f32", linears="f32", tokens=100)
    assert stored(large) == {"F32"} and small < large.stat().st_size


def test_what_a_model_of_floats_cannot_be(tmp_path: Path) -> None:
    theirs = hf_families.save("llama", tmp_path / "model")
    with pytest.raises(ValueError, match=r"`up` and `down` by lines, those of .*model are floats"):
        convert(tmp_path / "model", tmp_path / "m.bitnet", sparse=True, tokens=64)
    with torch.no_grad():
        theirs.model.embed_tokens.weight.mul_(1e37)
    theirs.save_pretrained(tmp_path / "large")
    with pytest.raises(VerificationError, match="not finite: some of its weights are far too large"):
        convert(tmp_path / "large", tmp_path / "m.bitnet", tokens=64)
    assert not (tmp_path / "m.bitnet").exists()


def test_a_folder_with_int8_linears_goes_one_way(tmp_path: Path) -> None:
    hf_families.save("llama", tmp_path / "model")
    for linears, goes_back in (("int8", False), ("f32", True)):
        packed, folder = tmp_path / f"{linears}.bitnet", tmp_path / linears
        convert(tmp_path / "model", packed, linears=linears, tokens=100)
        notes = write_folder(packed, folder).notes
        assert any("cannot be converted again" in note for note in notes) is not goes_back
        if goes_back:
            convert(folder, tmp_path / "back.bitnet", tokens=100)
        else:
            with pytest.raises(ValueError, match="not ternary; linear layers of int8 are read from the packed file"):
                convert(folder, tmp_path / "back.bitnet", tokens=100)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf_families.save("llama", tmp_path / "model")
    words = ["convert", str(tmp_path / "model"), str(tmp_path / "m.bitnet"), "--tokens", "64", "--json"]
    for linears, name in ((None, "F16"), ("int8", "INT8_ROWS"), ("f32", "F32")):
        assert main([*words, *(["--linears", linears] if linears else [])]) == 0
        captured = capsys.readouterr()
        assert json.loads(captured.out)["checked"]["floats"] == name
        assert f"nothing is ternary, linear layers are {name}" in captured.err and stored(tmp_path / "m.bitnet") == {
            name
        }
    assert main(["convert", str(tmp_path / "m.bitnet"), str(tmp_path / "hf"), "--to", "hf", "--linears", "f16"]) == 2
    assert "--linears is for packed files, not for --to hf" in capsys.readouterr().err


def test_weights_beyond_f16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = hf_families.make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = 1e5
    model.save_pretrained(tmp_path / "model")
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "m.bitnet"), "--tokens", "64"]) == 1
    assert "beyond the range of F16; store them with --linears f32" in capsys.readouterr().err
    assert not (tmp_path / "m.bitnet").exists()
    assert (
        main(["convert", str(tmp_path / "model"), str(tmp_path / "m.bitnet"), "--tokens", "64", "--linears", "f32"])
        == 0
    )


def test_the_floats_of_a_ternary_model_stay_as_they_are(tmp_path: Path) -> None:
    import hf_models

    hf_models.llama_packed(left=("down_proj",)).save(tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "m.bitnet", tokens=64)
    assert stored(tmp_path / "m.bitnet") == {"TERNARY_2BIT", "F32"}
    convert(tmp_path / "model", tmp_path / "m.bitnet", linears="int8", tokens=64)
    assert stored(tmp_path / "m.bitnet") == {"TERNARY_2BIT", "INT8_ROWS"} and encodings.INT8_ROWS.kind == "int8"


@pytest.mark.parametrize("name", [name for name in hf_families.MAKE if name != "gemma3"])  # it only comes in
def test_out_again(name: str, tmp_path: Path) -> None:
    """From transformers to a packed file and back: transformers loads every tensor, and computes the same."""
    theirs = hf_families.save(name, tmp_path / "model")
    with open_source(tmp_path / "model") as source:
        pack_source(source, tmp_path / "m.bitnet", head="f32")
        pooling = source.config.pooling
    written = write_folder(tmp_path / "m.bitnet", tmp_path / "out")
    assert "quant_method" not in written.what  # nothing rounds its inputs
    more = {"add_pooling_layer": False} if hf_families.is_encoder(name) else {}
    load = AutoModel if hf_families.is_encoder(name) else AutoModelForCausalLM
    again, info = load.from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True,
                                       attn_implementation="eager", **more)  # fmt: skip
    assert not any(info.values()), info  # no missing, unexpected or mismatched tensor
    again.set_experts_implementation("eager")
    tokens = hf_families.tokens_of(3, 41)
    expected, found = hf_families.result(theirs, tokens), hf_families.result(again, tokens)
    # Gains are written less 1, positions have the first type of token in them: a rounding each.
    assert float((found - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))
    with open_source(tmp_path / "out") as source:
        assert source.config.pooling == pooling
        pack_source(source, tmp_path / "again.bitnet", head="f32")
    first, second = PackedFile.open(tmp_path / "m.bitnet"), PackedFile.open(tmp_path / "again.bitnet")
    assert second.configs == first.configs and list(second.tensors) == list(first.tensors)
    for key, record in first.tensors.items():
        np.testing.assert_allclose(
            second.values(second.tensors[key]), first.values(record), atol=2.0**-23, rtol=2.0**-23
        )


def test_texts_become_vectors_as_sentence_transformers_has_them(tmp_path: Path) -> None:
    """With the folder's tokenizer and the tokens it adds around a text; the mean, or the pooling that the folder
    names."""
    theirs = hf_families.save("bert", tmp_path / "model")
    words = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words.add_special_tokens(WORDS[:5])
    around = [("[CLS]", WORDS.index("[CLS]")), ("[SEP]", WORDS.index("[SEP]"))]
    words.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    words.save(str(tmp_path / "model" / "tokenizer.json"))
    texts = ["Hello worlds", "a b unknown a", "b"]
    assert words.encode(texts[0]).tokens == ["[CLS]", "hello", "world", "##s", "[SEP]"]
    for pooling, pick in (("mean", lambda x: x.mean(0)), ("cls", lambda x: x[0])):
        (tmp_path / "model" / "1_Pooling").mkdir(exist_ok=True)
        mode = {"pooling_mode_mean_tokens": pooling == "mean", "pooling_mode_cls_token": pooling == "cls"}
        (tmp_path / "model" / "1_Pooling" / "config.json").write_text(json.dumps(mode))
        convert(tmp_path / "model", tmp_path / "m.bitnet", head="f32", tokens=64)
        with Model.load(tmp_path / "m.bitnet", kv_type="f32") as model:
            found = model.embed(texts)
        for text, vector in zip(texts, found, strict=True):
            states = hf_families.result(theirs, torch.tensor([words.encode(text).ids]))[0]
            expected = torch.nn.functional.normalize(pick(states), dim=-1).numpy()
            assert np.abs(vector - expected).max() <= 1e-5  # fp32 sums in another order


@pytest.mark.parametrize(
    ("place", "content", "found"),
    [
        ("1_Pooling/config.json", {"embedding_dimension": 36, "pooling_mode": "cls"}, "first"),
        ("1_Pooling/config.json", {"pooling_mode": "lasttoken", "include_prompt": True}, "last"),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, r"1_Pooling/config.json: max, expected one of lasttoken"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, "expected one of lasttoken, mean, cls"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": False}, "no pooling, expected one of pooling_mode_last"),
        ("modules.json", [{"type": "sentence_transformers.models.Transformer"}, {"type": "x.Normalize"}], "mean"),
        ("modules.json", [{"type": "x.Pooling"}, {"type": "x.models.Dense"}], r"modules.json has x\.models\.Dense"),
        ("modules.json", [{"a": 1}], "modules.json has None, expected Transformer, Pooling"),
        ("modules.json", 5, "modules.json has 5, expected Transformer, Pooling"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "mean"),
    ],
    ids=str,
)
def test_how_a_text_becomes_a_vector(place: str, content: Any, found: str, tmp_path: Path) -> None:
    """What sentence-transformers computes, or a refusal: never another vector."""
    hf_families.save("bert", tmp_path)
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).write_text(json.dumps(content))
    if found not in ("first", "last", "mean"):
        with pytest.raises(SourceError, match=found), open_source(tmp_path):
            pass
        return
    with open_source(tmp_path) as source:
        assert source.config.pooling == found
        prompted = "a text does not get the prompt 'query' of the folder; write it before" in source.assumptions
        assert prompted == place.startswith("config")


def test_what_sentence_transformers_does_before_the_tokenizer(tmp_path: Path) -> None:
    """Lower case changes the tokens; a text that it would cut off is read whole, and that is said."""
    hf_families.save("bert", tmp_path)
    words = Tokenizer(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    words.save(str(tmp_path / "tokenizer.json"))
    for said in ({"max_seq_length": 4, "do_lower_case": True}, {"max_seq_length": 10**6}):
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps(said))
        with open_source(tmp_path) as source:
            assert source.tokenizer is not None
            found = Tokenizer.from_str(source.tokenizer.decode()).encode("Hello worldS").tokens
            lower = "texts become lower case, as sentence_bert_config.json says"
            cut = "sentence_bert_config.json cuts texts off after 4 tokens; here they are read up to "
            cut += str(source.config.max_context)
            assert (lower in source.assumptions, cut in source.assumptions) == ("do_lower_case" in said,) * 2
        assert found == (["hello", "world", "##s"] if "do_lower_case" in said else ["[UNK]", "[UNK]"])
    (tmp_path / "sentence_bert_config.json").write_text('{"do_lower_case": "no"}')
    with pytest.raises(SourceError, match="do_lower_case is 'no', expected true or false"), open_source(tmp_path):
        pass


def test_a_tokenizer_that_the_engine_refuses_is_not_converted(tmp_path: Path) -> None:
    hf_families.save("gpt2", tmp_path / "model")
    Tokenizer(models.BPE({chr(97 + i): i for i in range(26)}, [])).save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text(json.dumps({"eos_token": "x" * 5000}))
    with pytest.raises(ValueError, match="has a token of 5000 characters, expected at most 4096"):
        convert(tmp_path / "model", tmp_path / "m.bitnet")
    assert not (tmp_path / "m.bitnet").exists()
