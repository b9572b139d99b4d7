"""What a loss reads of a model's inside."""

from __future__ import annotations

from typing import Any

from torch import nn


class Watched(nn.Module):
    """Takes the place of an `nn.Identity` of the model, such as `Block.qkv`, and keeps what passes: `seen`.

    (A hook would do that too, but compiled layers leave out those that others like them do not have.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = ()

    def forward(self, passing: Any) -> Any:
        self.seen = passing
        return passing
