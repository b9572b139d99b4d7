"""Conversations from records: who says what, with which tools, and which are held out."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bitnet.data import beside, finding
from bitnet.data.corpus import DataError, repetitions
from bitnet.data.files import check_characters, first_record, kind_of, records
from bitnet.data.published import SPEAKERS, answered, is_talk, misspelt, with_messages
from bitnet_runtime.chat.template import REASONING, is_message
from bitnet_runtime.chat.tools import Tools, arguments_of
from bitnet_runtime.errors import InvalidParameterError, shown

Messages = list[dict[str, Any]]


class Conversation(NamedTuple):
    messages: Messages
    where: str  # file and line, for messages
    tools: Tools | None = None  # tools that the answers may call

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools in the form of records."""
        return [each.entry() for each in self.tools.functions] if self.tools else []


# ---- files ----


def read(files: Iterable[Path], parts: bool = False) -> Iterator[Conversation]:
    """The lines of .jsonl files, each {"messages": [{"role": "user", "content": "…"}, …]}, or as in `published`.

    They may have "tools", and messages "tool_calls", as OpenAI's API has them. parts: a content may also be a list of
    parts, texts and images. Raises DataError naming file and line.
    """
    for record, where in records_of(files, "conversation"):
        yield _learnable(conversation(record, where, parts))


def records_of(files: Iterable[Path], what: str) -> Iterator[tuple[Any, str]]:
    """The records in the lines of .jsonl files, and where each is. what: the kind of record, for messages."""
    for file in files:
        if kind_of(file) != ".jsonl":
            lines = f"jq -c '.[]' {shlex.quote(str(file))} > {shlex.quote(str(file) + 'l')}"
            hint = f"; for a list: {lines}" if file.suffix == ".json" else ""
            raise DataError(f"{file} is not a .jsonl file, expected one {what} a line{hint}")
        yield from records(file)


def among(data: Sequence[str], column: str) -> list[Path]:
    """The files that `data` names, if all are .jsonl files and the first starts with a conversation; otherwise none.

    column: that of texts; "": none is named, and where one is these are texts.
    """
    if column or not data or not all(kind_of(Path(name)) == ".jsonl" for name in data):
        return []
    files = finding.files_of(data)
    return files if is_talk(first_record(files[0])) else []


def conversation(record: Any, where: str, parts: bool = False) -> Conversation:
    """The conversation of a record, checked."""
    if isinstance(record, dict) and (wrong_name := misspelt(record)):
        raise DataError(f"{where}: {wrong_name}")
    record = with_messages(record)
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        names = [*record] if isinstance(record, dict) else []
        found = f"messages is {json.dumps(messages)}" if "messages" in names else ", ".join(names) or json.dumps(record)
        raise DataError(
            f'{where}: {found:.200}; expected an object with "messages", a list that is not empty, of '
            '{"role": "user", "content": "…"}'
        )
    if record.get("system"):  # as in Anthropic's API
        raise DataError(
            f'{where}: "system" stands beside the messages and would not be learnt, expected it as the first message: '
            '{"role": "system", "content": "…"}'
        )
    if parts:
        messages = beside.within(messages, record, where)
    elif beside.has_pictures(record, messages):
        raise DataError(
            f"{where}: the conversation has a picture, and the model sees none; take one that does, or give it a "
            "vision stack with --vision (docs/images.md)"
        )
    else:
        messages = [_joined(message) for message in messages]
    if record.get("functions") or any(isinstance(each, dict) and each.get("function_call") for each in messages):
        raise DataError(f'{where}: functions are of an older form, expected "tools", and "tool_calls" in messages')
    kinds = (str, list) if parts else str
    for message in messages:
        said = isinstance(message, dict) and isinstance(message.get("content"), kinds)
        calls = isinstance(message, dict) and message.get("content") is None and is_message(message)
        if not (said or calls) or not isinstance(message.get("role"), str):
            form = '{"role": "user", "content": "…"}'
            if isinstance(message, dict) and "from" in message:
                form = f'{{"from": "human", "value": "…"}}, from one of {", ".join(SPEAKERS)}'
            elif "output" in record and message == answered(record["output"]):
                raise DataError(f"{where}: output is {shown(record['output'])}, expected a text")
            raise DataError(f"{where}: a message is {shown(message)}, expected {form}")
    check_characters(json.dumps(record, ensure_ascii=False), where)
    roles = [message["role"] for message in messages]
    if roles[0] == "assistant" or "assistant" not in roles:
        raise DataError(f"{where}: the roles are {', '.join(roles)[:80]}; expected an answer of assistant after others")
    weights = [message.get("weight") for message in messages if message["role"] == "assistant"]  # as in OpenAI's format
    if wrong := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise DataError(f"{where}: the weight of an answer is {wrong[0]!r:.40}, expected 0, which is not learnt, or 1")
    if all(weight == 0 for weight in weights):
        raise DataError(f"{where}: no answer is learnt, as all have the weight 0; leave the line out")
    try:
        return Conversation(messages, where, Tools.of(record.get("tools")))
    except InvalidParameterError as error:
        raise DataError(f"{where}: {error}") from None


