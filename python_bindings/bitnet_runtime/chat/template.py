"""The chat template of a file: messages in, prompt text out, within limits.

A template is a program by whoever made the file. `rendering.py` runs it in a process of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bitnet_runtime.chat.dialects import dialect
from bitnet_runtime.chat.thoughts import are_written
from bitnet_runtime.chat.tools import Tools
from bitnet_runtime.defaults import truth
from bitnet_runtime.errors import InvalidParameterError, TemplateError, shown
from bitnet_runtime.sandbox.worker import MEMORY, Worker, WorkerError
from bitnet_runtime.tokenizer.text import Tokenizer

MAX_BYTES = 256 * 1024  # of a template, as in the format
MAX_MESSAGES = 16 << 20  # bytes of messages, as JSON
BYTES = 16  # of memory for each byte of a request: four times what a character may take, as text and as parts of it
OWN = frozenset({"messages", "tools", "add_generation_prompt"})  # variables of a template that are given as such
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of thoughts in a message
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})  # what every template may be given
MOST_TEXT = 1 << 19  # characters that a template may make, and 4 for each byte of the messages


class ChatTemplate:
    """A chat template. Safe to share between threads."""

    def __init__(self, source: str) -> None:
        if len(source.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise TemplateError(f"the chat template has {len(source)} characters, expected at most {MAX_BYTES} bytes")
        self.source = source
        self.dialect = dialect(source)
        self.thinks = are_written(source)
        # Its own: nobody waits for the template of another model. It ends with this object.
        self._worker = Worker(str(Path(__file__).with_name("rendering.py")), ("jinja2", "markupsafe"))

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        tokenizer: Tokenizer,
        special_tokens: Mapping[str, str],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of the prompt that asks for the next answer; or of the messages alone, to learn from.

        tools: that the answer may call. variables: more of the template's, such as enable_thinking.
        special_tokens: variables of the template such as eos_token, and the texts of these tokens.
        What the messages say stays plain text, even where it spells a special token, or would once the
        template joined or left out parts of it. A template that itself writes the first character of a
        special token and takes the rest from a message, as in "<|{{ role }}|>", makes that token.
        """
        text = self.render(
            messages, special_tokens, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables,
            change=tokenizer.shield,
        )  # fmt: skip
        return tokenizer.encode(text, add_bos=False, shielded=True)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        change: Callable[[str], str] = str,
    ) -> str:
        """The prompt as text. change: applied first to every text of a message, a tool or a variable."""
        write = partial(
            self._text, special_tokens=special_tokens, tools=tools, add_generation_prompt=add_generation_prompt,
            variables=variables,
        )  # fmt: skip
        text = write(messages, change=change)
        _check_roles(messages, write)
        return text

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        special_tokens: Mapping[str, str],
        tools: Tools | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None,
        change: Callable[[str], str],
    ) -> str:
        if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
            raise InvalidParameterError(f"messages is {messages!r:.100}, expected a list of messages", "messages")
        for message in messages:
            if not isinstance(message, Mapping) or not is_message(message):
                raise InvalidParameterError(
                    f'messages has {shown(message)}, expected {{"role": "user", "content": "…"}}', "messages"
                )
        truth("add_generation_prompt", add_generation_prompt)
        _check_variables({} if variables is None else variables)
        if "developer" not in self.source:  # OpenAI's newer name
            messages = [{**each, "role": "system"} if each["role"] == "developer" else each for each in messages]
        history = re.search(r"\btool_calls\b", self.source) is not None
        try:
            told = self.dialect.messages([_as_templates_expect(message) for message in messages], tools, history)
            offered = [each.entry() for each in tools.functions] if tools and self.dialect.told else None
            expected = {"tools": offered, "messages": told, "more": variables or {}}
            size = len(_json(_map_text(expected, str)))
            if size > MAX_MESSAGES:
                raise ValueError(f"they have {size} bytes as JSON, expected at most {MAX_MESSAGES}")
            given = _json(_map_text(expected, change))
        except InvalidParameterError:
            raise
        except RecursionError:
            why = "messages, or tools beside them, are nested too deeply, expected some ten levels"
            raise InvalidParameterError(why, "messages") from None
        except (TypeError, ValueError) as error:
            raise InvalidParameterError(f"messages: {error}", "messages") from None
        more: dict[str, Any] = {"documents": None}  # as in apply_chat_template
        more |= {"add_generation_prompt": add_generation_prompt, **special_tokens}
        asked = {"source": self.source, "most": MOST_TEXT + 4 * len(given), "variables": more}
        return self._render(_json(asked)[:-2] + b", " + given[1:] + b"}", messages)

    def _render(self, request: bytes, messages: Sequence[Mapping[str, Any]]) -> str:
        try:
            answer = self._worker.ask(request, memory=MEMORY + BYTES * len(request))
            reply = json.loads(answer.decode("utf-8", "surrogatepass"))
        except WorkerError as error:
            reply = {"error": f"failed: {error}"}
        if "error" not in reply:
            return str(reply["text"])
        wrong = f"the chat template {reply['error']}"
        if reply["error"].startswith("is broken"):
            broken = TemplateError(
                f"{wrong}; correct it, or give another: --chat-template, chat_template of Model.load"
            )
            broken.fault = reply["error"]
            raise broken
        roles = ", ".join(str(message["role"]) for message in messages[:8])
        raise TemplateError(
            f"{wrong}; the roles given were {roles:.200}"
            f"{', …' if len(messages) > 8 else ''}; most templates take user and assistant in turn, "
            f"after at most one system message"
        )


