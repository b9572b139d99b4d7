"""Prompts with two answers, of which one is preferred: records, token ids, and rows that hold several of them.

A line has one of the forms of data sets on the Hugging Face hub:

    {"prompt": "…", "chosen": "…", "rejected": "…"}                plain texts; answers continue the prompt
    {"prompt": [messages], "chosen": [answer], "rejected": [answer]}    messages, through the chat template
    {"chosen": [messages and answer], "rejected": [the same messages, another answer]}

In the last form a prompt may repeat the messages. With lists that hold only answers, a prompt may also be a text.
Whatever the form, the messages that both lists begin with are the prompt. What follows may be several messages.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.data import beside, tokenizer
from bitnet.data.conversations import Conversation, Messages, conversation, records_of
from bitnet.data.corpus import DataError, repetitions
from bitnet.data.dialogues import Encoder
from bitnet.data.files import check_characters
from bitnet.data.packing import Dialogue, best_fit, filled

if TYPE_CHECKING:
    from torch import Tensor

EXPECTED = 'expected {"prompt": "…", "chosen": "…", "rejected": "…"}, or lists of messages in their place'


class Preference(NamedTuple):
    """Two answers to a prompt: texts that continue it, or conversations with the same beginning."""

    prompt: str
    chosen: str | Conversation
    rejected: str | Conversation


def _shared(*sides: Messages) -> int:
    """How many messages two conversations begin with in common; the last of either is never one of them."""
    most = min(map(len, sides)) - 1
    return next((i for i in range(most) if sides[0][i] != sides[1][i]), most)


def read(files: Iterable[Path]) -> Iterator[Preference]:
    """The lines of .jsonl files. Raises DataError naming file and line."""
    for record, where in records_of(files, "preference"):
        prompt, chosen, rejected = (
            (record.get("prompt", []), record.get("chosen"), record.get("rejected"))
            if isinstance(record, dict)
            else [None] * 3
        )
        said = [message for part in (prompt, chosen, rejected) if isinstance(part, list) for message in part]
        if isinstance(record, dict) and beside.has_pictures(record, said):
            raise DataError(f"{where}: the preference has a picture, and --preference is for text alone; leave it out")
        if isinstance(record, dict) and record.get("system"):
            raise DataError(f'{where}: "system" stands beside the answers and would be lost; write it into the prompt')
        if isinstance(chosen, str) and isinstance(rejected, str) and isinstance(prompt, str):
            yield _of_texts(prompt, chosen, rejected, where)
        elif isinstance(chosen, list) and isinstance(rejected, list) and isinstance(prompt, str | list):
            yield _of_messages(prompt, chosen, rejected, record.get("tools"), where)
        else:
            raise DataError(f"{where}: {json.dumps(record)[:80]}, {EXPECTED}")


def _of_texts(prompt: str, chosen: str, rejected: str, where: str) -> Preference:
    check_characters(prompt + chosen + rejected, where)
    return Preference(prompt, chosen, rejected)


def _of_messages(prompt: str | list[Any], chosen: list[Any], rejected: list[Any], tools: Any, where: str) -> Preference:
    repeated = all(side[: len(prompt)] == prompt for side in (chosen, rejected))
    before = prompt if isinstance(prompt, list) and not repeated else []
    first = chosen[0] if chosen else None
    if before and all(isinstance(each, dict) and each.get("role") == "user" for each in (before[-1], first)):
        raise DataError(
            f'{where}: "prompt" ends with a message of user, and "chosen" begins with one; expected answers alone, or '
            "all messages of the prompt before each of them"
        )
    if isinstance(prompt, str) and isinstance(first, dict) and first.get("role") == "assistant":
        before = [{"role": "user", "content": prompt}]
    sides = [conversation({"messages": before + side, "tools": tools}, where) for side in (chosen, rejected)]
    same = _shared(*(side.messages for side in sides))
    answers = [side.messages[same:] for side in sides]
    if wrong := [last["role"] for *_, last in answers if last["role"] != "assistant"]:
        raise DataError(f"{where}: the last message is of {wrong[0]!r:.40}, expected an answer of assistant")
    if wrong := [first["role"] for first, *_ in answers if first["role"] != "assistant"]:
        raise DataError(
            f"{where}: the two differ first in message {same + 1}, of {wrong[0]!r:.40}; expected the same messages up "
            "to an answer of assistant"
        )
    if any(each.get("weight") == 0 for side in answers for each in side if each["role"] == "assistant"):
        raise DataError(f"{where}: an answer has the weight 0, expected two that are compared")
    asked = sides[0].messages[:same]
    return Preference(json.dumps(asked, sort_keys=True), *sides)


def split(
    preferences: Iterable[Preference], validation: float, say: Callable[[str], object] = lambda _: None
) -> tuple[list[Preference], list[Preference]]:
    """Training and validation preferences, split by the hash of the prompt, so no prompt is on both sides.

    Repetitions, and pairs of equal answers, are left out, which `say` reports. Each side has at least one prompt.
    """
    unique, n, same = {}, 0, 0
    for each in preferences:
        n += 1
        answers = [side if isinstance(side, str) else side.messages for side in each[1:]]
        if answers[0] == answers[1]:
            same += 1
        else:
            offered = [] if isinstance(each.chosen, str) else each.chosen.offered
            unique[json.dumps([each.prompt, *answers, offered], sort_keys=True)] = each
    for line in (
        repetitions(n - same - len(unique), n, "preferences"),
        f"{same:,} of {n:,} preferences have the same answer twice and were left out" if same else "",
    ):
        if line:
            say(line)
    prompts = sorted({hashlib.sha256(each.prompt.encode()).digest() for each in unique.values()})
    if len(prompts) < 2:
        raise DataError(f"{len(prompts)} different prompts, expected at least 2: one is held out for validation")
    held_out = [key for key in prompts if int.from_bytes(key[:8]) < validation * 2**64] or prompts[:1]
    chosen = set(held_out[: len(prompts) - 1])
    sides: tuple[list[Preference], list[Preference]] = ([], [])
    for each in unique.values():
        sides[hashlib.sha256(each.prompt.encode()).digest() in chosen].append(each)
    return sides


# ---- token ids and rows ----


class Spelling:
    """Encodes answers to token ids as the engine does. encoder: for conversations; None without any."""

    def __init__(self, words: Tokenizer, first: int, end: int, encoder: Encoder | None) -> None:
        self.words, self._first, self._end, self._encoder = words, first, end, encoder
        self._encode = tokenizer.encoder(words)

    def pair(self, preference: Preference) -> tuple[Dialogue, Dialogue]:
        prompt, chosen, rejected = preference
        if isinstance(chosen, str) or isinstance(rejected, str):
            return self._text(prompt, str(chosen)), self._text(prompt, str(rejected))
        same = _shared(chosen.messages, rejected.messages)
        return self._talk(chosen, same), self._talk(rejected, same)

    def _text(self, prompt: str, answer: str) -> Dialogue:
        asked, ids = self._encode([prompt, prompt + answer])
        same = next((i for i, (a, b) in enumerate(zip(asked, ids, strict=False)) if a != b), min(len(asked), len(ids)))
        ids = [self._first, *ids, self._end]
        return Dialogue(np.array(ids, np.int32), np.arange(len(ids)) > same)

    def _talk(self, talk: Conversation, since: int) -> Dialogue:
        assert self._encoder
        found = self._encoder.encode(talk, since=since)
        if len(found) > 1:
            raise DataError(
                f"{talk.where}: the chat template writes an earlier answer otherwise once others follow, so several "
                "answers are not one text; expected pairs that differ in one answer"
            )
        return found[0]


class Preferences:
    """Pairs of answers in token ids. A sequence is two rows: chosen answers, and the corresponding rejected ones.

    reference: log-probabilities of the answers before training, in nats, (n, 2).
    """

    reference: Tensor

    def __init__(self, preferences: Sequence[Preference], spelling: Spelling) -> None:
        self.pairs = [spelling.pair(each) for each in preferences]
        recipe = hashlib.sha256(spelling.words.to_str().encode())
        for text in (text for pair in self.pairs for text in pair):
            recipe.update(len(text.ids).to_bytes(8) + text.ids.tobytes() + text.counts.tobytes())
        self.digest = recipe.hexdigest()[:16]
        self.n_tokens = sum(len(text.ids) for pair in self.pairs for text in pair)
        self._packed: tuple[int, list[list[int]]] = (0, [])

    def tokens_each(self, context: int) -> int:
        """Tokens of a sequence."""
        return 2 * context

    def _lengths(self) -> NDArray[np.int64]:
        """For each pair the number of inputs of the longer answer, with its prompt."""
        return np.array([max(len(text.ids) - 1 for text in pair) for pair in self.pairs])

    def too_long(self, context: int) -> int:
        """How many do not fit a row, and are left out."""
        return int((self._lengths() > context).sum())

    def windows(self, context: int) -> int:
        """The number of sequences."""
        return len(self.rows(context))

    def rows(self, context: int) -> list[list[int]]:
        """The pairs of each sequence."""
        if self._packed[0] != context:
            lengths = {i: int(length) for i, length in enumerate(self._lengths()) if length <= context}
            self._packed = (context, best_fit(lengths, context))
        return self._packed[1]

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, ...]:
        """`packing.filled` of chosen, then of rejected answers; documents are the numbers of pairs."""
        rows = self.rows(context)
        return filled(
            [[(i, self.pairs[i][side]) for i in rows[index]] for side in (0, 1) for index in indices], context
        )
