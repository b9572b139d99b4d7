"""Instruction tuning: which tokens are learnt, how conversations share a row, and runs on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

import bitnet_cli
from bitnet.config import ModelConfig
from bitnet.data import conversations, dataset, packing, tokenizer
from bitnet.data.dialogues import CHATML, END, START, Dialogues, Encoder, unwritten, with_template
from bitnet.model.masks import positions
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import export_checkpoint
from bitnet_export.checkpoint.real_text import real_tokens
from bitnet_runtime import Model
from tool_models import QWEN, TOOLS
from training import TALK

torch.set_num_threads(1)

FORGETS = (  # earlier answers are rendered without their ends
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if loop.last and m.role == 'assistant' %}!{% endif %}|"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
SHAPE: dict[str, Any] = {
    "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 48, "max_context": 64,
}  # fmt: skip


def encoder(template: str | None = None) -> tuple[Encoder, Any]:
    words = tokenizer.build("byte", [], 300)
    template, generation = with_template(words, template, {})
    return Encoder(words, template, generation), words


def learnt(dialogue: packing.Dialogue, words: Any) -> str:
    """The text of what counts."""
    return str(words.decode(dialogue.ids[dialogue.counts].tolist(), skip_special_tokens=False))


def dialogues(n: int) -> tuple[Dialogues, Any]:
    encode, words = encoder()
    talks = [[{"role": "user", "content": "q" * (1 + i % 5)}, {"role": "assistant", "content": "a" * (1 + i % 7) + "b"}]
             for i in range(n)]  # fmt: skip
    return Dialogues([conversations.Conversation(talk, str(i)) for i, talk in enumerate(talks)], encode, words), words


# ---- labels ----


def test_only_answers_and_their_end_are_learnt() -> None:
    encode, words = encoder()
    (found,) = encode.encode(conversations.Conversation(TALK, "here"))
    assert learnt(found, words) == "Good day<|im_end|>So long<|im_end|>"
    end, start = (words.token_to_id(text) for text in (END, START))
    assert found.ids[0] == tokenizer.END_ID and found.ids.tolist().count(start) == 4
    assert found.ids.tolist().count(end) == 4  # what the user typed is text
    assert found.ids[-1] == end and found.counts[-1]


def test_a_plain_text_begins_and_ends_as_it_did_before_the_model_learnt_to_chat() -> None:
    words = tokenizer.build("byte", [], 300)
    _, generation = with_template(words, None, {})
    end = words.token_to_id(END)
    assert (generation["bos_token_id"], generation["eos_token_ids"]) == (tokenizer.END_ID, [end, tokenizer.END_ID])
    assert with_template(words, "x", generation)[1] == generation  # of a resumed run
    _, said = with_template(words, None, {"eos_token_ids": [5]})
    assert "bos_token_id" not in said and said["eos_token_ids"] == [end, 5]


def test_our_template_knows_its_roles() -> None:
    encode, words = encoder()
    asked, answer = TALK[:2]
    told = [{"role": role, "content": "Be brief."} for role in ("system", "developer")]
    one, other = (encode.encode(conversations.Conversation([each, asked, answer], "here"))[0] for each in told)
    assert one.ids.tolist() == other.ids.tolist() and "system\nBe brief." in words.decode(one.ids.tolist())
    with pytest.raises(dataset.DataError, match=r"here: .*knows the roles system, user, assistant and tool; .* sytem"):
        encode.encode(conversations.Conversation([{**told[0], "role": "sytem"}, asked, answer], "here"))


def test_a_template_that_rewrites_earlier_answers_gives_one_sequence_for_each() -> None:
    encode, words = encoder(FORGETS)
    first, second = encode.encode(conversations.Conversation(TALK, "here"))
    assert learnt(first, words) == "Good day!|" and learnt(second, words) == "So long!|"
    assert words.decode(second.ids.tolist()).startswith("user:hi|assistant:Good day|user:")


def test_a_template_that_does_not_continue_its_prompt() -> None:
    encode, _ = encoder("{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}#{% endif %}")
    with pytest.raises(dataset.DataError, match="here: the chat template does not write answer 2 after the prompt"):
        encode.encode(conversations.Conversation(TALK, "here"))


def test_an_answer_of_weight_0_is_seen_and_not_learnt(tmp_path: Path) -> None:
    """As in OpenAI's format; null is what tables write for a missing field."""
    file = tmp_path / "c.jsonl"
    encode, words = encoder()
    for weight in (None, 1):
        talk = [TALK[0], TALK[1] | {"weight": 0}, TALK[2], TALK[3] | {"weight": weight}]
        file.write_text(json.dumps({"messages": talk}))
        (found,) = encode.encode(next(conversations.read([file])))
        assert learnt(found, words) == "So long<|im_end|>" and "Good day" in words.decode(found.ids.tolist())
    for weights, message in (((0, 0), "no answer is learnt"), ((0, 0.5), r"weight of an answer is 0\.5, expected 0")):
        talk = [TALK[0], TALK[1] | {"weight": weights[0]}, TALK[2], TALK[3] | {"weight": weights[1]}]
        file.write_text(json.dumps({"messages": talk}))
        with pytest.raises(dataset.DataError, match=rf"line 1: .*{message}"):
            list(conversations.read([file]))