def _learnable(talk: Conversation) -> Conversation:
    """The conversation, if each call that is learnt can be made: with an offered tool, and an object of arguments."""
    names = [each.name for each in talk.tools.functions] if talk.tools else []
    for message in talk.messages:
        calls = message.get("tool_calls") if message["role"] == "assistant" and message.get("weight") != 0 else None
        for call in calls if isinstance(calls, list) else []:
            function = call.get("function") if isinstance(call, dict) else None
            if not isinstance(function, dict):
                continue  # refused where the template is known
            name, given = function.get("name"), function.get("arguments")
            if names and name not in names:
                known = f"expected one of the tools {', '.join(names):.200}"
                raise DataError(f"{talk.where}: an answer calls {shown(name)}, {known}")
            if given is not None and not isinstance(arguments_of(given), dict):
                raise DataError(f"{talk.where}: an answer calls {name} with {shown(given)}, expected a JSON object")
    return talk


def _joined(message: Any) -> Any:
    """A message whose text parts are joined, as chat and server do for a template without parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not content:
        return message
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "\n".join(map(str, texts))}


def said_in(conversations: Iterable[Conversation]) -> Iterator[str]:
    """The texts of all messages, and tool calls as JSON."""
    for message in (message for each in conversations for message in each.messages):
        if message.get("content"):
            yield message["content"]
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"], ensure_ascii=False)


def split(
    conversations: Iterable[Conversation], validation: float, say: Callable[[str], object] = lambda _: None
) -> tuple[list[Conversation], list[Conversation]]:
    """For training and for validation, by the hash of the messages; at least one on each side.

    Equal ones are dropped, which `say` is told, as it is of answers that are empty.
    """
    unique, n = {}, 0
    for each in conversations:
        unique[digest_of(each)] = each
        n += 1
    if line := repetitions(n - len(unique), n, "conversations"):
        say(line)
    if line := _empty(unique.values()):
        say(line)
    if len(unique) < 2:
        raise DataError(
            f"{len(unique)} conversation{'s' * (not unique)}, expected at least 2 different ones: "
            "one is held out for validation"
        )
    order = sorted(unique)
    held_out = [key for key in order if int.from_bytes(key[:8]) < validation * 2**64] or order[:1]
    held_out = held_out[: len(order) - 1]
    chosen = set(held_out)
    return [each for key, each in unique.items() if key not in chosen], [unique[key] for key in held_out]


def _empty(conversations: Iterable[Conversation]) -> str:
    """The note on empty answers that are learnt; "" if there are none."""
    answers = [said for each in conversations for said in each.messages if said["role"] == "assistant"]
    n = sum(said.get("weight") != 0 and not _says_something(said) for said in answers)
    are, them = ("is", "it") if n == 1 else ("are", "them")
    found = f"{n:,} of {len(answers):,} answers {are} empty, and the model learns to say nothing there"
    return f'{found}; leave {them} out, or give {them} "weight": 0' if n else ""


def _says_something(answer: dict[str, Any]) -> bool:
    said = answer.get("content")
    said = said.strip() if isinstance(said, str) else said  # a list has parts
    return bool(said or any(answer.get(name) for name in ("tool_calls", *REASONING)))


def digest_of(talk: Conversation) -> bytes:
    said = [talk.messages, talk.offered] if talk.offered else talk.messages
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()
