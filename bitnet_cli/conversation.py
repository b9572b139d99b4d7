"""`bitnet chat`: a conversation in the terminal."""

from __future__ import annotations

import bisect
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from bitnet_cli.kept import Kept, add, alone, at_the_end, from_note, somewhere, to_note
from bitnet_cli.keyboard import Lines
from bitnet_cli.notes import cut_off, end_line, larger_context, too_long, written
from bitnet_runtime.answers.stream import Stream
from bitnet_runtime.defaults import resolve
from bitnet_runtime.errors import BitnetError, ImageError, InvalidParameterError
from bitnet_runtime.images.prompts import images_of
from bitnet_runtime.model import Model
from bitnet_runtime.model_text import Message
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.terminal import escape, say, show

HELP = '''/clear         begin a new conversation
/retry         answer the last message again, with another seed
/system TEXT   set the system prompt; without TEXT there is none
/image FILE    send a picture with the next message
/save FILE     add the conversation to a .jsonl file, as `bitnet finetune --chat` reads it
/help          this text
/exit          leave (or Ctrl-D)
//TEXT         send a message that begins with a slash
"""            begin and end a message of several lines
Ctrl-C         stop the answer; twice without a message: leave'''
PASTE = "A paste of several lines is one message."
NO_PASTE = 'Each line is a message; put """ around a paste of several lines.'

NO_TEMPLATE = (
    "This model has no chat template and does not know turns: it continues your text as it stands. "
    "--chat-template FILE gives it one."
)


