"""Conversations as token ids, of which only the answers count, and rows that hold several of them.

The tokens are those that the engine produces for the same messages (`bitnet_runtime.chat.template`, with the
exported template), so training and inference see the same prompts. A row is filled with whole
conversations. `Transformer` keeps them apart by their numbers: each sees only itself, at
the positions it would have alone, so that packing changes no logit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Tokenizer

from bitnet.data.conversations import Conversation, Messages, digest_of
from bitnet.data.dataset import IGNORED
from bitnet.data.files import DataError
from bitnet.data.packing import Dialogue, best_fit, filled
from bitnet.data.tokenizer import defaults, separator, vocabulary_size
from bitnet_runtime.chat.template import REASONING, ChatTemplate
from bitnet_runtime.errors import InvalidParameterError, TemplateError, TokenizerError
from bitnet_runtime.tokenizer.text import Tokenizer as EngineTokenizer

if TYPE_CHECKING:
    from torch import Tensor

START, END = "<|im_start|>", "<|im_end|>"
KNOWN_ROLES = (  # otherwise a typo such as "sytem" would become a speaker
    "{% if message.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('it knows the roles system, user, assistant and tool') }}{% endif %}"
)
CHATML = (
    "{{ bos_token }}{% for message in messages %}" + KNOWN_ROLES + "<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template given to a model without one."""


def unwritten(conversations: Sequence[Conversation], template: str) -> str:
    """The note on reasoning fields that the template leaves out; "" if there are none."""
    found = sum(any(m.get(name) for m in each.messages for name in REASONING) for each in conversations)
    if not found or any(name in template for name in REASONING):
        return ""
    return (
        f"{found:,} of {len(conversations):,} conversations have reasoning beside their answers, which the chat "
        "template does not write; put what should be learnt of it into the content"
    )


def with_template(
    words: Tokenizer, template: str | None, generation: dict[str, Any], default: str = CHATML
) -> tuple[str, dict[str, Any]]:
    """Template and generation defaults for training. Without a template, CHATML's two tokens are added to `words`.

    default: the template for a model without one, with these two tokens.
    """
    generation = dict(defaults(words, generation))
    first = separator(words, generation)
    named = {"bos_token": words.id_to_token(first)} | dict(generation.get("special_tokens") or {})
    ends = list(generation.get("eos_token_ids") or [])
    if template is None:
        template = default
        words.add_special_tokens([START, END])
        ends = [words.token_to_id(END), *ends]
        named["eos_token"] = END
    return template, generation | {"eos_token_ids": ends, "special_tokens": named}


class Encoder:
    """Encodes messages to token ids as the engine does. Raises DataError naming file and line."""

    def __init__(self, words: Tokenizer, template: str, generation: dict[str, Any]) -> None:
        self._words = EngineTokenizer(words.to_str().encode(), vocabulary_size(words))
        self._template = ChatTemplate(template)
        self.template, self._named = template, generation["special_tokens"]
        self._ends, self._special = set(generation["eos_token_ids"]), set(self._words.special_ids())

    def encode(
        self, conversation: Conversation, apart: bool = False, context: int | None = None, since: int = 0
    ) -> list[Dialogue]:
        """One sequence, or several if the template renders an answer differently once others follow.

        (Some leave out the reasoning of earlier answers.) An answer counts up to its end token; one of weight 0 does
        not. apart: each answer is a separate sequence. context: answers after the first one that starts beyond it are
        skipped, as encoding each takes as long as everything before it. since: answers before this message do not
        count.
        """
        messages, where, _ = conversation
        found: list[tuple[list[int], list[tuple[int, int]]]] = []
        for i, message in enumerate(messages):
            if i < since or message["role"] != "assistant" or message.get("weight") == 0:
                continue
            prompt = self._tokens(messages[:i], conversation, ask=True)
            ids = self._tokens(messages[: i + 1], conversation, ask=False)
            ids = ids if ids[: len(prompt)] == prompt else self._apart(prompt, ids)
            if not ids:
                raise DataError(f"{where}: the chat template does not write answer {i + 1} after the prompt for it")
            end = next((at + 1 for at in range(len(prompt), len(ids)) if ids[at] in self._ends), len(ids))
            if not apart and found and prompt[: len(found[-1][0])] == found[-1][0]:
                spans = found.pop()[1]
            else:
                spans = []
            found.append((ids[:end], [*spans, (len(prompt), end)]))
            if context is not None and len(prompt) > context:
                break
        return [_dialogue(ids, spans) for ids, spans in found]

    def _apart(self, prompt: list[int], ids: list[int]) -> list[int]:
        """For a token that spans the end of the prompt, such as one of two line breaks: the prompt, then the rest of
        `ids` in separate tokens, as the engine generates it. Empty if `ids` does not spell the prompt first."""
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, ids, strict=False)))
        end = next((i for i in range(same, len(ids)) if ids[i] in self._special), len(ids))
        asked, said = (self._words.decode(part) for part in (prompt[same:], ids[same:end]))
        for before in ("", "\n"):  # some tokenizers add a space to a text, but not within one
            skip = len(self._words.encode(before, add_bos=False))
            more = self._words.encode(before + said.removeprefix(asked), add_bos=False)[skip:]
            found = [*prompt, *more, *ids[end:]]
            if self._words.decode(found, skip_special=False) == self._words.decode(ids, skip_special=False):
                return found
        return []

    def text(self, dialogue: Dialogue) -> str:
        """The learnt part of a sequence, as text."""
        return self._words.decode(dialogue.ids[dialogue.counts].tolist())

    def _tokens(self, messages: Messages, talk: Conversation, ask: bool) -> list[int]:
        more: dict[str, Any] = {"tools": talk.tools, "add_generation_prompt": ask}
        try:
            return self._template.encode(messages, self._words, self._named, **more)
        except (InvalidParameterError, TemplateError, TokenizerError) as error:
            raise DataError(f"{talk.where}: {error}") from None


