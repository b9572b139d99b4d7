"""Knowledge distillation of vision models: a teacher's image features, and its comparison of images with texts.

Terms of the loss, each per target that counts, as in `bitnet.train.distill`:

    features     of the vision stack, after its last norm: the share of the teacher's variance that the student
                 lacks. 0: none; 1: they might as well be constant. For two towers also of the text vectors,
                 if the teacher reads the same tokens
    divergence   of two towers: T²·KL of the teacher's and the student's predictions for pairs of image and text, by the
                 loss of the run: which text belongs to an image and vice versa (softmax), or whether they match
                 (sigmoid)
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.evaluate.contrast import halves_of
from bitnet.model.images import Similarity
from bitnet.model.transformer import Transformer
from bitnet.train.source_model import SourceModelError
from bitnet.train.watched import Watched


class Sights:
    """The vision stacks of a student and its teacher, on the same images."""

    def __init__(self, student: Transformer, teacher: Transformer, name: str) -> None:
        """name: the teacher's, for messages. Raises SourceModelError if it does not take the same images."""
        sees = teacher if teacher.config.input == "images" else teacher.vision
        if sees is None or student.vision is None:
            raise SourceModelError(f"--teacher {name} has no vision stack, whose features could be learnt")
        self.student, self.teacher = student.vision, sees
        ours, theirs = student.vision.config, sees.config
        for field in ("image_size", "channels"):
            if getattr(ours, field) != getattr(theirs, field):
                raise SourceModelError(
                    f"--teacher {name}: its {field} is {getattr(theirs, field)}, that of the model "
                    f"{getattr(ours, field)}; expected a teacher that looks at the same pictures"
                )

    def watch(self, name: str) -> None:
        """Record their features from now on. Raises SourceModelError if the shapes differ."""
        ours, theirs = self.student.config, self.teacher.config
        if (ours.patches, ours.dim) != (theirs.patches, theirs.dim):
            raise SourceModelError(
                f"--teacher {name} makes {theirs.patches} patches of {theirs.dim} numbers of an image, the model "
                f"{ours.patches} of {ours.dim}; expected as many for --distill-features"
            )
        self.watched = Watched(), Watched()
        for stack, watched in zip((self.student, self.teacher), self.watched, strict=True):
            stack.states = watched

    def as_taught(self, pixels: Tensor) -> Tensor:
        """The student's pixels as input of the teacher, normalized by its own mean and standard deviation."""
        (mean, std), (their_mean, their_std) = (_normal(stack.config, pixels) for stack in (self.student, self.teacher))
        return (pixels * std + (mean - their_mean)) / their_std

    def lacking(self) -> Tensor:
        """`lacking` of the newest features of both; a class token that only one of them has is left out."""
        ours, theirs = (watched.seen for watched in self.watched)
        assert isinstance(ours, Tensor) and isinstance(theirs, Tensor)
        n = min(ours.shape[1], theirs.shape[1])
        return lacking(ours[:, -n:], theirs[:, -n:])


def _normal(config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    mean, std = (like.new_tensor(values).view(-1, 1, 1) for values in (config.pixel_mean, config.pixel_std))
    return mean, std


def lacking(ours: Tensor, theirs: Tensor) -> Tensor:
    """Σ|ours − theirs|² / Σ|theirs − their mean|². Vectors (..., D)."""
    with torch.autocast(ours.device.type, enabled=False):
        student, teacher = ours.float().flatten(0, -2), theirs.float().flatten(0, -2)
        if not len(teacher):  # texts without pictures
            return student.sum()
        return (student - teacher).square().sum() / (teacher - teacher.mean(0)).square().sum().clamp(min=1e-12)


def divergence_of_pairs(
    student: Transformer, vectors: Tensor, teacher: Transformer, taught: Tensor, loss: str, temperature: float
) -> Tensor:
    """Σ over the matching pairs, in nats. vectors, taught: those of texts, then those of images."""
    with torch.autocast(vectors.device.type, enabled=False):
        tables = []
        for model, both in ((student, vectors), (teacher, taught)):
            assert isinstance(model.similarity, Similarity)
            tables.append(model.similarity(*halves_of(model, both)) / temperature)
        ours, theirs = tables
        if loss == "sigmoid":
            p = theirs.sigmoid()
            yes, no = (F.logsigmoid(sign * theirs) - F.logsigmoid(sign * ours) for sign in (1, -1))
            pairs: Tensor = (p * yes + (1 - p) * no).sum()
            return pairs * (temperature * temperature)
        ways = ((ours, theirs), (ours.mT, theirs.mT))
        parts = [F.kl_div(a.log_softmax(-1), b.log_softmax(-1), reduction="sum", log_target=True) for a, b in ways]
        return torch.stack(parts).sum() * (temperature * temperature / 2)
