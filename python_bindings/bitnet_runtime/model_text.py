"""The part of `Model` that turns texts, and texts with images, into token ids."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_runtime.abilities import require_embedding, require_images, require_next_token
from bitnet_runtime.errors import (
    ContextLengthError,
    InvalidParameterError,
    ModelFormatError,
    UnsupportedModelError,
    shown,
)
from bitnet_runtime.ids import NO_TOKEN, token_ids
from bitnet_runtime.image_prompts import images_of, placed, without_images
from bitnet_runtime.images import count
from bitnet_runtime.infilling import Gap, around, gap_of
from bitnet_runtime.model_images import ModelImages
from bitnet_runtime.once import once
from bitnet_runtime.tools import Tool, Tools

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.ids import Ids, Prompt
    from bitnet_runtime.image_info import ImageInfo
    from bitnet_runtime.images import Image

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}, as chat templates take it. In place of a text there may be parts:
{"type": "text", "text": "…"} and {"type": "image", "image": …}, or OpenAI's "image_url" and "input_image"."""


SIDES = ("left", "right")
FARTHEST = 32  # characters for a token of the context: what is farther from a gap is not looked at
COUNTED = 100_000  # characters, whose tokens are made in a tenth of a second


class Ready(NamedTuple):
    """A prompt ready to be computed."""

    tokens: list[int]  # -1 where a vector of an image stands
    pixels: NDArray[np.float32] | None = None  # of the images


