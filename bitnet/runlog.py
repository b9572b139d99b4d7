"""What a run leaves to look at: log.jsonl, one object per step or evaluation, and loss.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Log:
    """Appends to log.jsonl. Opened at step n, it first drops what a run wrote after n, or on ending at n."""

    def __init__(self, file: Path, step: int) -> None:
        self.records = [r for r in read(file) if r["step"] <= step and not r.get("final")]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in self.records), encoding="utf-8")
        partial.rename(file)
        self._out = file.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self._out.write(json.dumps(record) + "\n")

    def close(self) -> None:
        self._out.close()


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut off is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def plot(records: list[dict[str, Any]], file: Path, title: str) -> None:
    """Loss of training and validation over the tokens seen, and the learning rate, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    steps = [r for r in records if "loss" in r]
    checks = [r for r in records if "validation" in r]
    figure, loss_axis = plt.subplots(figsize=(8, 4.5), dpi=120)
    loss_axis.plot([r["tokens"] for r in steps], [r["loss"] for r in steps], lw=0.6, color="#9db4c8", label="training")
    loss_axis.plot(
        [r["tokens"] for r in checks], [r["validation"]["nats_per_token"] for r in checks],
        marker="o", ms=3, color="#12446b", label="validation",
    )  # fmt: skip
    loss_axis.set(xlabel="tokens", ylabel="nats per token", title=title)
    loss_axis.grid(alpha=0.2)
    loss_axis.legend(frameon=False, loc="upper center")
    rate_axis = loss_axis.twinx()
    rate_axis.plot([r["tokens"] for r in steps], [r["lr"] for r in steps], lw=0.8, ls=":", color="#b0703c")
    rate_axis.set_ylabel("learning rate", color="#b0703c")
    figure.tight_layout()
    figure.savefig(file)
    plt.close(figure)