class Conversation:
    """The messages so far. A session holds their tokens, so only new ones are computed."""

    def __init__(self, model: Model, system: str | None, sampling: dict[str, Any], quiet: bool = False) -> None:
        self._model = model
        self._sampling = sampling
        self._quiet = quiet
        self._turns: list[Message] = []  # of user and assistant, one after the other
        self._pictures: list[str] = []  # pictures to send with the next message
        self._refused = False  # something from a pipe could not be done
        self._lacking = False  # a picture named in a pipe is missing: the next message would refer to nothing
        self._opening: list[Message] = []  # the system message
        self._unseen = 0  # how many of them the model no longer sees
        self._tell(system or "")

    def restore(self, note: bytes, keep_system: bool) -> None:
        """Continue the conversation of a session file. Raises SessionFileError."""
        opening, self._turns, self._unseen = from_note(note)
        self._opening = opening if keep_system else self._opening
        turns = len(self._turns) // 2
        self._note(f"[{turns} turn{'s' * (turns != 1)} so far]")

    def run(self, session: Session, keep: Kept | None = None) -> int:
        """Read, answer, again, until /exit or the end of input; then the session is closed. Ctrl-C twice raises.

        keep: a file that the session and the conversation are written to before.
        Returns the exit code: 1 when something that a pipe asked for could not be done.
        """
        self._session = session
        self._lines = Lines(self._quiet)
        if not self._model.has_template:
            self._note(NO_TEMPLATE)
        if self._lines.typed:
            self._note("/help lists the commands")
        with session, at_the_end(lambda: self._save_session(keep)) if keep else contextlib.nullcontext():
            while (entry := self._read()) is not None:
                text, is_command = entry
                if is_command:
                    if text == "/exit":
                        break
                    self._obey(text)
                elif self._lacking:
                    self._error("the message lacks its picture; it was not sent")
                    self._pictures, self._lacking = [], False
                elif text and self._answer(self._message(text)):
                    self._pictures = []
        return int(self._refused)

    def _save_session(self, keep: Kept) -> None:
        with alone(keep.path.parent):
            place = keep.place()
            if place != keep.path:
                say(f"another chat has written {escape(str(keep.path))} meanwhile; this one is in {escape(str(place))}")
            note = to_note(self._opening, self._turns, self._unseen)
            somewhere(place, lambda path: self._session.save(path, note))

    # ---- what is typed ----

    def _read(self) -> tuple[str, bool] | None:
        """A message, or a command and True; None at the end of input. Raises KeyboardInterrupt at the second Ctrl-C."""
        interrupted = False
        while True:
            try:
                text, is_command = self._lines.entry()
                text.encode()
                return text, is_command
            except UnicodeEncodeError:
                self._error("this is not UTF-8; nothing was sent")
            except EOFError:
                if self._lines.typed:
                    print(file=sys.stderr)
                return None
            except KeyboardInterrupt:
                discarded = self._lines.discarded()
                if not self._lines.typed or (interrupted and not discarded):
                    raise
                interrupted = not discarded
                say("\n(Ctrl-C again, Ctrl-D or /exit leaves)" if interrupted else "")

    def _obey(self, command: str) -> None:
        name, _, words = command.partition(" ")
        words = words.strip()
        if name == "/system":
            self._system(words)
        elif name == "/save":
            self._save(words)
        elif name == "/image":
            self._picture(words)
        elif command == "/clear":
            self._turns, self._unseen, self._pictures, self._lacking = [], 0, [], False
            self._note("a new conversation")
        elif command == "/retry":
            self._retry()
        elif command == "/help":
            say(f"{HELP}\n{PASTE if self._lines.pastes else NO_PASTE}")
        elif name in ("/clear", "/retry", "/help", "/exit"):
            self._error(f"{name} stands alone; leave out the rest, or send it as a message with a second / in front")
        else:
            self._error(f"unknown command {name}; /help lists the commands, a second / in front sends it as a message")

    def show(self, name: str) -> None:
        """Send a picture with the next message. Raises BitnetError: it cannot be read, or the model sees no images."""
        self._model.image_prompt("", 1)
        self._model.processor.bytes(name)
        self._pictures.append(name)

    def _picture(self, name: str) -> None:
        try:
            if not name:
                raise ImageError("/image FILE: name a picture")
            self.show(os.path.expanduser(name))
        except BitnetError as error:
            self._error(escape(str(error)))
            self._lacking |= not self._lines.typed
        else:
            self._note("it goes with the next message")

    def _message(self, text: str) -> Message:
        """The message with the pictures that wait for it."""
        images = [{"type": "image", "image": name} for name in self._pictures]
        return {"role": "user", "content": [*images, {"type": "text", "text": text}] if images else text}

    def _system(self, text: str) -> None:
        try:
            self._tell(text)
        except BitnetError as error:
            self._error(escape(str(error)))
        else:
            self._note("from the next answer on" if text else "no system message")

    def _tell(self, system: str) -> None:
        """Make this the system message; "": none. Raises BitnetError if the model does not accept it."""
        opening: list[Message] = [{"role": "system", "content": system}] if system else []
        if self._model.has_template:
            self._model.apply_template([*opening, {"role": "user", "content": "?"}])
        elif system:
            raise InvalidParameterError(f"{self._model.path.name} has no chat template, so no system message", "system")
        else:
            self._model.tokenize("?")
        self._opening = opening

    def _retry(self) -> None:
        if not self._turns:
            self._error("no message to answer again")
            return
        if resolve(self._sampling, self._model.defaults).temperature == 0:
            say("at temperature 0 the answer is the same for every seed")
        before, answered = self._turns[-2:], False
        del self._turns[-2:]
        self._unseen = min(self._unseen, len(self._turns))
        try:
            answered = self._answer(before[0], {"seed": None})
        finally:
            self._turns += [] if answered else before

    def _save(self, name: str) -> None:
        path = Path(os.path.expanduser(name))
        if path.suffix != ".jsonl":
            self._error("/save needs the name of a .jsonl file, to which it adds a line")
        elif not self._turns:
            self._error("nothing to save")
        else:
            try:
                add(path, [*self._opening, *self._turns])
            except (OSError, ValueError) as error:
                self._error(f"{getattr(error, 'strerror', None) or error}: {escape(str(path))}")
            else:
                self._note(f"added to {escape(str(path))}")

    # ---- what is answered ----

    def _answer(self, message: Message, changes: dict[str, Any] | None = None) -> bool:
        """Show the answer to a message. Both become part of the conversation, unless it ends before a word: False."""
        stream: Stream | None = None
        try:
            stream = self._stream(message, self._sampling | (changes or {}))
            with stream:
                for text in written(stream):
                    show(text)
        except KeyboardInterrupt:
            if not self._lines.typed:
                raise
        except BitnetError as error:
            self._error(escape(str(error)), "\n" if stream else "")
            return False
        result = stream.result if stream else None
        if result is None or (result.finish_reason == "cancelled" and not result.text and not result.reasoning):
            self._note("\n[no answer, so the message is forgotten]")
            return False
        print(flush=True)
        self._turns += [message, result.message()]
        if notice := cut_off(result, self._model, self._session.n_ctx):
            self._note(notice)
        self._note(end_line(result))
        return True

    def _stream(self, message: Message, options: dict[str, Any]) -> Stream:
        prompt = self._prompt(message)
        seen = self._seen(message, self._unseen)
        if self._model.has_template:
            return self._model.stream_chat(seen, session=self._session, **options)
        return self._model.stream(prompt, images=images_of(seen), session=self._session, **options)

    def _prompt(self, message: Message) -> list[int]:
        """The tokens of the prompt. If the context has no room for an answer, the oldest turns are dropped."""
        n_ctx = self._session.n_ctx
        whole = self._tokens(message, self._unseen)
        most = resolve(self._sampling, self._model.defaults).max_tokens
        room = n_ctx - min(n_ctx // 4, n_ctx if most is None else most)
        if len(whole) <= room:
            return whole
        alone = self._tokens(message, len(self._turns))
        if len(alone) > n_ctx:
            what = "message with the system message" if self._opening else "message"
            raise InvalidParameterError(too_long(what, len(alone), self._model, n_ctx), "prompt")
        if not self._model.has_template or self._unseen == len(self._turns):
            return alone
        # Free half of the context at once, because each change makes us compute the rest again.
        places = range(self._unseen + 2, len(self._turns), 2)
        found = bisect.bisect_left(places, True, key=lambda at: len(self._tokens(message, at)) <= n_ctx // 2)
        self._unseen = [*places, len(self._turns)][found]
        self._note(
            f"[the context of {n_ctx:,} tokens is full: the model no longer sees the oldest {self._unseen // 2} of "
            f"{len(self._turns) // 2} turns{larger_context(self._model, n_ctx)}; /clear starts over]"
        )
        return self._tokens(message, self._unseen)

    def _tokens(self, message: Message, unseen: int) -> list[int]:
        if self._model.has_template:
            return self._model.apply_template(self._seen(message, unseen))
        content = message["content"]
        if isinstance(content, str):
            return self._model.tokenize(content)
        *images, text = content
        return self._model.image_prompt(text["text"], len(images))

    def _seen(self, message: Message, unseen: int) -> list[Message]:
        """What the model sees before it answers; without a template it knows no turns."""
        return [*self._opening, *self._turns[unseen:], message] if self._model.has_template else [message]

    def _error(self, text: str, before: str = "") -> None:
        say(f"{before}error: {text}")
        self._refused |= not self._lines.typed

    def _note(self, text: str) -> None:
        if not self._quiet:
            say(text)
