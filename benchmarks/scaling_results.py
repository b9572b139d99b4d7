"""Results of the finished runs of benchmarks/scaling.py: losses, gaps with intervals, a fit of the gaps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import scaling_plan
from scaling_plan import ARMS, SIZES, Cell

STUDENT = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365)
"""97.5 % points of Student's t by degrees of freedom."""

Outcomes = Mapping[str, dict[str, Any]]
Row = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and half the width of its 95 % interval; None for a single value."""
    n = len(values)
    if n == 1:
        return values[0], None
    return statistics.mean(values), STUDENT[n - 1] * statistics.stdev(values) / math.sqrt(n)


def cells_of(outcomes: Outcomes) -> list[Cell]:
    """Cells with any finished run, by size and length."""
    known = {(outcome["size"], outcome["each"]) for outcome in outcomes.values()}
    return [Cell(size, each, 1) for each in sorted({e for _, e in known}) for size in SIZES if (size, each) in known]


def rows(outcomes: Outcomes) -> list[Row]:
    """One row for each cell and arm: the seeds at its best rate, chosen on one text and measured on another."""
    losses = {name: outcome["selection"]["nats_per_token"] for name, outcome in outcomes.items()}
    found = []
    for cell in cells_of(outcomes):
        for arm in ARMS:
            tried = scaling_plan.rates_tried(cell, arm, losses)
            if not tried:
                continue
            rate, size = min(tried, key=lambda rate: tried[rate]), SIZES[cell.size]
            head = f"{cell.name}-{arm}-lr{rate:g}-seed"
            chosen = {int(name[len(head) :]): o for name, o in outcomes.items() if name.startswith(head)}
            by_seed = {seed: chosen[seed]["report"]["nats_per_token"] for seed in sorted(chosen)}
            bits = {seed: chosen[seed]["report"]["bits_per_byte"] for seed in sorted(chosen)}
            mean, half = interval([*by_seed.values()])
            found.append({
                "size": cell.size, "each": cell.each, "arm": arm, "parameters": size.parameters,
                "body": size.parameters - size.table, "tokens": cell.tokens, "steps": cell.steps, "flops": cell.flops,
                "step_tokens": size.step_tokens, "bytes": size.bytes(arm), "lr": rate, "tried": sorted(tried.items()),
                "bracketed": scaling_plan.is_bracketed(tried), "seeds": by_seed, "loss": mean, "half": half,
                "bits": bits, "bits_per_byte": statistics.mean(bits.values()),
                "bits_half": interval([*bits.values()])[1],
                "seconds": statistics.mean(o["seconds"] for o in chosen.values()),
            })  # fmt: skip
    return found


def gaps(found: Sequence[Row]) -> list[Row]:
    """One row for each cell with both arms: how much higher the loss of the ternary models is, seed by seed."""
    arms = {(row["size"], row["each"], row["arm"]): row for row in found}
    result = []
    for (size, each, arm), full in arms.items():
        ternary = arms.get((size, each, "ternary"))
        if arm != "full" or not ternary:
            continue
        both = sorted(full["seeds"].keys() & ternary["seeds"].keys())
        mean, half = interval([ternary["seeds"][seed] - full["seeds"][seed] for seed in both])
        same = {"size": size, "each": each, **{name: full[name] for name in ("parameters", "body", "tokens", "flops")}}
        result.append(same | {
            "seeds": len(both), "gap": mean, "half": half,
            "share": mean / statistics.mean(full["seeds"][seed] for seed in both),
            "bits": statistics.mean(ternary["bits"][seed] - full["bits"][seed] for seed in both),
            "multiplier": multiplier(ternary, [row for row in found if row["arm"] == "full" and row["each"] == each]),
        })  # fmt: skip
    return result


def multiplier(ternary: Row, full: Sequence[Row]) -> float | None:
    """The ratio of a ternary model's parameters to those of a full-precision model with the same loss, at the same
    tokens per parameter. Between sizes the loss is linear in the logarithm; None: it would be outside."""
    points = sorted((row["loss"], math.log(row["parameters"])) for row in full)
    if not points or not points[0][0] <= ternary["loss"] <= points[-1][0]:
        return None
    same = float(np.interp(ternary["loss"], *zip(*points, strict=True)))
    return float(ternary["parameters"] / math.exp(same))


def fit(found: Sequence[Row], name: str) -> Row | None:
    """gap = c · N^-a · D^-b by least squares of logarithms, on all sizes but the largest, which is predicted.

    name: which N, "parameters" or "body". None: fewer than four cells to fit, none to predict, a gap without a
    logarithm, or a single number of tokens per parameter, with which D grows as N and any a + b is the same.
    """
    largest = max((row["parameters"] for row in found), default=0)
    known = [row for row in found if row["parameters"] < largest]
    if len(known) < 4 or any(len({row[key] for row in known}) < 2 for key in (name, "each")):
        return None
    if any(row["gap"] <= 0 for row in known):
        return None

    def terms(row: Row) -> list[float]:
        return [1.0, -math.log(row[name]), -math.log(row["tokens"])]

    logs = [math.log(row["gap"]) for row in known]
    (c, a, b), *_ = np.linalg.lstsq(np.array([terms(row) for row in known]), np.array(logs), rcond=None)
    held_out = [
        {"size": row["size"], "each": row["each"], "gap": row["gap"], "half": row["half"],
         "predicted": math.exp(float(np.dot(terms(row), (c, a, b))))}
        for row in found if row["parameters"] == largest
    ]  # fmt: skip
    errors = [math.exp(float(np.dot(terms(row), (c, a, b)))) - row["gap"] for row in known]
    return {"of": name, "c": math.exp(c), "a": float(a), "b": float(b), "cells": len(known), "held_out": held_out,
            "residual": math.sqrt(statistics.mean(error**2 for error in errors))}  # fmt: skip


def results(outcomes: Outcomes) -> Row:
    found = rows(outcomes)
    between = gaps(found)
    return {
        "rows": found, "gaps": between, "fits": [f for name in ("parameters", "body") if (f := fit(between, name))],
        "devices": sorted({outcome["device"] for outcome in outcomes.values()}),
        "commits": sorted({outcome["commit"] for outcome in outcomes.values()}),
        "runs": len(outcomes), "flops": sum(Cell(o["size"], o["each"], 1).flops for o in outcomes.values()),
        "seconds": sum(outcome["seconds"] for outcome in outcomes.values()),
    }  # fmt: skip
