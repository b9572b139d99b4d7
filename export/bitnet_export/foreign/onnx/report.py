"""The report on a written ONNX model and its check."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from bitnet_export.checkpoint.verify import SHORT

PROMPTS = 32  # number of prompts, of SHORT tokens


@dataclass(frozen=True)
class OnnxReport:
    """Size of the export, and its agreement with the engine: differences of log-probabilities, in nats.

    For a position in a prompt the largest counts, as most positions have only fp32 noise; in the text the mean over
    the vocabulary, the expected difference of one token. Without a head: differences of the elements of the texts'
    vectors of length 1.
    """

    form: str
    packed_bytes: int
    onnx_bytes: int  # graph and weights
    compared: int  # tokens; 0: the engine cannot run the model
    vectors: bool = False  # whether vectors were compared
    threads: int = 0  # in both
    prompts_median: float = 0.0  # of |onnxruntime - engine|
    text_mean: float = 0.0
    text_worst: float = 0.0
    floor_mean: float = 0.0  # of |onnxruntime - onnxruntime with its norms, or projections, moved by one step of fp32|
    prefill: tuple[float, float] = (0.0, 0.0)  # tokens per second in onnxruntime and in the engine, roughly
    decode: tuple[float, float] = (0.0, 0.0)  # 0: it does not generate
    images: int = 0  # images whose vectors, normalized to length 1, were compared
    images_mean: float = 0.0
    images_floor: float = 0.0
    behind: int = 0  # tokens after an image whose log-probabilities were compared
    behind_mean: float = 0.0
    behind_floor: float = 0.0
    notes: tuple[str, ...] = ()  # on what is left out

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        size = (
            f"size       {self.onnx_bytes / 1e6:.2f} MB in the form {self.form}, from {self.packed_bytes / 1e6:.2f} MB"
            + "".join(f"\nnote       {note}" for note in self.notes)
        )
        what = "vectors" if self.vectors else "log-probabilities"
        if not (self.compared or self.images):
            return size + "\nlogits     not compared: the engine cannot run this model"
        seen = []
        if self.images:
            floor = f"(rounding the norms otherwise: {self.images_floor:.1e})"
            seen = [f"images     {self.images}: vectors differ by {self.images_mean:.1e} on average {floor}"]
        if self.behind:
            floor = f"(rounding the norms otherwise: {self.behind_floor:.1e})"
            seen += [f"           {self.behind} tokens after one by {self.behind_mean:.1e} on average {floor}"]
        if not self.compared:
            return "\n".join([size, *seen])
        single = f"single tokens {self.decode[0]:.1f}, {self.decode[1]:.1f}; " if any(self.decode) else ""
        return "\n".join(
            [
                size,
                f"prompts    {PROMPTS} of at most {SHORT} tokens: {what} differ from the engine's by "
                f"{self.prompts_median:.1e} (median)",
                f"text       {self.text_mean:.1e} on average, {self.text_worst:.1e} at worst"
                f"{', prompt and single tokens' if single else ''} "
                f"(rounding the norms otherwise: {self.floor_mean:.1e} on average)",
                f"speed      prompt {self.prefill[0]:.0f} tok/s in onnxruntime, {self.prefill[1]:.0f} in the engine; "
                f"{single}{self.threads} threads",
                *seen,
            ]
        )
