"""The part of `Model` that turns texts, and texts with images, into token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitnet_runtime.abilities import require_image_token
from bitnet_runtime.chat.tools import Tool, Tools
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.errors import InvalidParameterError, shown
from bitnet_runtime.ids import token_ids
from bitnet_runtime.images.prompts import images_of, placed, without_images
from bitnet_runtime.model_images import ModelImages
from bitnet_runtime.tokenizer.infilling import prompt_around

if TYPE_CHECKING:
    from bitnet_runtime.ids import Ids

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}, as chat templates take it. In place of a text there may be parts:
{"type": "text", "text": "…"} and {"type": "image", "image": …}, or OpenAI's "image_url" and "input_image"."""


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
        seen = require_image_token(self) if images else None
        offered = tools if isinstance(tools, Tools) else Tools.of(tools)
        plain = self._plain(messages)
        tokens = self._template.encode(
            plain, self._tokenizer, self.special_tokens, tools=offered, add_generation_prompt=add_generation_prompt,
            variables=variables,
        )  # fmt: skip
        return tokens if seen is None else placed(tokens, seen.image_token, len(images), seen.n_tokens)

    def infill_prompt(self, before: str, behind: str, max_tokens: int | None = None) -> list[int]:
        """The tokens of a prompt to which the answer is what belongs between two texts: what `infill` uses.

        Where the context has no room for both and max_tokens more (None or -1: a quarter of it), what is farthest from
        the gap is left out. Raises UnsupportedModelError: the model has no tokens to ask for it.
        """
        return prompt_around(self, before, behind, Sampling(max_tokens=max_tokens).max_tokens)[0]

    def image_prompt(self, text: str, n_images: int) -> list[int]:
        """The tokens of a prompt with images that `generate` uses, as PaliGemma learned it: image tokens, the start
        token, the text, and a line break, even after one of its own.
        """
        seen = require_image_token(self)
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
