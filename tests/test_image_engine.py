"""The engine computes from images what torch does: for a single stack, two towers, and a decoder that sees images. With
float weights there are no rounding edges, so every number is compared; with ternary ones by the noise floor."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet_export import random_model
from bitnet_runtime import (
    ContextLengthError,
    InvalidParameterError,
    Model,
    NumericError,
    UnsupportedModelError,
    available_isas,
)
from bitnet_runtime.images import vision
from drawn_models import made
from vision_models import CLIP, PALIGEMMA, TOWERS, VISION, prompt

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

Array = NDArray[np.float64]
GEMMA_EYE = {"pooling": "none", "out_dim": 42, "projector_bias": True}
STACKS: dict[str, ModelConfig] = {
    "siglip": VISION,
    "features": VISION.replace(**GEMMA_EYE),
    "clip": VISION.replace(class_token=True, pooling="first", embedding_norm=True, patch_bias=False, out_dim=20),
    "rms": VISION.replace(norm="rms", norm_bias=False, pooling="mean", channels=1, pixel_mean=(0.5,), pixel_std=(0.2,)),
}


def drawn(seed: int) -> ModelConfig:
    """A stack with any options: 30 pixels and patches of 7, one to three channels, any norms and activations."""
    draw = random.Random(seed)
    channels, norm = draw.randint(1, 3), draw.choice(["layer", "rms"])
    heads = draw.choice([1, 2, 4])
    return VISION.replace(
        image_size=30, patch_size=draw.choice([5, 7, 8]), channels=channels, max_context=-1, dim=draw.choice([20, 33]),
        pixel_mean=tuple(draw.random() for _ in range(channels)), n_heads=4, n_kv_heads=heads, head_dim=7,
        pixel_std=tuple(draw.uniform(0.2, 1) for _ in range(channels)), class_token=draw.random() < 0.5, norm=norm,
        norm_bias=norm == "layer", pre_norm=draw.random() < 0.7, post_norm=draw.random() < 0.5,
        embedding_norm=draw.random() < 0.5, ffn=draw.choice(["plain", "gated"]), qkv_bias=draw.random() < 0.5,
        activation=draw.choice(["gelu", "gelu_erf", "silu", "relu2"]), patch_bias=draw.random() < 0.5,
        pooling=draw.choice(["attention", "mean", "first", "last"]), out_dim=(out := draw.choice([0, 17])),
        projector_bias=out > 0 and draw.random() < 0.5,
    )  # fmt: skip


def of_floats(config: ModelConfig) -> ModelConfig:
    """The same without ternary weights."""
    own: dict[str, Any] = {"ternary": (), "head_format": "f32"}
    return config.replace(**own, **({"vision": own} if config.vision else {}))


def pictures(n: int, config: ModelConfig, seed: int = 5) -> NDArray[np.float32]:
    """Values from 0 to 1, as the engine takes them."""
    stack = config.vision or config
    shape = (n, stack.channels, stack.image_size, stack.image_size)
    return np.random.default_rng(seed).random(shape, np.float32)


def normalized(pixels: NDArray[np.float32], config: ModelConfig) -> torch.Tensor:
    """The same as torch takes them, in any precision."""
    stack = config.vision or config
    mean, std = (torch.tensor(of, dtype=torch.float64)[:, None, None] for of in (stack.pixel_mean, stack.pixel_std))
    return (torch.from_numpy(pixels).double() - mean) / std


def of_torch(model: Transformer, pixels: NDArray[np.float32], dtype: torch.dtype = torch.float32) -> list[Array]:
    """Features, and vectors if the model pools."""
    stack = model.vision or model
    given = normalized(pixels, model.config).to(dtype)
    with torch.no_grad():
        stack.to(dtype)
        out = [stack.features(given)]
        if stack.config.pooling != "none":
            out.append(stack.embed(given))
        stack.float()
    return [x.double().numpy() for x in out]


def of_engine(path: Path, pixels: NDArray[np.float32]) -> list[Array]:
    with Model.load(path, threads=2) as engine:
        assert engine.image
        out = [vision.encode(engine, pixels)]
        if engine.image.pooled:
            out.append(vision.embed(engine, pixels))
    return [x.astype(np.float64) for x in out]


@pytest.mark.parametrize("config", [*STACKS.values(), *map(drawn, range(6))], ids=[*STACKS, *map(str, range(6))])
def test_float_stacks(config: ModelConfig, tmp_path: Path) -> None:
    model, path = made(of_floats(config), tmp_path)
    pixels = pictures(3, config)
    found, expected = of_engine(path, pixels), of_torch(model, pixels, torch.float64)
    assert len(found) == len(expected) == 1 + (config.pooling != "none")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        # fp32: two layers of sums of 70 terms and one of 150, each rounded to 6e-8, and norms of what they add up to.
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("config", [*STACKS.values(), *map(drawn, range(4))], ids=[*STACKS, *map(str, range(4))])
def test_ternary_stacks(config: ModelConfig, tmp_path: Path) -> None:
    """Compared by the noise floor: torch's own distance between fp32 and fp64."""
    model, path = made(config, tmp_path)
    pixels = pictures(24, config)
    found, fp32, fp64 = of_engine(path, pixels), of_torch(model, pixels), of_torch(model, pixels, torch.float64)
    for ours, single, double in zip(found, fp32, fp64, strict=True):
        distance, floor = (np.abs(x - single).reshape(24, -1).mean(1) for x in (ours, double))
        error = 2 * np.sqrt((distance.var() + 1.5**2 * floor.var()) / 24)  # of both means
        assert distance.mean() <= 1.5 * floor.mean() + error + 1e-6 * np.abs(single).mean()


