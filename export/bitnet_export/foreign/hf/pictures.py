"""Image preprocessing of a model folder.

Fields: image_processing_*.py of transformers 5.23. A packed file can express square images, and a mean and standard
deviation for each channel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_export.foreign.source import SourceError

from .fields import Fields
from .folder import Folder

FILE = "preprocessor_config.json"
_FILTERS = {2: "bilinear", 3: "bicubic"}  # numbers of Pillow


def read_pictures(
    folder: Folder, image_size: int, channels: int, defaults: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Fields of ModelConfig, how an image becomes a square, and assumptions.

    image_size: side of the model's images in pixels. defaults: of missing fields.
    Raises SourceError naming what cannot be expressed.
    """
    given = folder.json(FILE) or Fields(folder.json("processor_config.json"), "processor_config.json").object(
        "image_processor"
    )
    said = Fields({**defaults, **(given or {})}, str(folder.path / FILE))
    assumptions = [] if given else [f"the folder has no {FILE}: pictures are prepared by the defaults of transformers"]
    if said.truth("do_pad"):
        raise SourceError(f"{said.what}: do_pad is true, only pictures that are resized to a square are supported")
    resize = _resize(said, image_size, bool(defaults.get("do_center_crop")), assumptions)
    resample = said.integer("resample")
    if resample not in _FILTERS:
        words = " or ".join(f"{number} ({name})" for number, name in _FILTERS.items())
        raise SourceError(f"{said.what}: resample is {resample}, expected {words}")
    scale = 255 * said.number("rescale_factor", 1 / 255) if said.truth("do_rescale", True) else 255.0
    if scale <= 0:
        raise SourceError(f"{said.what}: rescale_factor is {scale / 255:g}, expected a number above 0")
    normalized = said.truth("do_normalize", True)
    mean = _of_channels(said, "image_mean", channels) if normalized else [0.0] * channels
    std = _of_channels(said, "image_std", channels) if normalized else [1.0] * channels
    if min(std) <= 0:
        raise SourceError(f"{said.what}: image_std is {said.get('image_std')!r:.80}, expected numbers above 0")
    values = {"pixel_mean": [m / scale for m in mean], "pixel_std": [s / scale for s in std]}
    return values, {"resize": resize, "filter": _FILTERS[resample]}, assumptions


def _of_channels(said: Fields, name: str, channels: int) -> list[float]:
    values = said.get(name)
    if not isinstance(values, list) or len(values) != channels:
        raise SourceError(f"{said.what}: {name} is {values!r:.80}, expected a number for each of {channels} channels")
    return [Fields({name: value}, said.what).number(name) for value in values]


def _resize(said: Fields, image_size: int, middle: bool, assumptions: list[str]) -> str:
    """How an image becomes a square: "stretch"; "crop": resize the shorter side, then crop the centre.

    middle: whether a size that is not given is the shorter side's. A single number is, unless the class says otherwise.
    """
    crop = said.truth("do_center_crop")
    shorter = middle if "size" not in said else not said.truth("default_to_square")
    size, shorter = _side(said, "size", image_size, shorter)
    cut, _ = _side(said, "crop_size", image_size, False) if crop else (image_size, False)
    if not said.truth("do_resize", True):
        assumptions.append("pictures of another size are resized, though do_resize is false")
    for name, found in (("size", size), ("crop_size", cut)):
        if found != image_size:
            raise SourceError(
                f"{said.what}: {name} is {said.get(name)!r:.80}, image_size of config.json is {image_size}"
            )
    if shorter and not crop:
        words = f"{said.get('size', image_size)!r:.80}, the shorter side's, without do_center_crop"
        raise SourceError(f'{said.what}: size is {words}, expected {{"height": {image_size}, "width": {image_size}}}')
    return "crop" if shorter else "stretch"


def _side(said: Fields, name: str, default: int, shorter: bool) -> tuple[int, bool]:
    """Pixels of a side, and whether only of the shorter one; `shorter` if it is a single number, or not given."""
    value = said.get(name, default)
    if isinstance(value, dict):
        sides = set(map(str, value.values())) if value.keys() in ({"height", "width"}, {"shortest_edge"}) else set()
        shorter = "shortest_edge" in value
        value = next(iter(value.values())) if len(sides) == 1 else None
    if type(value) is not int:
        raise SourceError(f"{said.what}: {name} is {said.get(name)!r:.80}, expected the pixels of a square's side")
    return value, shorter
