"""Tokenizers in folders of Hugging Face: tokens as transformers has them, and folders that are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from transformers import AutoTokenizer

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.source import SourceError
from token_samples import LLAMA2, all_of_unicode, of_folder, runtime, same, texts


@pytest.fixture(scope="module", params=foreign.BYTE_LEVEL)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    kind = request.param
    tokenizer, special = foreign.byte_level(kind), foreign.BYTE_LEVEL[kind][1]
    added = {str(i): t.__getstate__() for i, t in tokenizer.get_added_tokens_decoder().items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": special[-1], "added_tokens_decoder": added,
        "clean_up_tokenization_spaces": True,
    }  # fmt: skip
    if kind == "llama-bpe":
        config["bos_token"] = special[0]
    if kind == "qwen2":
        config |= {"tokenizer_class": "Qwen2Tokenizer", "add_bos_token": False, "bos_token": None}
    model_type = {"qwen2": "qwen3", "gpt-2": "gpt2"}.get(kind, "llama")
    return kind, foreign.save(tmp_path_factory.mktemp(kind) / "m", tokenizer, model_type=model_type, **config)


def test_a_folder_gives_the_tokens_of_transformers(published: tuple[str, Path]) -> None:
    kind, folder = published
    definition, template, generation, _ = of_folder(Folder(folder))
    special = [*foreign.BYTE_LEVEL[kind][1], *foreign.BYTE_LEVEL[kind][2]]
    pieces = None if kind in ("llama-bpe", "qwen2") else 12
    same(runtime(definition, generation), AutoTokenizer.from_pretrained(folder), texts(special, pieces))
    assert template is None
    assert generation["eos_token_ids"] == [foreign.byte_level(kind).token_to_id(foreign.BYTE_LEVEL[kind][1][-1])]
    assert ("bos_token_id" in generation) == (kind == "llama-bpe")


def test_code_points_of_every_plane(published: tuple[str, Path]) -> None:
    kind, folder = published
    if kind == "llama-bpe":
        ours, original = runtime(*of_folder(Folder(folder))[::2]), foreign.byte_level(kind)
        for text in all_of_unicode(16):
            tokens = ours.encode(text)
            assert tokens == original.encode(text).ids
            assert ours.decode(tokens) == text


def test_what_tokenizer_config_leaves_out(tmp_path: Path) -> None:
    """Without add_bos_token a text begins with the start token; tokens named only there are added."""
    config = {key: value for key, value in LLAMA2.items() if key != "add_bos_token"}
    folder = foreign.save(tmp_path / "m", foreign.sentencepiece_model(), **config, extra_special_tokens=["<x>"])
    definition, _, generation, assumptions = of_folder(Folder(folder))
    assert any("does not say add_bos_token" in line for line in assumptions)
    rules = json.loads(definition or b"{}")
    added = {token["content"]: token["id"] for token in rules["added_tokens"]}
    assert generation["bos_token_id"] == added["<s>"]
    assert added["<x>"] == max(rules["model"]["vocab"].values()) + 1
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(SourceError, match=r"chat_template\.jinja is not UTF-8"):
        of_folder(Folder(folder))


@pytest.mark.parametrize(
    "config",
    [
        {"extra_special_tokens": {"image_token": "<x>", "tool": "<y>"}},
        {"image_token": "<x>"},
        {"additional_special_tokens": ["<y>"], "extra_special_tokens": {"image_token": "<x>"}},
        {"model_specific_special_tokens": {"tool_token": "<y>"}},
        {"added_tokens_decoder": {"601": {"content": "<x>", "rstrip": True, "special": True}}, "pad_token": "<x>"},
    ],
)
def test_special_tokens_of_one_model_alone(config: dict[str, Any], tmp_path: Path) -> None:
    """A tokenizer_config.json may name tokens that no other model has; templates know them by these names."""
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    folder = foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"), **config)
    (definition, _, generation, _), theirs = of_folder(Folder(folder)), AutoTokenizer.from_pretrained(folder)
    same(runtime(definition, generation), theirs, ["a<x> b", "<y> <x>", "<|endoftext|><y>"])
    named = {name: text for name, text in theirs.special_tokens_map.items() if name.endswith("_token")}
    assert generation["special_tokens"] == named


@pytest.mark.parametrize("kind", ["PreTrainedTokenizerFast", "LlamaTokenizerFast"])
@pytest.mark.parametrize("template", ["$A", "{0} $A", "$A {1}", "{0} $A {1}"])
@pytest.mark.parametrize("said", [{"add_bos_token": False}, {"add_bos_token": True, "add_eos_token": True}])
def test_what_goes_around_a_text_is_that_of_tokenizer_json(
    kind: str, template: str, said: dict[str, bool], tmp_path: Path
) -> None:
    """As in transformers: add_bos_token = false takes no end token away that tokenizer.json adds."""
    words = Tokenizer.from_str(foreign.byte_level("llama-bpe").to_str())  # a copy: that one is shared
    names = "<|begin_of_text|>", "<|end_of_text|>"
    ids = [(name, words.token_to_id(name)) for name in names]
    words.post_processor = processors.TemplateProcessing(single=template.format(*names), special_tokens=ids)
    folder = foreign.save(tmp_path, words, tokenizer_class=kind, bos_token=names[0], eos_token=names[1], **said)
    definition, _, generation, assumptions = of_folder(Folder(folder))
    expected = AutoTokenizer.from_pretrained(folder)("Hello world")["input_ids"]
    assert runtime(definition, generation).encode("Hello world") == expected
    assert ("bos_token_id" in generation) == template.startswith("{0}")
    has = {f"add_{role}_token": f"{{{i}}}" in template for i, role in enumerate(("bos", "eos"))}
    told = [line.split()[0] for line in assumptions if "but tokenizer.json counts, as in transformers 5" in line]
    assert told == [name for name in said if said[name] != has[name]]


def test_damaged_files(tmp_path: Path) -> None:
    model = foreign.sentencepiece_model()
    folder = foreign.save(tmp_path / "m", model, **LLAMA2)
    for end in (0, 1, 2, 5, 20, 100, len(model) // 2, len(model) - 1):
        (folder / "tokenizer.model").write_bytes(model[:end])
        with pytest.raises(SourceError, match=r"tokenizer\.model"):
            of_folder(Folder(folder))
    (folder / "tokenizer.model").write_bytes(b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f")
    with pytest.raises(SourceError, match="not a SentencePiece model"):
        of_folder(Folder(folder))
    for content in (b"", b"{}", b"\xff", b'{"version":"1.0","model":{"type":"BPE","vocab":{},"merges":[["a","b"]]}}'):
        (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(SourceError, match=r"tokenizer\.json is refused"):
            of_folder(Folder(folder))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eos_token": 5}, "eos_token is 5"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is not an object"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "expected a token"),
        ({"added_tokens_decoder": {"9999": {"content": "<new>", "special": True}}}, "of different models"),
        ({"added_tokens_decoder": {"601": {"content": "<new>", "lstrip": 3}}}, "expected true or false"),
        ({"chat_template": 5}, "chat_template is 5"),
        ({"extra_special_tokens": ["<x>"] * 70_000}, "adds 70000 tokens, expected at most 65536"),
    ],
)
def test_wrong_tokenizer_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=message):
        of_folder(Folder(foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"), **config)))


@pytest.mark.parametrize("template", ["{% for m in messages %}\n{{ m.content }\n{% endfor %}", "{% nothing %}"])
def test_a_template_with_an_error_is_left_out_and_said(template: str, tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"), chat_template=template)
    _, found, _, assumptions = of_folder(Folder(folder))
    assert found is None
    said = next(line for line in assumptions if line.startswith("the chat template is left out, it is broken in line"))
    assert said.partition("; correct it")[2] == " and convert again"
    wants = "{{ raise_exception('no') }}"  # it is right, and takes other messages
    (folder / "chat_template.jinja").write_text(wants)
    assert of_folder(Folder(folder))[1] == wants


def test_special_tokens_that_are_split_in_texts(tmp_path: Path) -> None:
    """Ours always are. Those of a template are not: a model cannot have learnt them in pieces."""
    words = foreign.byte_level("llama-bpe")
    for template, told in (("<|eot_id|>", True), (None, False)):
        folder = foreign.save(tmp_path / f"{told}", words, split_special_tokens=True, chat_template=template)
        definition, _, generation, assumptions = of_folder(Folder(folder))
        theirs = AutoTokenizer.from_pretrained(folder).encode("a<|eot_id|>", add_special_tokens=False)
        assert runtime(definition, generation).encode("a<|eot_id|>", add_bos=False) == theirs
        assert any("which split_special_tokens would split" in line for line in assumptions) is told


def test_generation_config_and_templates(tmp_path: Path) -> None:
    folder = foreign.save(
        tmp_path / "m", foreign.byte_level("llama-bpe"), bos_token="<|begin_of_text|>", eos_token="<|eot_id|>",
        chat_template=[{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}],
    )  # fmt: skip
    end, eot = (foreign.byte_level("llama-bpe").token_to_id(name) for name in ("<|end_of_text|>", "<|eot_id|>"))
    said = {"eos_token_id": end, "do_sample": True, "temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(said))
    _, template, generation, assumptions = of_folder(Folder(folder))
    assert template == "a"
    assert generation["eos_token_ids"] == [end, eot]
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.9)
    assert any("named default is used, not tool_use" in line for line in assumptions)
    assert any("also ends at <|eot_id|>" in line for line in assumptions)
    (folder / "chat_template.jinja").write_text("c")
    (folder / "generation_config.json").write_text('{"do_sample": false, "eos_token_id": [1, 2]}')
    _, template, generation, _ = of_folder(Folder(folder))
    assert (template, generation["temperature"], generation["eos_token_ids"]) == ("c", 0.0, [1, 2, eot])
    (folder / "chat_template.jinja").unlink()
    said_of_text = json.loads((folder / "tokenizer_config.json").read_text())
    said_of_text["chat_template"] = [{"name": "tool_use", "template": "b"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(said_of_text))
    _, template, _, assumptions = of_folder(Folder(folder))
    assert template is None and any("none is used: tool_use" in line for line in assumptions)
    said_of_text["chat_template"] = {"default": "d", "rag": "e"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said_of_text))
    _, template, _, assumptions = of_folder(Folder(folder))
    assert template == "d" and any("named default is used, not rag" in line for line in assumptions)
    said_of_text["chat_template"] = [{"name": "default", "template": "f"}, {"name": [1], "template": "g"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(said_of_text))
    _, template, _, assumptions = of_folder(Folder(folder))
    assert template == "f" and any("named default is used, not [1]" in line for line in assumptions)
    said_of_text["chat_template"] = [{"name": "default", "template": "f"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(said_of_text))
    assert not any("several chat templates" in line for line in of_folder(Folder(folder))[3])
    said_of_text["chat_template"] = ""
    (folder / "tokenizer_config.json").write_text(json.dumps(said_of_text))
    assert of_folder(Folder(folder))[1] is None
    (folder / "chat_template.jinja").write_text("")
    assert of_folder(Folder(folder))[1] is None
    (folder / "chat_template.jinja").write_text("d")
    (folder / "additional_chat_templates").mkdir()  # where transformers 5 saves named ones
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("t")
    _, template, _, assumptions = of_folder(Folder(folder))
    assert template == "d" and any("named default is used, not tool_use" in line for line in assumptions)
    (folder / "chat_template.jinja").write_text("")
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 0, 1000, "7"]}')
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert generation["eos_token_ids"] == [0, 2, eot]
    assert any("was left out: 1000, '7', expected token ids below 1000" in line for line in assumptions)
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20}')
    _, _, generation, _ = of_folder(Folder(folder))
    assert (generation["temperature"], generation["top_k"]) == (0.6, 20)
    (folder / "generation_config.json").write_text('{"do_sample": false, "repetition_penalty": 1.2}')
    _, _, generation, _ = of_folder(Folder(folder))
    assert (generation["temperature"], generation["repeat_penalty"], generation["repeat_last_n"]) == (0.0, 1.2, -1)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.0, "min_new_tokens": 3, "num_beams": 1}')
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert generation["min_tokens"] == 3 and "repeat_last_n" not in generation
    assert not any("generation_config" in line for line in assumptions)
    (folder / "generation_config.json").write_text('{"do_sample": true, "top_p": 7}')
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert "top_p" not in generation and any("was left out: top_p is 7" in line for line in assumptions)


def test_what_changes_an_answer_and_has_no_default_here_is_said(tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"))
    said = {"suppress_tokens": [7, 8], "forced_eos_token_id": 5, "no_repeat_ngram_size": 3, "bad_words_ids": []}
    (folder / "generation_config.json").write_text(json.dumps(said))
    found = [line for line in of_folder(Folder(folder))[3] if "generation_config" in line]
    left = "of generation_config.json was left out: {}, for which there is no default here"
    names = ("suppress_tokens = [7, 8]", "forced_eos_token_id = 5", "no_repeat_ngram_size = 3")
    assert found == [left.format(name) for name in names]


@pytest.mark.parametrize("said", ["User:", ["User:", "###"]])
def test_texts_that_end_an_answer_come_along(said: str | list[str], tmp_path: Path) -> None:
    folder = foreign.save(tmp_path / "m", foreign.byte_level("gpt-2"))
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": said}))
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert generation["stop"] == said and not any("generation_config" in line for line in assumptions)
    (folder / "generation_config.json").write_text('{"stop_strings": [5]}')
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert "stop" not in generation and any("was left out: stop is [5]" in line for line in assumptions)


def test_an_answer_ends_where_the_template_ends_a_turn(tmp_path: Path) -> None:
    """Even if neither eos_token nor generation_config.json has that token."""
    words = foreign.byte_level("llama-bpe")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
    folder = foreign.save(tmp_path / "m", words, eos_token="<|end_of_text|>", chat_template=template)
    _, _, generation, assumptions = of_folder(Folder(folder))
    assert generation["eos_token_ids"] == [words.token_to_id("<|end_of_text|>"), words.token_to_id("<|eot_id|>")]
    assert any("also ends at <|eot_id|>, which the chat template writes" in line for line in assumptions)
    foreign.save(folder, words, eos_token="<|end_of_text|>")
    assert of_folder(Folder(folder))[2]["eos_token_ids"] == [words.token_to_id("<|end_of_text|>")]
    plain = Tokenizer.from_str(foreign.byte_level("gpt-2").to_str())
    plain.add_tokens(["<|eot_id|>"])  # a text may have it
    foreign.save(folder, plain, eos_token="<|endoftext|>", chat_template=template)
    assert of_folder(Folder(folder))[2]["eos_token_ids"] == [plain.token_to_id("<|endoftext|>")]


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    definition, template, generation, assumptions = of_folder(folder)
    assert (definition, template, generation) == (None, None, {})
    assert "no tokenizer in the folder" in assumptions[0]
    for name in ("vocab.json", "qwen.tiktoken"):
        (tmp_path / name).write_text("{}")
        with pytest.raises(SourceError, match=rf"has {name} but no tokenizer\.json"):
            of_folder(folder)
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(SourceError, match=r"tokenizer\.model is a vocabulary of tiktoken, .* add the tokenizer\.json"):
        of_folder(folder)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"tokenize_chinese_chars": False, "tokenizer_class": "DistilBertTokenizerFast"},
        {"do_lower_case": False, "tokenizer_class": "PreTrainedTokenizerFast"},
    ],
    ids=str,
)
def test_the_class_of_a_bert_has_the_last_word(config: dict[str, Any], lower: bool, tmp_path: Path) -> None:
    """transformers takes lower case and accents from tokenizer_config.json and not from tokenizer.json."""
    named = {"tokenizer_class": "BertTokenizer", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    folder = foreign.save(tmp_path / "m", foreign.wordpieces(lower), model_type="bert", **named | config)
    compare(folder, ["Hello WORLD, é É", "Weiß, dass 日本 x", "a [MASK] B"])


@pytest.mark.parametrize("config", [{}, {"add_prefix_space": True}, {"add_prefix_space": False}], ids=str)
@pytest.mark.parametrize("model_type", ["gpt2", "roberta"])
@pytest.mark.parametrize("space", [True, False])
def test_the_class_of_a_gpt2_has_the_last_word(
    config: dict[str, Any], model_type: str, space: bool, tmp_path: Path
) -> None:
    tokenizer = foreign.byte_level("gpt-2")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    special = {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}
    if model_type == "roberta":
        special |= {f"{name}_token": "<|endoftext|>" for name in ("bos", "cls", "sep", "pad", "mask")}
    folder = foreign.save(tmp_path / "m", tokenizer, model_type=model_type, **special, **config)
    compare(folder, ["Hello world", " a", "x"], edges=False)


def compare(folder: Path, samples: list[str], edges: bool = True) -> None:
    definition, _, _, assumptions = of_folder(Folder(folder))
    ours, theirs = Tokenizer.from_str((definition or b"").decode()), AutoTokenizer.from_pretrained(folder)
    for text in samples:
        expected = theirs.encode(text, add_special_tokens=edges)
        assert ours.encode(text, add_special_tokens=edges).ids == expected
    as_published = Tokenizer.from_file(str(folder / "tokenizer.json"))
    changed = any(as_published.encode(text).tokens != ours.encode(text).tokens for text in samples)
    assert any("tokenizer.json alone says otherwise" in line for line in assumptions) or not changed
