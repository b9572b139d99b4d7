"""Pictures become the numbers that the image processors of transformers make."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence, PngImagePlugin
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from bitnet_runtime import ImageError
from bitnet_runtime.images.processor import Processor
from picture_data import RNG, encoded, noise, smooth

S = 20


@pytest.mark.parametrize("size", [(33, 50), (50, 33), (20, 20), (5, 7), (20, 90), (101, 41)])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "PPM", "GIF"])
def test_files_give_the_numbers_of_the_processors_of_transformers(
    size: tuple[int, int], format: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a picture.{format.lower()}"
    Image.fromarray(noise(*size, 3)).save(path)
    plain = {"do_normalize": False, "return_tensors": "np"}
    square, crop = {"height": S, "width": S}, {"shortest_edge": S}
    for resample, filter in ((3, "bicubic"), (2, "bilinear")):
        siglip = SiglipImageProcessorPil(size=square, resample=resample)
        clip = CLIPImageProcessorPil(size=crop, crop_size=square, resample=resample)
        with Image.open(path) as picture:
            expected = siglip(picture, **plain)["pixel_values"][0], clip(picture, **plain)["pixel_values"][0]
        for reference, resize in zip(expected, ("stretch", "crop"), strict=True):
            processor = Processor(S, resize=resize, filter=filter)
            # The same integers; they divide by 255 in another order
            np.testing.assert_allclose(processor.floats(path), reference, atol=2**-22, rtol=0)
            assert (processor.bytes(path) == np.rint(reference * 255)).all()
            assert processor.floats(path).dtype == np.float32 and processor.floats(path).flags.c_contiguous


@pytest.mark.parametrize("kind", [torch.uint8, torch.float32, torch.float64])
def test_a_tensor_is_as_its_array(kind: torch.dtype) -> None:
    tensor = torch.from_numpy(noise(30, 40, 3))
    tensor = tensor if kind == torch.uint8 else tensor.to(kind) / 255
    assert (Processor(S).floats(tensor) == Processor(S).floats(tensor.numpy())).all()
    both = Processor(S).batch(torch.stack([tensor, tensor.flip(0)]))
    assert len(both) == 2 and (both[0] == Processor(S).floats(tensor)).all()


def test_an_open_file_is_as_its_bytes(tmp_path: Path) -> None:
    """From its beginning, as Pillow reads it: whoever wrote a BytesIO is at its end."""
    data = encoded(noise(30, 40, 3), "PNG")
    (tmp_path / "a.png").write_bytes(data)
    buffer = io.BytesIO()
    buffer.write(data)
    expected = Processor(S).bytes(data)
    with (tmp_path / "a.png").open("rb") as file:
        for source in (buffer, buffer, file):
            assert (Processor(S).bytes(source) == expected).all()


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_colours_are_those_of_pillow(mode: str) -> None:
    picture = Image.fromarray(smooth(30, 40)).convert(mode)
    format = {"CMYK": "JPEG", "YCbCr": "TIFF"}.get(mode, "PNG")
    data = encoded(picture, format)
    again = Image.open(io.BytesIO(data))
    assert again.mode == mode
    resized = again.convert("RGB").resize((S, S), Image.Resampling.BICUBIC)
    assert (Processor(S).bytes(data) == np.asarray(resized).transpose(2, 0, 1)).all()


def test_grey_is_that_of_pillow_for_files_arrays_and_floats() -> None:
    picture = noise(S, S, 3)
    expected = np.asarray(Image.fromarray(picture).convert("L"))[None]
    processor = Processor(S, channels=1)
    assert (processor.bytes(encoded(picture, "PNG")) == expected).all()
    assert (processor.bytes(picture) == expected).all()
    # Pillow rounds to 1/255
    np.testing.assert_allclose(processor.floats(picture / np.float32(255)), expected / 255, atol=0.51 / 255)


def test_sixteen_bits_lose_the_lower_eight() -> None:
    wide = RNG.integers(0, 1 << 16, (S, S), np.uint16)
    for format in ("PNG", "TIFF", "PPM"):
        made = Processor(S).bytes(encoded(wide, format))
        assert (made == (wide >> 8)[None]).all(), format


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_exif_says(orientation: int) -> None:
    picture = noise(12, 30, 3)
    turn = {1: lambda a: a, 2: np.fliplr, 3: lambda a: np.rot90(a, 2), 4: np.flipud, 5: lambda a: a.transpose(1, 0, 2)}
    turn |= {6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, 2).transpose(1, 0, 2), 8: np.rot90}
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encoded(picture, "PNG", exif=exif)
    expected = Processor(S, resize="crop").bytes(np.ascontiguousarray(turn[orientation](picture)))
    assert (Processor(S, resize="crop").bytes(data) == expected).all()
    assert (Processor(S, resize="crop").bytes(Image.open(io.BytesIO(data))) == expected).all()


def test_a_picture_with_unreadable_exif_is_as_it_lies() -> None:
    stored = PngImagePlugin.PngInfo()
    stored.add(b"eXIf", b"garbage!")
    picture, buffer = noise(S, S, 3), io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG", pnginfo=stored)
    assert (Processor(S).bytes(buffer.getvalue()) == picture.transpose(2, 0, 1)).all()


def test_a_clear_grey_of_sixteen_bits_is_white() -> None:
    wide = RNG.integers(0, 1 << 16, (S, S), np.uint16)
    wide[3:7] = 0x1234
    buffer = io.BytesIO()
    Image.fromarray(wide).save(buffer, "PNG", transparency=0x1234)
    made = Processor(S).bytes(buffer.getvalue())
    assert (made[:, 3:7] == 255).all() and (made[:, 7:] == np.where(wide == 0x1234, 255, wide >> 8)[7:]).all()


def test_what_is_transparent_is_white() -> None:
    picture = noise(S, S, 4)
    alpha = picture[:, :, 3:] / 255
    expected = (picture[:, :, :3] * alpha + 255 * (1 - alpha)).transpose(2, 0, 1)
    for form in (picture, encoded(picture, "PNG"), Image.fromarray(picture)):
        assert np.abs(Processor(S).bytes(form) - expected).max() <= 0.5 + 1e-9
    np.testing.assert_allclose(Processor(S).floats(picture / 255), expected / 255, atol=1e-6)
    palette = Image.fromarray(np.zeros((S, S), np.uint8)).convert("P")
    assert (Processor(S).bytes(encoded(palette, "GIF", transparency=0)) == 255).all()
    assert (Processor(S).bytes(encoded(noise(S, S), "PNG", transparency=300 % 256))).any()
    assert (Processor(S).bytes(encoded(Image.new("LA", (S, S), (0, 0)), "PNG")) == 255).all()


def test_premultiplied_alpha_is_that_of_its_straight_form() -> None:
    for straight, multiplied in (("LA", "La"), ("RGBA", "RGBa")):
        picture = Image.fromarray(noise(S, S, 4)).convert(straight).convert(multiplied)
        expected = Processor(S).bytes(picture.convert(straight))
        assert (Processor(S).bytes(picture) == expected).all()


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_its_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (S, S), colour) for colour in ("#ff0000", "#00ff00", "#0000ff")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    assert len(list(ImageSequence.Iterator(Image.open(io.BytesIO(data))))) == 3
    assert (Processor(S).bytes(data) == np.array([255, 0, 0])[:, None, None]).all()


def test_every_form_of_a_picture_gives_the_same(tmp_path: Path) -> None:
    picture = smooth(31, 17)
    data, path = encoded(picture, "PNG"), tmp_path / "p.png"
    path.write_bytes(data)
    urls = ["data:image/png;base64," + to_text(data).decode() for to_text in (base64.b64encode, base64.encodebytes)]
    strided = np.asfortranarray(np.repeat(picture, 2, 0)[::2])
    expected = Processor(S).bytes(picture)
    for form in (data, bytearray(data), memoryview(data), path, str(path), *urls, Image.fromarray(picture), strided):
        assert (Processor(S).bytes(form) == expected).all()
    # Floats are resized as floats, and not rounded in between
    for kind in (np.float16, np.float32, np.float64):
        assert np.abs(Processor(S).floats((picture / 255).astype(kind)) - expected / 255).max() < 1.6 / 255
    grey = noise(31, 17)
    same = Processor(S).bytes(np.stack([grey] * 3, 2))
    assert (Processor(S).bytes(grey) == same).all() and (Processor(S).bytes(grey[:, :, None]) == same).all()


def test_a_float_array_of_the_right_size_is_taken_as_it_is() -> None:
    picture = RNG.random((S, S, 3), np.float32)
    assert (Processor(S).floats(picture) == picture.transpose(2, 0, 1)).all()
    assert (Processor(S).bytes(picture) == np.rint(picture * 255).transpose(2, 0, 1)).all()


def test_a_batch_is_a_list_one_picture_or_an_array_of_four_dimensions() -> None:
    several, processor = noise(3, 31, 17, 3), Processor(S)
    expected = np.stack([processor.floats(one) for one in several])
    for form in (several, list(several), tuple(Image.fromarray(one) for one in several)):
        assert (processor.batch(form) == expected).all()
    assert (processor.batch(several[0]) == expected[:1]).all() and processor.batch([]).shape == (0, 3, S, S)
    with pytest.raises(ImageError, match=r"^images\[1\]: an array with numbers from"):
        processor.batch([several[0], several[0] * 1.0])