@pytest.mark.parametrize(
    ("answer", "start"), [("\n\nhi", ""), ("    hi", ""), ("\n", ""), ("    hi", "<|endoftext|> ")]
)
def test_an_answer_that_begins_with_a_space_is_learnt_behind_the_prompt_of_the_engine(answer: str, start: str) -> None:
    """A tokenizer has one token for the line break that ends the prompt and the spaces that follow. start: the token
    that it puts before each text."""
    words = tokenizer.build("bpe", ["a:\n    hi\n\n\nb"] * 9, 300)
    words.post_processor = TemplateProcessing(single=f"{start}$A", special_tokens=[("<|endoftext|>", 0)])
    template, generation = with_template(words, None, {})
    encode = Encoder(words, template, generation)
    asked = [{"role": "user", "content": "?"}]
    talk = [*asked, {"role": "assistant", "content": answer}, *asked, {"role": "assistant", "content": "hi"}]
    first, second = encode.encode(conversations.Conversation(talk, "here"))
    prompt = encode._tokens(asked, conversations.Conversation(talk, "here"), ask=True)
    assert first.ids[: len(prompt)].tolist() == prompt and not first.counts[: len(prompt)].any()
    assert learnt(first, words) == answer + END
    assert learnt(second, words) == "hi" + END  # after which the first has other tokens


def test_repetitions_are_counted() -> None:
    talks = [conversations.Conversation([{"role": "user", "content": str(i % 9)}], str(i)) for i in range(400)]
    said: list[str] = []
    conversations.split(talks, 0.3, said.append)
    assert said == ["391 of 400 conversations are repetitions and were left out"]


@pytest.mark.parametrize("template", [None, QWEN], ids=["told by us", "told by the template"])
def test_calls_of_tools_are_learnt_and_their_results_are_not(template: str | None, tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}
    talk = [
        TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"}, {"role": "assistant", "content": "It is noon"},
    ]  # fmt: skip
    file = tmp_path / "c.jsonl"
    records: list[dict[str, Any]] = [{"messages": talk, "tools": TOOLS}, {"messages": talk}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    offered, plain = conversations.read([file])
    encode, words = encoder(template)
    (found,) = encode.encode(offered)
    written = '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>'
    end = "<|im_end|>" if template is None else "<|im_end|>\n"
    assert learnt(found, words) == f"{written}{end}It is noon{end}"
    text = words.decode(found.ids.tolist(), skip_special_tokens=False)
    assert "The weather of a town." in text and "<tool_response>\nnoon" in text
    assert "The weather of a town." not in words.decode(encode.encode(plain)[0].ids.tolist())
    assert len({conversations.digest_of(each) for each in (offered, plain)}) == 2
    bytes_each = Dialogues([offered, plain], encode, words).bytes_per_token
    assert 0.9 < bytes_each <= 1  # of a byte each, and an end


def test_a_call_that_is_none() -> None:
    encode, _ = encoder()
    talk = [*TALK[:1], {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    with pytest.raises(dataset.DataError, match=r"here: messages has the tool call"):
        encode.encode(conversations.Conversation(talk, "here"))


def test_half_a_character_in_a_message() -> None:
    encode, _ = encoder()
    talk = [{"role": "user", "content": "\ud800"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(dataset.DataError, match=r"here: .*not valid Unicode"):
        encode.encode(conversations.Conversation(talk, "here"))


# ---- packing ----


def test_the_last_input_of_a_row_has_its_target() -> None:
    text = packing.Dialogue(np.arange(9, dtype=np.int32), np.ones(9, bool))
    inputs, targets, _ = packing.filled([[(0, text)]], 4)
    assert inputs.tolist() == [[0, 1, 2, 3]] and targets.tolist() == [[1, 2, 3, 4]]


def test_packing_keeps_every_token_once() -> None:
    found, _ = dialogues(23)
    inputs, targets, documents = found.window(range(found.windows(60)), 60)
    every = sorted(tuple(d.ids.tolist()) for d in found._all)
    seen = []
    for row in range(len(inputs)):
        for number in range(int(documents[row].max()) + 1):
            mine = documents[row] == number
            ids, aims = inputs[row][mine].tolist(), targets[row][mine].tolist()
            seen.append((*ids, aims[-1]))
            pairs = zip(aims[:-1], ids[1:], strict=True)
            assert all(aim in (dataset.IGNORED, following) for aim, following in pairs)
        assert (targets[row][documents[row] == -1] == dataset.IGNORED).all()
    assert sorted(seen) == every
    assert int((targets != dataset.IGNORED).sum()) == sum(int(d.counts.sum()) for d in found._all)
    assert len(inputs) < 23 / 1.5  # several share a row


def test_with_a_prefix_no_conversations_share_a_row() -> None:
    encode, words = encoder()
    talks = [conversations.Conversation(TALK[:2], str(i)) for i in range(3)]
    assert Dialogues(talks, encode, words).windows(200) == 1
    rows = Dialogues(talks, encode, words, prefix=True)
    *_, documents, lengths = rows.window(range(rows.windows(200)), 200)
    asked = encode._tokens(TALK[:1], talks[0], ask=True)
    assert documents.amax(1).tolist() == [0, 0, 0] and lengths.tolist() == 3 * [len(asked)]


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5, "global_every": 2, "rope_local_theta": 100.0}])
def test_packed_is_unpacked(changes: dict[str, Any]) -> None:
    """Each conversation in a row has the logits that it has alone."""
    found, words = dialogues(9)
    torch.manual_seed(0)
    # Float layers: behind a quantizer the last bit of a sum may move an activation over an edge (design §10).
    config = ModelConfig(vocab_size=words.get_vocab_size(), **SHAPE, ternary=(), head_format="f32", **changes)
    model = Transformer(config).double().eval()
    inputs, _, documents = found.window(range(found.windows(60)), 60)
    with torch.no_grad():
        together = model(inputs, documents)
        for row, number in ((r, n) for r in range(len(inputs)) for n in range(int(documents[r].max()) + 1)):
            mine = documents[row] == number
            alone = model(inputs[row][mine][None])[0]
            assert torch.allclose(together[row][mine], alone, rtol=0, atol=1e-6)  # fp64 sums in another order
    assert documents.max() == 1  # two share a row


def test_positions_begin_anew() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, 1, 2, 2, 2, 2, 2]])
    assert positions(documents).tolist() == [[0, 1, 2, 0, 1, 0, 1], [0, 0, 0, 1, 2, 3, 4]]


