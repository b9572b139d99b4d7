"""Which runs benchmarks/scaling.py makes, and in which order: a function of the finished ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from qat_gap import FULL, model_bytes, parameters

from bitnet.config import ModelConfig

VOCABULARY = 2048  # the same for all sizes, so that nats are comparable
CONTEXT = 256
ARMS = ("full", "ternary")


@dataclass(frozen=True)
class Size:
    """A model of the family: heads of size 64, a third as many KV heads, FFNs of 2.75 times the width."""

    config: ModelConfig
    sequences: int  # per optimizer step
    rates: dict[str, float]  # start of the search, by arm

    @classmethod
    def of(cls, heads: int, layers: int, sequences: int, full: float, ternary: float) -> Self:
        config = ModelConfig(
            vocab_size=VOCABULARY, dim=64 * heads, n_layers=layers, n_heads=heads, n_kv_heads=max(1, heads // 3),
            head_dim=64, ffn_dim=176 * heads, max_context=CONTEXT,
        )  # fmt: skip
        return cls(config, sequences, {"full": full, "ternary": ternary})

    @property
    def table(self) -> int:
        """Parameters of the embedding, which is also the head."""
        return self.config.vocab_size * self.config.dim

    @property
    def parameters(self) -> int:
        return parameters(self.config)

    @property
    def step_tokens(self) -> int:
        return self.sequences * self.config.max_context

    def model(self, arm: str) -> ModelConfig:
        return self.config if arm == "ternary" else self.config.replace(**FULL)

    def bytes(self, arm: str) -> int:
        return model_bytes(self.model(arm))


SIZES = {
    "300k": Size.of(1, 4, 16, 8e-3, 16e-3),
    "1m": Size.of(2, 4, 32, 8e-3, 8e-3),
    "3m": Size.of(3, 6, 64, 8e-3, 8e-3),
    "10m": Size.of(6, 6, 128, 8e-3, 8e-3),
    "30m": Size.of(9, 8, 256, 8e-3, 8e-3),
    "quick": Size(
        ModelConfig(
            vocab_size=VOCABULARY, dim=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, ffn_dim=24, max_context=32,
        ), 8, {"full": 8e-3, "ternary": 8e-3},
    ),
}  # fmt: skip
"""Batches grow with the size: small steps take about the same time whatever their batch, and with some 2,400 to 6,400
steps at 20 tokens per parameter, fewer tokens per step would gain little."""


@dataclass(frozen=True)
class Cell:
    """A size at one training length, both arms."""

    size: str
    each: float  # tokens per parameter
    seeds: int
    search: bool = True  # until the best rate beats half and twice itself; else only the rate of `rate_of`
    rate_of: str = ""  # start from this size's best rate at 20 tokens per parameter; "": from that in SIZES

    @property
    def name(self) -> str:
        return f"{self.size}@{self.each:g}"

    @property
    def steps(self) -> int:
        size = SIZES[self.size]
        return max(1, round(self.each * size.parameters / size.step_tokens))

    @property
    def tokens(self) -> int:
        return self.steps * SIZES[self.size].step_tokens

    @property
    def flops(self) -> float:
        """FLOPs of the products with weights in a run, forward and backward; without those of attention."""
        return 6.0 * SIZES[self.size].parameters * self.tokens


FULL_PLAN = (
    Cell("10m", 20, 1, search=False),
    Cell("3m", 20, 1, search=False),
    Cell("1m", 20, 1, search=False),
    Cell("10m", 5, 1),
    Cell("3m", 5, 1, search=False),
    Cell("1m", 5, 1, search=False),
    Cell("300k", 20, 1, search=False),
    Cell("300k", 5, 1, search=False),
    Cell("1m", 20, 3),
    Cell("3m", 20, 3),
    Cell("10m", 20, 2),
    Cell("3m", 5, 3, rate_of="3m"),
    Cell("1m", 5, 3, rate_of="1m"),
    Cell("300k", 20, 3),
    Cell("300k", 5, 3, rate_of="300k"),
    Cell("30m", 10, 1, search=False),
)
"""The most informative first, at rates that were best at 1 and 3 million parameters. A cell may recur with more seeds
or a search."""
QUICK_PLAN = (Cell("quick", 0.05, 2), Cell("quick", 0.1, 1, search=False))


@dataclass(frozen=True)
class Planned:
    """A planned run."""

    cell: Cell
    arm: str
    rate: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.cell.name}-{self.arm}-lr{self.rate:g}-seed{self.seed}"

    @property
    def options(self) -> dict[str, Any]:
        steps = self.cell.steps
        return {
            "steps": steps, "batch": SIZES[self.cell.size].sequences, "lr": self.rate, "seed": self.seed,
            "eval-every": max(100, steps // 8), "eval-tokens": 65_536, "save-every": max(1, steps // 2), "keep": 1,
            "layers-every": 0,
        }  # fmt: skip


Losses = Mapping[str, float]
"""Losses of finished runs by name, on the text for choosing rates."""


def rates_tried(cell: Cell, arm: str, losses: Losses) -> dict[float, float]:
    """Loss of seed 0 by rate."""
    found = {}
    for name, loss in losses.items():
        head, tail = f"{cell.name}-{arm}-lr", "-seed0"
        if name.startswith(head) and name.endswith(tail):
            found[float(name[len(head) : -len(tail)])] = loss
    return found


def best_rate(cell: Cell, arm: str, losses: Losses) -> float | None:
    tried = rates_tried(cell, arm, losses)
    return min(tried, key=lambda rate: tried[rate]) if tried else None


def is_bracketed(tried: Mapping[float, float]) -> bool:
    best = min(tried, key=lambda rate: tried[rate])
    return {best / 2, 2 * best} <= tried.keys()


def start_of(cell: Cell, arm: str, losses: Losses) -> float | None:
    """The rate at which the search starts; None: it is that of another size, which is not known yet."""
    if not cell.rate_of:
        return SIZES[cell.size].rates[arm]
    other = Cell(cell.rate_of, 20, 1)
    tried = rates_tried(other, arm, losses)
    return best_rate(other, arm, losses) if tried and is_bracketed(tried) else None


def rates_missing(cell: Cell, arm: str, losses: Losses) -> list[float] | None:
    """Rates to try with seed 0; empty: the best one is known; None: the start of the search is not known."""
    start, tried = start_of(cell, arm, losses), rates_tried(cell, arm, losses)
    if start is None:
        return None
    if not cell.search:
        return [] if tried else [start]
    missing = [rate for rate in (start, start / 2, 2 * start) if rate not in tried]
    if missing:
        return missing
    best = min(tried, key=lambda rate: tried[rate])
    return [rate for rate in (best / 2, 2 * best) if rate not in tried]


def wanted(plan: Sequence[Cell], losses: Losses) -> Iterator[Planned]:
    """Runs to make next, the most informative first."""
    for cell in plan:
        missing = {arm: rates_missing(cell, arm, losses) for arm in ARMS}
        for arm in ARMS:
            yield from (Planned(cell, arm, rate, 0) for rate in missing[arm] or ())
        for seed in range(1, cell.seeds):
            for arm in ARMS:
                rate = best_rate(cell, arm, losses)
                if missing[arm] == [] and rate is not None:
                    planned = Planned(cell, arm, rate, seed)
                    if planned.name not in losses:
                        yield planned