def _check_roles(messages: Sequence[Mapping[str, Any]], write: Callable[..., str]) -> None:
    """Raises InvalidParameterError: a message is lost, as the template does not know its role.

    write: makes the prompt. Whether it has such a message shows with a number as its content.
    """
    rare = {str(10**9 + i): each["role"] for i, each in enumerate(messages) if each["role"] not in ROLES}
    if not rare:
        return
    numbers = iter(rare)
    told = [each if each["role"] in ROLES else {**each, "content": next(numbers)} for each in messages]
    try:
        text = write(told, change=str)
    except TemplateError:  # it needs the true content
        return
    if lost := [role for number, role in rare.items() if number not in text]:
        raise InvalidParameterError(
            f"messages has the role {shown(lost[0])}, and the chat template leaves out what it says; "
            "expected system, user, assistant or tool",
            "messages",
        )


def _check_variables(variables: object) -> None:
    """Raises InvalidParameterError: a template cannot have these."""
    if not isinstance(variables, Mapping):
        found = shown(variables)
        raise InvalidParameterError(
            f'variables is {found}, expected a dictionary, as in {{"enable_thinking": False}}', "variables"
        )
    if own := OWN & variables.keys():
        raise InvalidParameterError(
            f"a template's {min(own)} cannot be given as a variable, expected others, such as enable_thinking",
            "variables",
        )
    try:
        _json(_map_text(variables, str))
    except RecursionError:
        raise InvalidParameterError("variables are nested too deeply, expected some ten levels", "variables") from None
    except (TypeError, ValueError) as error:
        raise InvalidParameterError(f"variables: {error}", "variables") from None


def is_message(message: Mapping[str, Any]) -> bool:
    """Whether it has a role and a content: a text, parts such as {"type": "text", "text": "…"}, thoughts or calls."""
    content = message.get("content")
    if content is None:
        said = message.get("role") == "assistant" and any(message.get(name) for name in ("tool_calls", *REASONING))
    elif isinstance(content, (list, tuple)):
        said = all(isinstance(part, Mapping) and isinstance(part.get("type"), str) for part in content)
    else:
        said = isinstance(content, str)
    return said and isinstance(message.get("role"), str)


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def _as_templates_expect(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without fields that are None, its reasoning under the names that templates know (as transformers 5).

    An empty list of calls goes too: some templates take its presence for a call.
    """
    given = {key: value for key, value in message.items() if value is not None and (value or key != "tool_calls")}
    reasoning = next((given[name] for name in REASONING if name in given), None)
    return given if reasoning is None else {"thinking": reasoning, **given, "reasoning_content": reasoning}


def _map_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with `change` applied to every text inside dictionaries and lists, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"a key is {wrong[0]!r:.80}, expected a text")
        return {change(key): _map_text(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_text(item, change) for item in value]
    return value