def test_batches_visit_every_row_once_an_epoch_and_do_not_depend_on_the_past() -> None:
    found, _ = dialogues(23)
    batches = packing.Batches(found, 4, 60, seed=1)
    rows = batches.sequences(0, 4 * batches.per_epoch)[0].tolist()  # four epochs
    assert all(rows.count(row) % 4 == 0 for row in rows)
    later = [t.tolist() for t in batches.sequences(28, 32)]
    assert [t.tolist() for t in packing.Batches(found, 4, 60, seed=1).sequences(28, 32)] == later


def test_what_lies_beyond_the_context_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are the same as if it were, and the time grows with the context, not with the square of the answers."""
    encode, words = encoder()
    talk = [{"role": role, "content": "x" * 20} for role in ("user", "assistant") * 30]
    talks = [conversations.Conversation(talk[: 2 * n], str(n)) for n in (30, 4, 1)]
    whole = Dialogues(talks, encode, words)
    asked: list[int] = []
    tokens = encode._tokens
    monkeypatch.setattr(encode, "_tokens", lambda told, *args, **more: asked.append(1) or tokens(told, *args, **more))
    for context in (60, 200, 5000):
        asked.clear()
        short = Dialogues(talks, encode, words, context=context)
        assert len(asked) <= 2 * 35 and (len(asked) < 2 * 15) == (context < 5000)
        assert short.too_long(context) == whole.too_long(context) and short.windows(context) == whole.windows(context)
        every = range(whole.windows(context))
        for ours, theirs in zip(short.window(every, context), whole.window(every, context), strict=True):
            assert torch.equal(ours, theirs)


def test_bytes_and_tokens_are_of_what_is_learnt() -> None:
    """What lies beyond the context does not count: two conversations with the same visible answer have the same bits
    per byte."""
    encode, words = encoder()
    short = conversations.Conversation(TALK[:2], "here")
    asked = conversations.Conversation([{"role": "user", "content": "q" * 500}, TALK[1]], "here")
    answered = conversations.Conversation([TALK[0], {"role": "assistant", "content": "Good day" * 90}], "here")
    alone, with_long = (Dialogues(talks, encode, words, context=64) for talks in ([short], [short, asked]))
    assert alone.bytes_per_token == with_long.bytes_per_token
    assert (with_long.too_long(64), with_long.answerless(64), with_long.n_tokens) == (1, 1, alone.n_tokens + 65)
    cut = Dialogues([answered], encode, words, context=64)
    assert cut.bytes_per_token == 1 and cut.answerless(64) == 0  # a byte is a token


def test_long_conversations_lose_their_end() -> None:
    found, _ = dialogues(5)
    longest = max(len(d.ids) for d in found._all)
    assert found.too_long(longest - 1) == 0 and found.too_long(longest - 2) == 1
    with pytest.raises(dataset.DataError, match="no answer lies within the first 3 tokens"):
        packing.Batches(found, 1, 3, seed=0)


# ---- from conversations to an engine that answers ----


def test_lost_reasoning_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.jsonl"
    thought = {"role": "assistant", "content": "Good day", "reasoning_content": "a greeting"}
    lines = [[{"role": "user", "content": str(n)}, thought if n % 2 else TALK[1]] for n in range(10)]
    file.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    args = ["train", "--chat", str(file), "--tokenizer", "byte", "--steps", "1", "--context", "64", "--batch", "1"]
    args += [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    assert bitnet_cli.main([*args, "--set", "vocab_size=300", "--out", str(tmp_path / "run")]) == 0
    assert "5 of 10 conversations have reasoning beside their answers, which" in capsys.readouterr().err
    talks = list(conversations.read([file]))
    assert not unwritten(talks, "{{ m.reasoning_content }}")
    assert not unwritten(talks[:1], "{{ m.content }}")


def test_held_out_conversations_have_an_answer_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "talks.jsonl"
    talks = [[{"role": "user", "content": "q" * 500 + str(i)}, TALK[1]] for i in range(9)]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    options = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    options += ["--steps", "2", "--batch", "4", "--threads", "1", "--tokenizer", "byte"]
    assert bitnet_cli.main(["train", *options, "--chat", str(file), "--out", str(tmp_path / "run")]) == 1
    assert "no held-out conversation has an answer within 64 tokens; raise --context" in capsys.readouterr().err


def test_a_run_on_conversations_goes_on_with_a_longer_context_and_not_with_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, run = tmp_path / "talks.jsonl", tmp_path / "run"
    talks = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "yes " * 30}] for i in range(40)]
    lines = [json.dumps({"messages": talk}) + "\n" for talk in talks]
    file.write_text("".join(lines))
    options = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    options += ["--batch", "4", "--threads", "1", "--tokenizer", "byte", "--validation", "0.3", "--context", "32"]
    begin = ["train", *options, "--chat", str(file), "--steps", "2", "--out", str(run)]
    assert bitnet_cli.main(begin) == 0
    go_on = ["train", "--resume", "--out", str(run), "--steps", "4"]
    assert bitnet_cli.main([*go_on, "--context", "64"]) == 0
    held_out = conversations.split(list(conversations.read([file])), 0.3)[1]
    file.write_text("".join(line for i, line in enumerate(lines) if f"line {i + 1}" not in held_out[0].where))
    capsys.readouterr()
    assert bitnet_cli.main(["train", "--resume", "--out", str(run), "--steps", "6"]) == 1
    assert "was trained on other text" in capsys.readouterr().err


def test_a_run_on_conversations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talks = [[{"role": "user", "content": f"{i}"}, {"role": "assistant", "content": "yes"}] for i in range(30)]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    options = [word for name, value in SHAPE.items() for word in ("--set", f"{name}={value}")]
    options += ["--steps", "40", "--batch", "4", "--threads", "1", "--lr", "0.01", "--tokenizer", "byte"]
    folder = tmp_path / "run"
    assert bitnet_cli.main(["train", *options, "--chat", str(file), "--out", str(folder)]) == 0
    capsys.readouterr()
    assert bitnet_cli.main(["eval", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nats_per_token"] < 0.5
    assert Checkpoint.open(folder).template == CHATML
    export_checkpoint(folder, tmp_path / "m.bitnet", tokens=256)
    others = tmp_path / "others.jsonl"
    others.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks[:3]))
    assert bitnet_cli.main(["eval", str(folder), "--data", str(others), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    words = tokenizer.build("byte", [], 257)
    encode = Encoder(words, *with_template(words, None, {}))
    rows = Dialogues(list(conversations.read([others])), encode, words)
    assert found["tokens"] == sum(int(dialogue.counts.sum()) for dialogue in rows._all) == 3 * 4
    assert found["nats_per_token"] < 0.5 and found["bits_per_byte"] < 1
    assert bitnet_cli.main(["eval", str(tmp_path / "m.bitnet"), "--data", str(others)]) == 1
    assert "others.jsonl holds conversations, on which only a run is measured" in capsys.readouterr().err
    with Model.load(tmp_path / "m.bitnet") as model:
        result = model.chat([{"role": "user", "content": "7"}], temperature=0, max_tokens=8)
    assert (result.text, result.finish_reason) == ("yes", "stop")
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    calls = [[talk[0], {"role": "assistant", "content": None, "tool_calls": [call]}] for talk in talks]
    file.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in calls))
    assert real_tokens(Checkpoint.open(folder), 3)[1] == "validation text", "what only calls tools says nothing"
