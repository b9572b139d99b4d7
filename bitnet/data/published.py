"""Records of conversations, also in the two other forms in which many are published.

{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}    ShareGPT
{"instruction": "…", "input": "…", "output": "…"}                                      Alpaca
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TALKS = ("messages", "conversations")
ALPACA = {"instruction", "output"}  # an input may be missing
OF_MESSAGES = ("role", "content", "from", "value", "weight", "tool_calls", "tool_call_id")


def is_talk(record: Any) -> bool:
    """Whether a record holds a conversation, rather than text. Alpaca's may come with one text of all."""
    return isinstance(record, dict) and (
        any(name in record for name in TALKS) or (record.keys() >= ALPACA and "text" not in record)
    )


def misspelt(record: Mapping[str, Any]) -> str:
    """What is wrong with the names in a record, of which others may have a meaning that is not ours; "": nothing.

    One is wrong if it is nearly that of a field that is read, and is missing: what it holds would be lost.
    """
    talk = next((name for name in TALKS if name in record), "")
    names = (talk, "tools") if talk else (*TALKS, "tools", "input", *ALPACA)
    said = record[talk] if talk and isinstance(record[talk], list) else []
    messages = (message for message in said if isinstance(message, dict))
    return _near(record, names) or next(filter(None, (_near(message, OF_MESSAGES) for message in messages)), "")


def _near(given: Mapping[str, Any], names: Iterable[str]) -> str:
    missing = [name for name in names if name not in given]
    for name in given:
        if name not in names and (near := get_close_matches(name, missing, 1, 0.8)):
            return f'"{name}" would be lost, expected "{near[0]}"; rename or remove it'
    return ""


def with_messages(record: Any) -> Any:
    """The record with "messages"; as it is if it has them, or has none of these forms. Nothing else is checked."""
    if not isinstance(record, dict) or "messages" in record:
        return record
    if isinstance(said := record.get("conversations"), list):
        return {**record, "messages": list(map(_message, said))}
    asked = [part for part in (record.get("instruction"), record.get("input")) if part]
    if not record.keys() >= ALPACA or record.get("history") or not all(isinstance(part, str) for part in asked):
        return record
    question = {"role": "user", "content": "\n".join(asked)}
    return {**record, "messages": [question, answered(record["output"])] if asked else []}


def answered(output: Any) -> dict[str, Any]:
    """The message that Alpaca's field is."""
    return {"role": "assistant", "content": output}


def _message(said: Any) -> Any:
    """A message of ShareGPT as one of ours; anything else as it is."""
    speaker = said.get("from") if isinstance(said, dict) and isinstance(said.get("value"), str) else None
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        return said
    others = {name: value for name, value in said.items() if name not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": said["value"], **others}
