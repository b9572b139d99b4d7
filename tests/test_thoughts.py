"""Thoughts of models that write them before their answers: how they are told apart, in Python and in `bitnet chat`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitnet_runtime import Model
from bitnet_runtime.answers.answer import Answer
from bitnet_runtime.chat.thoughts import Begun, ThoughtReader, are_written
from runtime_models import TEMPLATE, byte_tokenizer, scripted_model
from talks import piped, prompts
from tool_models import ASK, CALL, TOOLS, calling_model

# In the style of Qwen3, and of one that always thinks.
THINKS = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content or '' }}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENED = THINKS.replace("{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
                        "{{ '<think>\\n' }}")  # fmt: skip
THOUGHT, SAID = "The town, köln…\n\nit is.", "Good day, €!"
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}"


def split(text: str, begun: Begun, step: int = 1000) -> tuple[str, str]:
    reader, found = ThoughtReader(begun), []
    found += [reader.push(text[i : i + step]) for i in range(0, len(text), step)]
    found.append(reader.push("", final=True))
    return "".join(thought for thought, _ in found), "".join(said for _, said in found)


# ---- reading ----

READ: list[tuple[str, bool, str, str]] = [
    (TEXT, False, THOUGHT, SAID),
    (f"\n {TEXT}", False, THOUGHT, SAID),
    (TEXT.removeprefix("<think>\n"), True, THOUGHT, SAID),
    (TEXT, True, THOUGHT, SAID),
    ("<think>\n\n</think>\n\nyes ", False, "", "yes "),
    ("</think>yes", True, "", "yes"),
    (" yes <think> no </think>", False, "", " yes <think> no </think>"),
    ("<think>a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
    ("<think>a<think>b</think>c</think>", False, "a<think>b", "c</think>"),
    ("<think>\n a </thin \n", False, "a </thin \n", ""),
    (" a", True, "a", ""),
    ("<think>a</think> \n", False, "a", ""),
    ("<thin", False, "", "<thin"),
    (" <thinker>", False, "", " <thinker>"),
    (" ", False, "", " "),
    (" ", True, "", ""),
    ("", False, "", ""),
]


@pytest.mark.parametrize(("text", "opened", "thought", "said"), READ)
def test_what_is_thought_and_what_is_said(text: str, opened: bool, thought: str, said: str) -> None:
    for step in (1, 2, 3, 7, 1000):
        assert split(text, Begun(opened), step) == (thought, said), step


def test_a_reader_knows_what_follows() -> None:
    reader, found = ThoughtReader(Begun(True)), []
    for text in ("", "a", "</think>", "\n", "b"):
        reader.push(text)
        found.append((reader.thinks, reader.answers))
    assert found == [(True, False)] * 2 + [(False, True)] * 3


@pytest.mark.parametrize("template", ["<think>", "{{ messages[0].content.split('</think>')[-1] }}", ""])
def test_one_tag_in_a_template_makes_no_thoughts(template: str) -> None:
    assert not are_written(template)
    assert are_written(f"{template}{THINKS}")


PARTS = ["<think>", "</think>", "<", "think", ">", "/", " ", "\n", "a", "é"]


def expected(text: str, opened: bool) -> tuple[str, str]:
    """The same, of a whole text at a time."""
    tag = re.match(r"\s*<think>", text)
    if not tag and not opened:
        return "", text
    thought, close, rest = text[tag.end() if tag else 0 :].partition("</think>")
    return (thought.strip(), rest.lstrip()) if close else (thought.lstrip(), "")


@given(st.lists(st.sampled_from(PARTS)), st.booleans(), st.lists(st.integers(1, 12), min_size=1))
def test_it_does_not_matter_how_thoughts_come(parts: list[str], opened: bool, steps: list[int]) -> None:
    text, reader, at, found = "".join(parts), ThoughtReader(Begun(opened)), 0, []
    while at < len(text):
        step = steps[at % len(steps)]
        found.append(reader.push(text[at : at + step]))
        at += step
    found.append(reader.push("", final=True))
    thought, said = ("".join(each) for each in zip(*found, strict=True))
    assert (thought, said) == expected(text, opened)


class Parts:
    """A detokenizer whose tokens are the places of these texts."""

    def __init__(self, texts: list[str]) -> None:
        self.push = texts.__getitem__
        self.flush = str


@given(st.lists(st.sampled_from([*PARTS, "<th", "ink>a"])), st.booleans(), st.integers(0, 30))
def test_pieces_with_stop_texts_are_those_of_the_whole(parts: list[str], opened: bool, most: int) -> None:
    answer = Answer(Parts(parts), ("a ", "<<"), thinker=ThoughtReader(Begun(opened)))
    thought, said, read = "", "", 0
    while read < min(most, len(parts)) and not answer.stopped:
        said += answer.push(read)
        thought += answer.take_thoughts()
        read += 1
    said += answer.flush(cut=read < len(parts))
    thought += answer.take_thoughts()
    whole = expected("".join(parts[:read]), opened)
    assert (thought, said) == (whole[0], re.split("a |<<", whole[1])[0])


BEGUN = [
    ("answer ", False, " on", "", " on"),
    ("<think>\nso", False, "\n far</think>\n\nyes", "\n far", "yes"),
    ("<think>a</think>", False, "\n\nyes", "", "yes"),
    ("so", True, " far</think>yes", " far", "yes"),
    ("so</think>", True, "yes", "", "yes"),
    ("<", False, "b>", "", "b>"),
]


@pytest.mark.parametrize(("begun", "opened", "text", "thought", "said"), BEGUN)
def test_output_that_has_begun(begun: str, opened: bool, text: str, thought: str, said: str) -> None:
    assert split(text, Begun(opened, begun)) == (thought, said)


# ---- from Python ----


def thinking_models(folder: Path) -> dict[str, Path]:
    """Models by their names, which think or do not."""
    texts = {
        "thinks": (TEXT, THINKS), "opened": (TEXT.removeprefix("<think>\n"), OPENED), "plain": (TEXT, TEMPLATE),
        "calls": (f"<think>So: {CALL}</think>{CALL}", THINKS),
        "half": ("<think>so </thi", THINKS), "untold": ("so", None),
    }  # fmt: skip
    made = {name: calling_model(folder / f"{name}.bitnet", *each) for name, each in texts.items()}
    script = [b"<think>", b"so ", b"far", b"</think>"]
    return made | {"held": scripted_model(folder / "held.bitnet", script, template=THINKS, max_context=2048)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return thinking_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", ["thinks", "opened"])
def test_a_conversation(models: dict[str, Path], name: str) -> None:
    with Model.load(models[name]) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.finish_reason) == (THOUGHT, SAID, "stop")
        assert result.message() == {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
        n = result.usage.reasoning_tokens
        assert "</think>" in model.detokenize(result.tokens[:n])
        assert "</think>" not in model.detokenize(result.tokens[: n - 1])
        stream = model.stream_chat(ASK)
        found = list(stream)
        assert "".join(piece.reasoning for piece in found) == THOUGHT
        assert "".join(piece.text for piece in found) == SAID
        assert stream.result is not None and stream.result.reasoning == THOUGHT

        raw = model.generate(model.apply_template(ASK))
        assert (raw.reasoning, raw.usage.reasoning_tokens, raw.tokens) == ("", 0, result.tokens)
        assert raw.text == (TEXT if name == "thinks" else TEXT.removeprefix("<think>\n"))


def test_an_answer_that_is_cut_within_a_thought(models: dict[str, Path]) -> None:
    with Model.load(models["thinks"]) as model:
        n = len(model.chat(ASK).tokens)
        for most in range(n + 1):
            result = model.chat(ASK, max_tokens=most)
            assert (result.reasoning, result.text) == expected(model.detokenize(result.tokens), False)
            assert result.usage.reasoning_tokens <= most


def test_a_template_without_thoughts_leaves_them_in_the_text(models: dict[str, Path]) -> None:
    with Model.load(models["plain"]) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.message()) == ("", TEXT, {"role": "assistant", "content": TEXT})


def test_stop_texts_and_calls_are_those_of_the_answer(models: dict[str, Path]) -> None:
    with Model.load(models["thinks"]) as model:
        result = model.chat(ASK, stop=["\n\n", "day"])
        assert (result.reasoning, result.text, result.finish_reason) == (THOUGHT, "Good ", "stop")
        assert model.generate(model.apply_template(ASK), stop="\n\n").text == "<think>\nThe town, köln…"
    with Model.load(models["calls"]) as model:
        result = model.chat(ASK, tools=TOOLS)
        assert (result.reasoning, result.text) == (f"So: {CALL}", "")
        assert [call.name for call in result.tool_calls] == ["weather"]


@pytest.mark.parametrize(("stop", "finish"), [("\n\n", "stop"), ("day", "cancelled")])
def test_a_receipt_is_true(models: dict[str, Path], stop: str, finish: str) -> None:
    with Model.load(models["thinks"]) as model:
        receipt = model.chat(ASK, stop=stop, receipt=True).receipt
        assert receipt is not None and receipt.finish_reason == finish
        assert model.verify_receipt(receipt.to_json()).valid


def test_the_end_of_a_stream_brings_what_was_held_back(models: dict[str, Path]) -> None:
    with Model.load(models["half"]) as model:
        pieces = list(model.stream_chat(ASK))
        assert "".join(piece.reasoning for piece in pieces) == model.chat(ASK).reasoning == "so </thi"
        assert (pieces[-1].reasoning, pieces[-1].token) == (" </thi", None)


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    script = [b"<think>", b"why", b"</think>", b"so", b"be"]
    words = byte_tokenizer(script)
    words.add_special_tokens(["<think>", "</think>"])
    with Model.load(scripted_model(tmp_path / "m", script, template=THINKS, tokenizer=words)) as model:
        result = model.chat(ASK)
        assert (result.reasoning, result.text, result.usage.reasoning_tokens) == ("why", "sobe", 3)
        assert model.generate(model.apply_template(ASK)).text == "whysobe"


# ---- in the terminal ----


def test_chat_shows_them_and_keeps_them_apart(models: dict[str, Path], tmp_path: Path) -> None:
    session, saved = tmp_path / "talk", tmp_path / "talks.jsonl"
    done = piped(models["thinks"], "weather?", "weather?", f"/save {saved}", args=("--session", session))
    assert (done.returncode, done.stdout) == (0, f"{TEXT}\n" * 2)
    answer = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT}
    assert json.loads(saved.read_text(encoding="utf-8")) == {"messages": [*ASK, answer] * 2}
    with Model.load(models["thinks"]) as model:
        told = [ASK, [*ASK, answer, *ASK], [*([*ASK, answer] * 2), *ASK]]
        lengths = [len(model.apply_template(messages)) for messages in told]
        assert prompts(done.stderr) == lengths[:2]
        assert prompts(piped(models["thinks"], "weather?", args=("--session", session)).stderr) == lengths[2:]
        with model.load_session(session) as kept:
            note = json.loads(kept.note)
            note["turns"][1]["reasoning_content"] = 5
            kept.save(session, json.dumps(note).encode())
    done = piped(models["thinks"], "weather?", args=("--session", session))
    assert (done.returncode, done.stdout) == (1, "") and "no conversation" in done.stderr
