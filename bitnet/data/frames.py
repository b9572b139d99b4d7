"""Texts to embed, framed as the engine frames them; and which things are equal."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.data.corpus import DataError
from bitnet_runtime.tokenizer.edges import edges_of


class Frame(NamedTuple):
    """The tokens around a text, as the engine adds them (`bitnet_runtime.tokenizer.edges`)."""

    before: tuple[int, ...]
    behind: tuple[int, ...] = ()
    length: int = 0  # texts to embed are padded to it with `filling`, which is not masked; 0: no padding
    filling: int = 0
    left: bool = False  # pad on the left

    @classmethod
    def of(cls, words: Tokenizer, generation: Mapping[str, Any]) -> Self:
        """generation: of a packed file (export/FORMAT.md §5), or `tokenizer.defaults` of a checkpoint."""
        before, behind = map(tuple, edges_of(words, generation.get("bos_token_id")))
        filled = generation.get("padding") or {"length": 0, "token_id": 0, "side": ""}
        length, filling, left = filled["length"], filled["token_id"], filled["side"] == "left"
        return cls(before, behind, length, filling, left)

    def around(self, text: NDArray[np.int64], context: int) -> NDArray[np.int64]:
        """A text with its frame, truncated to fit."""
        ids = [*self.before, *text[: context - self.size], *self.behind]
        more = [self.filling] * (self.length - len(ids))
        return np.array([*more, *ids] if self.left else [*ids, *more])

    @property
    def size(self) -> int:
        """Tokens around a text."""
        return len(self.before) + len(self.behind)

    def check(self, context: int) -> None:
        """Raises DataError if the frame leaves no room for a text."""
        if context <= self.size:
            raise DataError(
                f"--context is {context}, and the tokens around a text take {self.size}; give {self.size + 1} or more"
            )
        if context < self.length:
            raise DataError(
                f"--context is {context}, and a text is filled up to {self.length} tokens (`padding` of the model); "
                f"give {self.length} or more"
            )


def same(things: Sequence[Hashable]) -> Tensor:
    """Which things are equal, bool (n, n)."""
    number_of: dict[Hashable, int] = {}
    number = torch.tensor([number_of.setdefault(each, len(number_of)) for each in things])
    return number == number[:, None]
