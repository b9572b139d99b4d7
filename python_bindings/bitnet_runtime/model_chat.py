"""The part of `Model` that answers conversations, with tool calls."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack, cast

from bitnet_runtime.answers.ready import ready
from bitnet_runtime.answers.result import Result
from bitnet_runtime.answers.stream import Stream, finish
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.chat.calls import CallReader
from bitnet_runtime.chat.dialects import spaced
from bitnet_runtime.chat.thoughts import CLOSE, GAP, OPEN, Begun, ThoughtReader
from bitnet_runtime.chat.tools import Tool, Tools
from bitnet_runtime.defaults import Options, Sampling, resolve
from bitnet_runtime.errors import ContextLengthError, GrammarError, InvalidParameterError, shown
from bitnet_runtime.facts import guide_of
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.images.prompts import images_of
from bitnet_runtime.model_text import Message, ModelText
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.shape import adapter_number
from bitnet_runtime.structured import formats

if TYPE_CHECKING:
    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.images.processor import Image

TAIL = 16  # tokens in which a tag and white space are found
LOOKING = 1.0  # seconds for which of some tools is wrong: a stranger's may take long, each


class ModelChat(ModelText):
    """Answers."""

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        session: Session | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Result:
        """Answer a conversation, in the words of the file's chat template. All else as in `generate`.

        Parts of a message may be pictures: {"type": "image", "image": "cat.png"}, or as OpenAI has it
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}. They stand where the template has
        the image token, or before all else.

        tools: functions of Python, or schemas as OpenAI has them. `Result.tool_calls` says which the model asks for,
        and with what; nothing is called here. tool_choice: "auto", "none", "required", or the name of one.

        variables: more of the template's, such as {"enable_thinking": False}.

        Where the template knows <think> and </think>, what the model writes between them is `Result.reasoning`. A
        format holds for what follows.
        """
        kept: dict[str, Any] = {"session": session, "adapter": adapter, "receipt": receipt, "logprobs": logprobs}
        offered: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice}
        offered |= {"parallel_tool_calls": parallel_tool_calls, "variables": variables}
        return finish(self.stream_chat(messages, options=options, **offered, **kept, **sampling))

    def stream_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        variables: Mapping[str, Any] | None = None,
        session: Session | None = None,
        adapter: str | None = None,
        receipt: bool = False,
        logprobs: int | None = None,
        options: Sampling | None = None,
        **sampling: Unpack[Options],
    ) -> Stream:
        """`chat` as an iterator of pieces."""
        asked = Tools.of(tools, tool_choice, parallel_tool_calls)
        resolved = resolve(sampling, options, self.defaults)
        held = held_to_calls(self, asked, resolved)
        prompt, images = self.apply_template(messages, asked, variables=variables), images_of(messages)
        begun, chosen = behind_thoughts(self, begun_in(self, prompt), held)
        with counting_tools(self, messages, asked, prompt, variables=variables):
            reader = call_reader(self, asked)
            thinker = thought_reader(self, begun)
            return self._continue(prompt, images, session, adapter, receipt, chosen, reader, logprobs, thinker)

    def _continue(
        self,
        prompt: Prompt,
        images: Image | Sequence[Image] | None,
        session: Session | None,
        adapter: str | None,
        receipt: bool,
        options: Sampling,
        reader: CallReader | None = None,
        logprobs: int | None = None,
        thinker: ThoughtReader | None = None,
    ) -> Stream:
        """`Model.stream` with resolved options."""
        if session is not None and (not isinstance(session, Session) or session._model is not self):
            raise InvalidParameterError(f"session is {shown(session)}, expected one that this model made", "session")
        if session is not None and adapter not in (None, session.adapter):
            found = f"of {session.adapter!r}" if session.adapter else "without one"
            raise InvalidParameterError(f"adapter is {shown(adapter)}, and the session is {found}", "adapter")
        adapter_number(self, adapter)
        made = ready(self, prompt, images, session)
        more: dict[str, Any] = {"receipt": receipt, "adapter": adapter, "reader": reader, "logprobs": logprobs}
        more["thinker"] = thinker
        return Stream(Writer(self, made.tokens, options, session, made.pixels, **more))


def held_to_calls(model: ModelText, tools: Tools | None, options: Sampling) -> Sampling:
    """The options of an answer that follows the rules for calling tools."""
    if tools is None:
        return options
    if options.regex is not None or options.grammar is not None:
        raise InvalidParameterError("tools go with json_schema, not with regex or grammar", "tools")
    schema = cast("str | None", options.json_schema)
    grammar = model._template.dialect.grammar(tools, schema, _call_tokens(model))
    if grammar is None:
        return options
    held = resolve({"json_schema": None, "grammar": grammar}, options)
    try:
        guide_of(model, held)
    except GrammarError as error:
        guide_of(model, options)  # raises the error of the schema itself, by its own name
        _name_wrong_tool(model, tools)
        form = f"the form of tools{' with json_schema' * (schema is not None)}"
        raise GrammarError(str(error).replace("grammar", form, 1), "tools") from None
    return held


def _name_wrong_tool(model: ModelText, tools: Tools) -> None:
    """Raises GrammarError: the schema of a tool is wrong by itself, if that is found quickly."""
    end = time.monotonic() + LOOKING
    for function in tools.callable():
        if time.monotonic() < end:
            try:
                schema = spaced(function.parameters, lenient=not function.strict)
                guide_of(model, Sampling(json_schema=json.dumps(schema)))
            except GrammarError as error:
                why = str(error).removeprefix("json_schema ")
                raise GrammarError(f"the schema of the tool {function.name} {why}", "tools") from None


def call_reader(model: ModelText, tools: Tools | None) -> CallReader | None:
    """The reader that extracts tool calls from an answer."""
    if tools is None:
        return None
    names = [function.name for function in tools.callable()]
    shown = {token: text for text, token in _call_tokens(model).items()}
    return CallReader(model._template.dialect, names, None if tools.parallel else 1, shown)


def begun_in(model: ModelText, prompt: Sequence[int], text: str = "") -> Begun | None:
    """Where the output begins that follows a prompt, and a text that is not in it; None: the model does not think."""
    if not model._template.thinks:
        return None
    tokens = [token for token in prompt[-TAIL:] if token != NO_TOKEN]
    end = model._tokenizer.decode(tokens, skip_special=False).rstrip()
    return Begun(end.endswith(OPEN), text, end.endswith(CLOSE))


def behind_thoughts(model: ModelText, begun: Begun | None, options: Sampling) -> tuple[Begun | None, Sampling]:
    """The same for an answer whose format holds once its thoughts have ended, if there are any. Raises GrammarError."""
    asked = formats.held_to(options)
    if begun is None or asked is None:
        return begun, options
    reader = ThoughtReader(begun)
    if begun.closed or reader.answers:
        return None, options
    special = _tags(model)
    if asked[0] == "grammar" and not reader.thinks:  # it may be one that says itself what thoughts are
        guide, opens = model._grammars.guide(*asked), [model._grammars.encode(OPEN)]
        if any(map(guide.admits, [*opens, [special[OPEN]]] if OPEN in special else opens)):
            return begun, options
    grammar = formats.behind_thoughts(*asked, reader.thinks, (OPEN, CLOSE), special, GAP)
    held = resolve({"json_schema": None, "regex": None, "grammar": grammar}, options)
    try:
        guide_of(model, held)
    except GrammarError:
        guide_of(model, options)  # raises the error of the format itself, by its own name
        raise
    return begun._replace(held=True), held


def thought_reader(model: ModelText, begun: Begun | None) -> ThoughtReader | None:
    """The reader that extracts thoughts from an answer."""
    if begun is None:
        return None
    return ThoughtReader(begun, {token: tag for tag, token in _tags(model).items()})


def _tags(model: ModelText) -> dict[str, int]:
    """Special tokens that stand around thoughts."""
    return model._tokenizer.special_ids_of((OPEN, CLOSE))


def _call_tokens(model: ModelText) -> dict[str, int]:
    """Special tokens that stand around calls."""
    dialect = model._template.dialect
    return model._tokenizer.special_ids_of((dialect.opens, dialect.closes))


@contextlib.contextmanager
def counting_tools(
    model: ModelText, messages: Sequence[Message], tools: Tools | None, prompt: Sequence[int], **asked: Any
) -> Iterator[None]:
    """For an error about a `prompt` that is too long: how many of its tokens the tools take."""
    try:
        yield
    except ContextLengthError as error:
        if tools is None:
            raise
        told = f"{len(prompt) - len(model.apply_template(messages, **asked))} of them tell of the tools"
        some = "; ".join(filter(None, [error.some, told]))
        raise ContextLengthError(error.n_prompt, error.n_ctx, most=error.most, some=some) from None