class ModelText(ModelImages):
    """Texts to token ids and back."""

    def tokenize(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of a text. `add_bos`: begin with the model's start token, if it has one.

        Special tokens written in the text are plain text unless `parse_special`.
        """
        if not isinstance(text, str):
            raise InvalidParameterError(f"text is {shown(text)}, expected a string", "text")
        return self._tokenizer.encode(text, add_bos=add_bos, parse_special=parse_special)

    def detokenize(self, tokens: Ids, *, skip_special: bool = True) -> str:
        """The text of tokens."""
        return self._tokenizer.decode(token_ids(tokens, "tokens", self.vocab_size), skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """A token's text as bytes, because a character may be split among tokens; for a special token its name."""
        (token,) = token_ids([token], "token", self.vocab_size)
        return self._tokenizer.token_bytes(token)

    def apply_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The tokens of the prompt that `chat` uses, or without `add_generation_prompt` those of the messages alone.

        What the messages say never becomes a special token. The image token stands where vectors of images do.
        variables: more of the template's, such as {"enable_thinking": False}.
        """
        images = images_of(messages) if isinstance(messages, Sequence) else []
        seen = self._require_image_token() if images else None
        offered = tools if isinstance(tools, Tools) else Tools.of(tools)
        plain = self._plain(messages)
        tokens = self._template.encode(
            plain, self._tokenizer, self.special_tokens, tools=offered, add_generation_prompt=add_generation_prompt,
            variables=variables,
        )  # fmt: skip
        return tokens if seen is None else placed(tokens, seen.image_token, len(images), seen.n_tokens)

    @contextlib.contextmanager
    def counting_tools(
        self, messages: Sequence[Message], tools: Tools | None, prompt: Sequence[int], **asked: Any
    ) -> Iterator[None]:
        """For an error about a `prompt` that is too long: how many of its tokens the tools take."""
        try:
            yield
        except ContextLengthError as error:
            if tools is None:
                raise
            told = f"{len(prompt) - len(self.apply_template(messages, **asked))} of them tell of the tools"
            some = "; ".join(filter(None, [error.some, told]))
            raise ContextLengthError(error.n_prompt, error.n_ctx, most=error.most, some=some) from None

    def infill_prompt(self, before: str, behind: str, max_tokens: int | None = None) -> list[int]:
        """The tokens of a prompt to which the answer is what belongs between two texts: what `infill` uses.

        Where the context has no room for both and max_tokens more (None: a quarter of it), what is farthest from the
        gap is left out. Raises UnsupportedModelError: the model has no tokens to ask for it.
        """
        return self.infill_cut(before, behind, max_tokens)[0]

    def infill_cut(self, before: str, behind: str, max_tokens: int | None = None) -> tuple[list[int], bool]:
        """The result of `infill_prompt`, and whether part of either text was left out."""
        require_next_token(self)
        gap = self._gap if self.has_tokenizer else None
        if gap is None:
            raise UnsupportedModelError(
                f"{self.path.name} cannot fill in the middle: its tokenizer has no tokens for that, such as "
                "<|fim_prefix|>; `bitnet train --fim 0.5` makes a model that can"
            )
        for name, text in (("before", before), ("behind", behind)):
            if not isinstance(text, str):
                raise InvalidParameterError(f"{name} is {shown(text)}, expected a string", name)
        answer = self.n_ctx // 4 if max_tokens is None else min(max_tokens, self.n_ctx // 2)
        room = max(self.n_ctx - answer, 4)
        most = FARTHEST * room
        head, tail = before[max(0, len(before) - most) :], behind[:most]
        tokens = [self.tokenize(text, add_bos=False) for text in (head, tail)]
        prompt = around(gap, self.bos_token, tokens[0], tokens[1], room)
        whole = len(gap) + (self.bos_token is not None) + len(tokens[0]) + len(tokens[1])
        return prompt, len(prompt) < whole or len(head) < len(before) or len(tail) < len(behind)

    @once
    def _gap(self) -> Gap | None:
        return gap_of(self._tokenizer)

    def image_prompt(self, text: str, n_images: int) -> list[int]:
        """The tokens of a prompt with images that `generate` uses, as PaliGemma learned it: image tokens, the start
        token, the text, and a line break, even after one of its own.
        """
        seen = self._require_image_token()
        if type(n_images) is not int or n_images < 0:
            raise InvalidParameterError(f"n_images is {shown(n_images)}, expected a number, 0 or more", "n_images")
        return [seen.image_token] * (n_images * seen.n_tokens) + self.tokenize(text + "\n")

    def render_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | Tools | None = None,
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The same prompt as text, or without `add_generation_prompt` the messages alone; special tokens written out.

        What a message says becomes a special token when the text is parsed with special tokens.
        """
        offered = tools if isinstance(tools, Tools) else Tools.of(tools)
        return self._template.render(
            self._plain(messages), self.special_tokens, tools=offered, add_generation_prompt=add_generation_prompt,
            variables=variables,
        )  # fmt: skip

    def _plain(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Messages with their parts in the form that the template takes."""
        return without_images(messages, self._template.source) if isinstance(messages, (list, tuple)) else messages

    def ready(self, prompt: Prompt, images: Image | Sequence[Image] | None, n_ctx: int) -> Ready:
        """What is to be continued, of which there is one token at least: what `Stream` takes.

        Raises all that is wrong with a prompt, before any work.
        """
        require_next_token(self)
        if images is None or (isinstance(images, (list, tuple)) and not images):
            return Ready(self._prompt(prompt, n_ctx))
        seen, n = self._require_image_token(), count(images)
        if isinstance(prompt, str):
            self._check_length(prompt, n_ctx)
            tokens, start = self.image_prompt(prompt, n), n * seen.n_tokens
            tokens[:start] = [NO_TOKEN] * start  # alone: a tokenizer may have more of them in texts
        else:
            ids = token_ids(prompt, "prompt", self.vocab_size, or_text=True)
            tokens = placed(ids, seen.image_token, n, seen.n_tokens)
            tokens = [NO_TOKEN if token == seen.image_token else token for token in tokens]
        if len(tokens) > n_ctx:
            taken = n * seen.n_tokens
            fit = max(0, n_ctx - len(tokens) + taken) // seen.n_tokens
            some = f"{taken} of them are those of {n} images, {seen.n_tokens} each, and {fit} would fit"
            raise ContextLengthError(len(tokens), n_ctx, most=self.info.max_context, some=some)
        return Ready(tokens, self.processor.batch(images))  # only now: to decode many takes long

    def _prompt(self, prompt: Prompt, n_ctx: int) -> list[int]:
        """A prompt without images."""
        tokens = self._tokens(prompt, "prompt", n_ctx)
        if not tokens:
            found = "is empty and the model has no start token" if isinstance(prompt, str) else "is an empty list"
            raise InvalidParameterError(f"the prompt {found}; give at least one character or token id", "prompt")
        if not isinstance(prompt, str) and self.image is not None and (there := tokens.count(self.image.image_token)):
            raise InvalidParameterError(
                f"the prompt has {there} image tokens (id {self.image.image_token}), expected 0: no images are given",
                "images",
            )
        return tokens

    def _tokens(self, text: Prompt, param: str, n_ctx: int) -> list[int]:
        """Token ids of a text that has to fit the context."""
        require_embedding(self)
        if isinstance(text, str):
            self._check_length(text, n_ctx)
            tokens = self.tokenize(text)
        else:
            tokens = token_ids(text, param, self.vocab_size, or_text=True)
        if len(tokens) > n_ctx:
            raise ContextLengthError(len(tokens), n_ctx, most=self.info.max_context)
        return tokens

    def text_tokens(self, text: Prompt, n_ctx: int) -> list[int]:
        """The tokens of a text to embed: a string is padded to the length the model was trained on."""
        tokens = self._tokens(text, "text", n_ctx)
        if self._padding is None or not isinstance(text, str):
            return tokens
        length, token, left = self._padding
        filling = [token] * (length - len(tokens))
        return filling + tokens if left else tokens + filling

    @once
    def _padding(self) -> tuple[int, int, bool] | None:
        """Length of a padded text, the padding token, and whether it is on the left; FORMAT.md §5."""
        said = self._generation.get("padding")
        if said is None:
            return None
        given: dict[str, Any] = said if isinstance(said, dict) else {}
        length, token, side = given.get("length", 0), given.get("token_id", -1), given.get("side")
        ints = type(length) is type(token) is int
        if not ints or not (0 < length <= self.info.max_context and 0 <= token < self.vocab_size) or side not in SIDES:
            raise ModelFormatError(
                f'{self.path}: padding is {shown(said)}, expected {{"length": 1 to {self.info.max_context}, '
                f'"token_id": below {self.vocab_size}, "side": "left" or "right"}}'
            )
        return length, token, side == "left"

    def _check_length(self, text: str, n_ctx: int) -> None:
        """Refuse a text that is much too long before tokenizing it; a shorter one can be tokenized and counted."""
        if len(text) > COUNTED and (fewest := self._tokenizer.fewest_tokens(text)) > n_ctx:
            raise ContextLengthError(fewest, n_ctx, at_least=True, most=self.info.max_context)

    def _require_image_token(self) -> ImageInfo:
        seen = require_images(self)
        if seen.image_token < 0:
            raise UnsupportedModelError(
                f"{self.path.name} has no image token, so no images in a prompt: it compares them with texts, "
                "see Model.similarity"
            )
        return seen
