"""Records of conversations, also in the two other forms in which many are published.

{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}    ShareGPT
{"instruction": "…", "input": "…", "output": "…"}                                      Alpaca
"""

from __future__ import annotations

from typing import Any

SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
TALKS = ("messages", "conversations")
ALPACA = {"instruction", "output"}  # an input may be missing


def is_talk(record: Any) -> bool:
    """Whether a record holds a conversation, rather than text. Alpaca's may come with one text of all."""
    return isinstance(record, dict) and (
        any(name in record for name in TALKS) or (record.keys() >= ALPACA and "text" not in record)
    )


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
    answer = {"role": "assistant", "content": record["output"]}
    return {**record, "messages": [question, answer] if asked else []}


def _message(said: Any) -> Any:
    """A message of ShareGPT as one of ours; anything else as it is."""
    speaker = said.get("from") if isinstance(said, dict) and isinstance(said.get("value"), str) else None
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        return said
    others = {name: value for name, value in said.items() if name not in ("from", "value")}
    return {"role": SPEAKERS[speaker], "content": said["value"], **others}
