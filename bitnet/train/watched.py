"""Access to hidden values of a model for a loss."""

from __future__ import annotations

from typing import Any

from torch import nn


class Watched(nn.Module):
    """Replaces an `nn.Identity` of the model, such as `Block.qkv`, and keeps its input in `seen`.

    (A hook would not do: compiled layers skip it if other layers of the same graph have none.)
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Any = ()

    def forward(self, passing: Any) -> Any:
        self.seen = passing
        return passing