@pytest.mark.parametrize("config", [TOWERS, CLIP], ids=["siglip", "clip"])
def test_two_towers(config: ModelConfig, tmp_path: Path) -> None:
    """Texts and images in one file, both through a projector."""
    model, path = made(of_floats(config), tmp_path)
    pixels = pictures(3, config)
    tokens = torch.randint(1, 250, (5, 11), generator=torch.Generator().manual_seed(1))
    for ours, theirs in zip(of_engine(path, pixels), of_torch(model, pixels, torch.float64), strict=True):
        assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()  # as of a stack alone
    with torch.no_grad(), Model.load(path, kv_type="f32", threads=2) as engine:
        texts = engine.embed(tokens.tolist())
        several = torch.from_numpy(vision.embed(engine, pixels)).double()
        expected = model.double().embed(tokens)
        assert engine.image and engine.info.width == engine.image.width == expected.shape[1]
        assert np.abs(texts - expected.numpy()).max() < 1e-5
        assert model.similarity
        assert engine.image.similarity_scale == pytest.approx(model.similarity.log_scale.exp().item())
        assert engine.image.similarity_bias == pytest.approx(model.similarity.bias.item())
        assert (several.norm(dim=1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("ternary", [False, True])
def test_a_decoder_is_shown_images(ternary: bool, tmp_path: Path) -> None:
    """A prefix of two images and a prompt, then tokens one by one."""
    model, path = made(PALIGEMMA if ternary else of_floats(PALIGEMMA), tmp_path)
    config, pixels = PALIGEMMA, pictures(2, PALIGEMMA)
    assert config.vision
    tokens, size = prompt(config, 2, 9)[0], 2 * config.vision.max_context + 4
    with Model.load(path, kv_type="f32", threads=2) as engine, engine.session() as session:
        assert engine.image and engine.image.image_token == config.image_token and not engine.image.pooled
        rows = vision.encode(engine, pixels).reshape(-1, config.dim)
        places = np.where(tokens.numpy() == config.image_token, -1, tokens.numpy())
        parts = [session.append_prefix(places[:size], rows, logits="all")]
        parts += [session.append(tokens[i : i + 1].tolist(), logits="all") for i in range(size, len(tokens))]
    found = np.concatenate([part for part in parts if part is not None]).astype(np.float64)
    theirs = []
    for dtype in (torch.float32, torch.float64):
        given = normalized(pixels, config).to(dtype)[None]
        with torch.no_grad():
            logits = model.to(dtype)(tokens[None], prefix_B=torch.tensor([size]), images=given)[0]
        theirs.append(logits.double().numpy())
    fp32, fp64 = theirs
    if ternary:  # the noise floor, and 2.5 times what one code on the other side of a rounding edge makes of it
        assert np.abs(found - fp32).mean() <= 1.5 * np.abs(fp64 - fp32).mean() + 5e-4 * np.abs(fp64).mean()
    else:
        assert np.abs(found - fp64).max() < 1e-5 * np.abs(fp64).max()


def test_pictures_that_do_not_fit_are_not_decoded(tmp_path: Path) -> None:
    """For a short request that would take minutes, and memory for all of them."""
    _, path = made(PALIGEMMA, tmp_path)
    with Model.load(path) as engine, pytest.raises(ContextLengthError, match="those of 1000 images"):
        engine.generate([5], images=[b"no picture"] * 1000)


@pytest.mark.parametrize("kv_type", ["f16", "int8"])
def test_same_bits_on_every_tier_alone_and_together(kv_type: str, tmp_path: Path) -> None:
    _, path = made(TOWERS, tmp_path)
    pixels = pictures(60, TOWERS)  # more than are computed at a time
    found = set()
    for isa in available_isas():
        for threads in (1, 3):
            with Model.load(path, isa=isa, threads=threads, kv_type=kv_type) as engine:
                found.add((vision.encode(engine, pixels).tobytes(), vision.embed(engine, pixels).tobytes()))
    with Model.load(path, kv_type=kv_type) as engine:
        alone = [(vision.encode(engine, one[None]), vision.embed(engine, one[None])) for one in pixels]
    found.add((b"".join(x.tobytes() for x, _ in alone), b"".join(y.tobytes() for _, y in alone)))
    assert len(found) == 1


def test_images_take_the_type_of_the_cache(tmp_path: Path) -> None:
    """With int8, codes of keys, values and queries are off by at most 1/254 of a row's largest value, and by less
    together."""
    _, path = made(of_floats(VISION), tmp_path)
    found = {}
    for kv_type in ("f32", "f16", "int8", "k4v8"):
        with Model.load(path, kv_type=kv_type) as engine:
            found[kv_type] = vision.encode(engine, pictures(5, VISION))
    assert np.array_equal(found["f16"], found["f32"])  # nothing is kept, so that these save nothing
    assert np.array_equal(found["k4v8"], found["int8"])
    off = np.abs(found["int8"] - found["f32"])
    assert 0 < off.max() < np.abs(found["f32"]).max() / 254 and off.mean() < np.abs(found["f32"]).mean() / 254


def test_good_pixels_are_not_blamed(tmp_path: Path) -> None:
    random_model(VISION.replace(pixel_std=(1e-38, 0.5, 0.5)), tmp_path / "m.bitnet")
    with (
        Model.load(tmp_path / "m.bitnet") as engine,
        pytest.raises(NumericError, match=r"not finite; its pixels are from 0 to 1, so the fault is in m\.bitnet: "),
    ):
        vision.encode(engine, pictures(1, VISION))


def test_what_is_no_image_is_refused(tmp_path: Path) -> None:
    _, path = made(VISION, tmp_path)
    good = pictures(2, VISION)
    with Model.load(path) as engine:
        assert engine.image and engine.image.n_tokens == 9 and engine.image.width == 36
        assert engine.image.pixel_mean == pytest.approx((0.5, 0.4, 0.3))
        assert vision.encode(engine, good[:0]).shape == (0, 9, 36)
        assert np.array_equal(vision.embed(engine, good.astype(np.float64)), vision.embed(engine, good))
        strided = np.ascontiguousarray(good.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        assert np.array_equal(vision.embed(engine, strided), vision.embed(engine, good))
        for wrong in (good[0], good[:, :2], good[..., :13], (good * 255).astype(np.uint8), good.tolist(), None):
            with pytest.raises(InvalidParameterError, match=r"expected an array of floats \(n, 3, 14, 14\)"):
                vision.encode(engine, wrong)  # type: ignore[arg-type]
        good[1, 2, 13, 13] = np.nan  # which no patch has
        with pytest.raises(InvalidParameterError, match="a pixel is NaN or infinite"):
            vision.embed(engine, good)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(InvalidParameterError, match="a pixel is NaN or infinite"):
                vision.encode(engine, np.full((1, 3, 14, 14), 1e300))
        for far in (vision.encode, vision.embed):
            with pytest.raises(NumericError, match=r"^the vectors of an image are not finite; its pixels are from 3"):
                far(engine, np.full((1, 3, 14, 14), 3e38, np.float32))
        huge = engine.image._replace(image_size=4096, patch_size=4096, n_tokens=1)
        assert (vision.at_once(engine.image), vision.at_once(huge)) == (56, 1)
        for call in (
            engine.session,
            lambda: engine.generate([1]),
            lambda: engine.embed([[1]]),
            lambda: engine.score("x"),
        ):
            with pytest.raises(
                UnsupportedModelError, match=r"m.bitnet sees images and takes no text: see Model.encode"
            ):
                call()


def test_models_that_do_not_see_or_do_not_pool_say_so(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    _, blind = made(TOWERS.replace(vision=None), tmp_path / "text")
    _, path = made(STACKS["features"], tmp_path)
    with Model.load(blind) as text, Model.load(path) as features:
        assert text.image is None
        with pytest.raises(UnsupportedModelError, match="sees no images"):
            vision.encode(text, pictures(1, VISION))
        with pytest.raises(UnsupportedModelError, match="names no pooling of images"):
            vision.embed(features, pictures(1, VISION))


def test_ctrl_c_is_obeyed_within_an_image(tmp_path: Path) -> None:
    """An image of 32,400 patches in one layer takes more than ten seconds."""
    config = VISION.replace(image_size=180, patch_size=1, n_layers=1, position="none", pooling="none", max_context=-1)
    random_model(config, tmp_path / "model")
    with Model.load(tmp_path / "model", threads=1) as model:
        pixels = np.zeros((1, 3, 180, 180), np.float32)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            vision.encode(model, pixels)
        assert time.monotonic() - start < 8
