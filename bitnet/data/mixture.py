"""Several sources of text in one run, each with a share of the sequences, which may change from stage to stage.

    [sources.code]
    data = ["src", "hf:of/others"]           # as --data; paths are relative to the folder of this file
    column = "content"                       # as --column
    [sources.prose]
    data = ["books.parquet"]

    [[stages]]
    until = 0.7                              # share of the run; from 1,000 on tokens
    weights = { code = 0.7, prose = 0.3 }
    [[stages]]                               # the last one lasts until the end
    weights = { code = 0.2, prose = 0.8 }

The source of sequence n follows from n and from the steps at which the weights changed, which the state of a run
records as its course. So a resumed run sees what an uninterrupted one would have seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from bitnet.data import dataset, files, finding, tokenized
from bitnet.data.corpus import DataError
from bitnet.data.dataset import Tokens, View

if TYPE_CHECKING:
    from bitnet.data.views import ViewedTokens

Weights = dict[str, float]
"""Shares of the sequences, by source; their sum is 1."""
UNITS = 1_000_000  # weights are multiples of 1/UNITS, so that counting is exact
MOST = 1e15  # largest weight, which may be a number of tokens
LEAST_TOKENS = 1000  # from here on `until` is a number of tokens, not a share


# ---- the file ----


@dataclass(frozen=True)
class Source:
    data: list[str]
    column: str = files.COLUMN


@dataclass(frozen=True)
class Stage:
    weights: Weights
    until: float = 1.0  # share of the run, or tokens


@dataclass(frozen=True)
class Mixture:
    """The sources and stages that a user asks for."""

    sources: dict[str, Source]
    stages: list[Stage]

    @classmethod
    def read(cls, file: Path) -> Self:
        """A mixture from a file. Raises DataError."""
        try:
            found = tomllib.loads(file.read_text(encoding="utf-8-sig"))
            return cls.of(found, file.parent)
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}; expected the TOML file of a mixture") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{file} is not TOML: {error}") from None
        except DataError as error:
            raise DataError(f"{file}: {error}") from None

    @classmethod
    def of(cls, found: Mapping[str, Any], folder: Path | None = None) -> Self:
        """A mixture from a table. folder: the base of relative paths; None: all are absolute."""
        _check_names(found, "the file", {"sources": dict, "stages": list})
        sources, stages = {}, []
        for name, said in found["sources"].items():
            what = f"sources.{name}"
            if isinstance(said, dict) and isinstance(alone := said.get("data"), str):
                raise DataError(f'data of {what} is {alone!r:.80}, expected a list, such as ["{alone:.80}"]')
            _check_names(said, what, {"data": list}, {"column": str})
            if not said["data"] or not all(isinstance(each, str) and each for each in said["data"]):
                raise DataError(f"data of {what} is {said['data']!r:.80}, expected a list of files, folders or globs")
            data = [finding.absolute(each, folder) if folder else each for each in said["data"]]
            sources[name] = Source(data, said.get("column", files.COLUMN))
        for number, said in enumerate(found["stages"], start=1):
            last = number == len(found["stages"])
            what = f"stage {number}"
            if last and isinstance(said, dict) and "until" in said:
                raise DataError(f"{what} has until, and is the last stage, which lasts until the end; leave it out")
            _check_names(said, what, {"weights": dict} | ({} if last else {"until": (int, float)}))
            stages.append(Stage(_shares(said["weights"], [*sources], what), float(said.get("until", 1.0))))
        mixture = cls(sources, stages)
        mixture._check()
        return mixture

    def _check(self) -> None:
        if not self.sources or not self.stages:
            raise DataError("expected at least one table [sources.NAME], and one [[stages]]")
        for name in self.sources:
            if not any(stage.weights[name] for stage in self.stages):
                raise DataError(
                    f"source {name} has no weight, or less than a millionth, in any stage; give it one, or leave it out"
                )
        tokens = [stage.until for stage in self.stages if LEAST_TOKENS <= stage.until < math.inf]
        shares = [stage.until for stage in self.stages if stage.until not in tokens]
        if (
            not all(0 < share <= 1 for share in shares)
            or shares != sorted(set(shares))
            or tokens != sorted(set(tokens))
        ):
            said = ", ".join(f"{stage.until:g}" for stage in self.stages[:-1])
            raise DataError(
                f"until is {said}, expected rising shares of the run below 1, or tokens from {LEAST_TOKENS:,} on"
            )

    def to_dict(self) -> dict[str, Any]:
        """The table, as `of` takes it."""
        found = dataclasses.asdict(self)
        del found["stages"][-1]["until"]
        return found

    def weights_at(self, share: float, tokens: float) -> Weights:
        """The weights of the stage at a place in the run."""
        for stage in self.stages[:-1]:
            if (tokens if stage.until >= LEAST_TOKENS else share) < stage.until:
                return stage.weights
        return self.stages[-1].weights


KINDS: dict[Any, str] = {dict: "a table", list: "a list", str: "text"}


def _check_names(
    found: Any, what: str, needed: Mapping[str, type | tuple[type, ...]], others: Mapping[str, type] | None = None
) -> None:
    """Raises DataError if a table lacks a name, or has an unknown one, or a value of another type."""
    known = {**(others or {}), **needed}
    if not isinstance(found, dict):
        raise DataError(f"{what} is {found!r:.80}, expected a table")
    for name in needed.keys() - found.keys():
        raise DataError(f"{what} has no {name}, expected {', '.join(needed)}")
    for name, value in found.items():
        if name not in known:
            raise DataError(f"{what} has {name} = {value!r:.80}, expected {', '.join(known)}, as docs/data.md has them")
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise DataError(f"{name} of {what} is {value!r:.80}, expected {KINDS.get(known[name], 'a number')}")


def _shares(weights: Mapping[str, Any], names: Sequence[str], what: str) -> Weights:
    """Weights of all sources, with the sum 1."""
    for name, weight in weights.items():
        if name not in names:
            raise DataError(f"weights of {what} have {name!r}, expected names of sources: {', '.join(names)}")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= MOST:
            raise DataError(f"the weight of {name} in {what} is {weight!r}, expected a number from 0 to {MOST:g}")
    if not (total := sum(weights.values())) > 0:
        raise DataError(f"the weights of {what} are all 0")
    return {name: round(weights.get(name, 0) / total * UNITS) / UNITS for name in names}


# ---- token ids ----


@dataclass(frozen=True)
class Sources:
    """The token ids of one side of a mixture, training or validation."""

    mixture: Mixture
    parts: dict[str, Tokens]
    view: View | None = None

    @property
    def seen(self) -> dict[str, Tokens | ViewedTokens]:
        """The data to evaluate on, by source."""
        from bitnet.data.views import ViewedTokens

        return {name: ViewedTokens(part, self.view) if self.view else part for name, part in self.parts.items()}

    @property
    def first(self) -> int:
        """The token before every document."""
        return next(iter(self.parts.values())).first

    @property
    def n_tokens(self) -> int:
        return sum(part.n_tokens for part in self.parts.values())

    @property
    def digest(self) -> str:
        """A hash of texts and tokenizer, but not of weights, which may change."""
        return digest_of({name: part.digest for name, part in self.parts.items()})

    @property
    def weights(self) -> Weights:
        """The weights of the mean held-out loss: those of the last stage, which the run aims at."""
        return self.mixture.stages[-1].weights

    def to_dict(self) -> dict[str, Any]:
        return {name: part.to_dict() for name, part in self.parts.items()}

    def times(self, tokens: int) -> dict[str, float]:
        """How many times a run of `tokens` tokens sees each source."""
        seen, before = dict.fromkeys(self.parts, 0.0), 0.0
        for stage in self.mixture.stages:
            end = tokens if stage is self.mixture.stages[-1] else stage.until
            end = max(before, min(tokens, end * tokens if end <= 1 else end))
            for name, part in self.parts.items():
                seen[name] += stage.weights[name] * (end - before) / part.n_tokens
            before = end
        return seen


def digest_of(digests: Mapping[str, str]) -> str:
    """The digest that sources have whose parts have these digests."""
    named = "".join(f"{name}\0{digest}\0" for name, digest in sorted(digests.items()))
    return hashlib.sha256(named.encode()).hexdigest()[:16]


def recorded(state: Mapping[str, Any], side: str, folder: Path) -> Sources | None:
    """The token ids that a run of a mixture recorded in `state`; None unless all are in its folder, or in those that
    its sources are."""
    if "mixture" not in state:
        return None
    mixture = Mixture.of(state["mixture"])
    places = {name: tokenized.named(source.data) or folder for name, source in mixture.sources.items()}
    parts = {name: recorded_part(state, name, side, place) for name, place in places.items()}
    found = {name: part for name, part in parts.items() if part}
    return Sources(mixture, found) if len(found) == len(parts) else None


def recorded_part(state: Mapping[str, Any], name: str, side: str, folder: Path) -> Tokens | None:
    """The token ids of one source."""
    try:
        return dataset.recorded({"texts": {side: state["texts"][side][name]}}, side, folder)
    except (KeyError, TypeError):
        return None