def _dialogue(ids: list[int], spans: list[tuple[int, int]]) -> Dialogue:
    counts = np.zeros(len(ids), bool)
    for first, last in spans:
        counts[first:last] = True
    return Dialogue(np.array(ids, np.int32), counts)


class Dialogues:
    """Encoded conversations, packed into rows. The counterpart of `bitnet.data.dataset.Tokens`."""

    def __init__(
        self, conversations: Sequence[Conversation], encoder: Encoder, words: Tokenizer, prefix: bool = False,
        context: int | None = None,
    ) -> None:  # fmt: skip
        """prefix: a row holds one conversation, and everything before its first answer is its prefix. context: that of
        the longest rows that will be requested."""
        self.prefix = prefix
        whole = [dialogue for each in conversations for dialogue in encoder.encode(each, context=context)]
        self._lengths = [len(dialogue.ids) for dialogue in whole]
        most = context + 1 if context is not None else None  # a row also holds the last input's next token
        self._all = [Dialogue(dialogue.ids[:most], dialogue.counts[:most]) for dialogue in whole]
        recipe = hashlib.sha256(words.to_str().encode() + encoder.template.encode())
        for each in conversations:  # untruncated: a run may be resumed with a longer context
            recipe.update(digest_of(each))
        self.digest = recipe.hexdigest()[:16]
        self.n_tokens = sum(len(dialogue.ids) for dialogue in self._all)
        self._answer_bytes = sum(len(encoder.text(dialogue).encode()) for dialogue in self._all)
        self._packed: tuple[int, list[list[int]]] = (0, [])

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text per token of the answers."""
        return self._answer_bytes / sum(int(dialogue.counts.sum()) for dialogue in self._all)

    def too_long(self, context: int) -> int:
        """How many do not fit a row: they are truncated, or left out if no answer would remain."""
        return sum(n - 1 > context for n in self._lengths)

    def answerless(self, context: int) -> int:
        """How many of these are left out."""
        return sum(not dialogue.counts[: context + 1].any() for dialogue in self._all)

    def windows(self, context: int) -> int:
        """The number of rows of `context` tokens."""
        return len(self._rows(context))

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, ...]:
        """`packing.filled` of these rows; with `prefix` also the length of each row's prefix, (len(indices),)."""
        rows = self._rows(context)
        inputs, targets, documents = filled(
            [enumerate(self._all[i] for i in rows[index]) for index in indices], context
        )
        if not self.prefix:
            return inputs, targets, documents
        return inputs, targets, documents, (targets != IGNORED).int().argmax(1) + 1

    def _rows(self, context: int) -> list[list[int]]:
        """The dialogues of each row."""
        if self._packed[0] != context:
            lengths = [min(len(dialogue.ids) - 1, context) for dialogue in self._all]
            learnt = [i for i, dialogue in enumerate(self._all) if dialogue.counts[1 : context + 1].any()]
            rows = best_fit({i: lengths[i] for i in learnt}, context, alone=self.prefix)
            self._packed = (context, rows)
        return self._packed[1]
