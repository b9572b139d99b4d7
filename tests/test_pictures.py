"""Records of pictures and texts: splitting and storing them; rows; crops; losses."""

from __future__ import annotations

import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing

from bitnet.data import picture_files, picture_rows, pictures, tokenizer
from bitnet.data.augment import changed
from bitnet.data.corpus import DataError
from bitnet.data.dataset import IGNORED
from bitnet.data.frames import Frame
from bitnet.data.picture_rows import Answers, Captions
from bitnet.evaluate import contrast
from picture_data import halves, lines
from vision_models import VISION

torch.set_num_threads(1)

STACK = pictures.Sight.of(
    VISION.replace(image_size=8, patch_size=4, pixel_mean=(0.5, 0.4, 0.3), pixel_std=(0.5, 0.25, 0.3))
)
WORDS = tokenizer.build("byte", [], 258, tokenizer.IMAGE)
END, IMAGE = tokenizer.END_ID, 257


def kept(file: Path, out: Path, sight: pictures.Sight = STACK) -> pictures.Pictures:
    out.mkdir(exist_ok=True)
    return pictures.store(pictures.every(picture_files.read([str(file)])), WORDS, sight, out, "train", END)


def ids(text: str) -> list[int]:
    return list(WORDS.encode(text, add_special_tokens=False).ids)


# ---- two sides ----


def test_no_picture_is_on_both_sides(tmp_path: Path) -> None:
    """Three questions of each, one of two pictures; equal records and equal files count once."""
    records: list[dict[str, Any]] = []
    for name, left, right in halves(tmp_path, 60):
        records += [{"image": name, "prefix": q, "suffix": a} for q, a in (("l?", left), ("r?", right), ("x?", "y"))]
    (tmp_path / "copy.png").write_bytes((tmp_path / "0.png").read_bytes())
    file = lines(tmp_path, "a.jsonl", [*records, records[0], records[0] | {"image": "copy.png"}])
    said: list[str] = []
    train, held_out = pictures.split(picture_files.read([str(file)]), 0.3, said.append)
    assert said == ["2 of 182 records are repetitions and were left out"]
    assert len(train.records) + len(held_out.records) == 180 and 30 < len(held_out.records) < 90
    assert not set(train.images) & set(held_out.images)
    again = pictures.split(picture_files.read([str(file)]), 0.3)
    assert again == (train, held_out)


def test_records_that_share_a_picture_stay_together(tmp_path: Path) -> None:
    """In any order, also indirectly; a group of more than half of all records is not held out."""
    for n in range(40):
        (tmp_path / str(n)).write_bytes(bytes([n]))

    def asked(*names: int) -> picture_files.Record:
        return picture_files.Record(tuple(tmp_path / str(n) for n in names), "?", "a", "here")

    def pictures_of(side: pictures.Side) -> set[bytes]:
        return {image for images in side.images for image in images}

    shared = ((0, 1), (1, 0), (0,), (2, 1), (3, 2))  # among four pictures
    records = [asked(*(n + i for i in each)) for each in shared for n in range(0, 40, 4)] + [asked()]
    train, held_out = pictures.split(records, 0.4)
    assert not pictures_of(train) & pictures_of(held_out) and len(held_out.records) >= 10
    assert len(train.records) + len(held_out.records) == len(records)
    chain = [asked(n, n + 1) for n in range(30)]
    for share in (0.01, 0.99):
        train, held_out = pictures.split([*chain, *(asked(n) for n in range(31, 40))], share)
        assert set(chain) <= set(train.records) and held_out.records
    with pytest.raises(DataError, match="holds 30 records that share pictures, expected two groups that share none"):
        pictures.split(chain, 0.5)


def test_one_picture_cannot_be_split(tmp_path: Path) -> None:
    list(halves(tmp_path, 1))
    file = lines(tmp_path, "a.jsonl", [{"image": "0.png", "caption": text} for text in "ab"])
    records = list(picture_files.read([str(file)]))
    for n, found in enumerate(("no record", "a single record", "2 records that share pictures")):
        with pytest.raises(DataError, match=f"^the data holds {found}, expected two groups that share none"):
            pictures.split(records[:n], 0.5)


# ---- on disk ----


def test_pictures_are_kept_once_and_exactly(tmp_path: Path) -> None:
    list(halves(tmp_path, 3))
    records: list[dict[str, Any]] = [{"image": f"{i}.png", "prefix": "?", "suffix": "a"} for i in (2, 0, 2)]
    file = lines(tmp_path, "a.jsonl", [*records, {"images": ["0.png", "1.png"], "suffix": "b"}, {"suffix": "c"}])
    made = kept(file, tmp_path / "run")
    assert made.owners.tolist() == [[0, 0], [1, 1], [2, 0], [3, 1], [3, 2]]
    for picture, name in zip(made.pixels, ("2.png", "0.png", "1.png"), strict=True):
        assert (picture.transpose(1, 2, 0) == np.asarray(Image.open(tmp_path / name))).all()
    words = kept(lines(tmp_path, "words.jsonl", [{"suffix": "c"}]), tmp_path / "words")
    assert words.pixels.shape == (0, 3, 8, 8) and words.owners.shape == (0, 2)
    sent = pickle.loads(pickle.dumps(made))
    assert (sent.pixels == made.pixels).all() and sent.digest == made.digest and isinstance(sent.pixels, np.memmap)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()}
    assert kept(file, tmp_path / "run").digest == made.digest
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").iterdir()} and len(before) == 3


def test_pictures_become_squares_as_the_source_says(tmp_path: Path) -> None:
    Image.fromarray(np.arange(16 * 8 * 3, dtype=np.uint8).reshape(8, 16, 3)).save(tmp_path / "0.png")
    file = lines(tmp_path, "a.jsonl", [{"image": "0.png", "caption": "x"}])
    sight = STACK.of(VISION.replace(image_size=8, patch_size=4), {"pictures": {"resize": "crop", "filter": "bilinear"}})
    assert sight.processor.filter == "bilinear"
    kept(file, tmp_path / "run")
    (middle,) = kept(file, tmp_path / "run", sight).pixels
    assert (middle.transpose(1, 2, 0) == np.asarray(Image.open(tmp_path / "0.png"))[:, 4:12]).all()


def test_what_was_recorded_is_found_again_or_refused(tmp_path: Path) -> None:
    list(halves(tmp_path, 2))
    file = lines(tmp_path, "a.jsonl", [{"image": "0.png", "caption": "x"}, {"image": "1.png", "caption": "y"}])
    made = kept(file, tmp_path / "run")
    state = {"pictures": {"train": made.to_dict()}}
    no_files = {"pictures": {"train": made.to_dict() | {"files": []}}}
    folder = (tmp_path / "run").rename(tmp_path / "moved")
    found = pictures.recorded(state, "train", folder)
    assert found and found.digest == made.digest and (found.pixels == made.pixels).all()
    for broken in ({}, {"pictures": {"train": 3}}, no_files):
        assert pictures.recorded(broken, "train", folder) is None
    pixels = folder / made.file.name
    damaged = bytearray(pixels.read_bytes())
    damaged[7] ^= 1
    pixels.write_bytes(damaged)
    with pytest.raises(DataError, match=r"pixels is damaged \(SHA-256\); remove it"):
        pictures.recorded(state, "train", folder)
    pixels.unlink()
    assert pictures.recorded(state, "train", folder) is None


def test_a_damaged_picture_is_named_with_its_record(tmp_path: Path) -> None:
    (tmp_path / "0.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(40))
    file = lines(tmp_path, "a.jsonl", [{"image": "0.png", "caption": "x"}])
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*0\.png"):
        kept(file, tmp_path / "run")
    assert not [path for path in (tmp_path / "run").iterdir() if path.suffix in (".partial", ".pixels")]


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    """Or the first ten problems if there are more."""
    list(halves(tmp_path, 20))
    rows = [{"image": f"{i}.png", "caption": "x"} for i in range(20)]
    few = lines(tmp_path, "few.jsonl", [*rows, {"image": "none.png", "caption": "x"}, {"image": "0.png"}])
    with pytest.raises(DataError, match=r"^2 of 22 records .*few\.jsonl, line 21: there .*, line 22: .* or take them"):
        list(picture_files.read([str(few)]))
    for i in (3, 5):
        (tmp_path / f"{i}.png").write_bytes((tmp_path / f"{i}.png").read_bytes()[:-30])
    with pytest.raises(
        DataError, match=r"^2 of 20 records cannot be used: .*, line 4: .*3\.png: .*, line 6: .*5\.png: "
    ):
        kept(lines(tmp_path, "broken.jsonl", rows), tmp_path / "run")
    for i in range(6, 16):
        (tmp_path / f"{i}.png").write_bytes(bytes([i]))
    with pytest.raises(DataError, match=r"^10 of 14 records cannot be used"):
        kept(tmp_path / "broken.jsonl", tmp_path / "run")
    many = lines(tmp_path, "many.jsonl", [*rows[:3], *[{"image": f"no-{i}.png", "caption": "x"} for i in range(20)]])
    with pytest.raises(DataError, match=r"^10 of 13 records cannot be used") as error:
        list(picture_files.read([str(many)]))
    assert str(error.value).count("there is no file") == 10


# ---- rows ----


def test_answers_by_hand(tmp_path: Path) -> None:
    list(halves(tmp_path, 2))
    file = lines(tmp_path, "a.jsonl", [
        {"images": ["0.png", "1.png"], "prefix": "ab", "suffix": "cd"}, {"prefix": "e", "suffix": "f"},
    ])  # fmt: skip
    rows = Answers(kept(file, tmp_path / "run"), STACK, END, Frame((END,)), END, IMAGE)
    inputs, targets, documents, prefix, pixels = rows.rows([0, 1], 20)
    first = [IMAGE] * 8 + [END, *ids("ab\ncd")]
    second = [END, *ids("e\nf")]
    assert inputs.tolist() == [first, second + [END] * 10]
    assert targets[0].tolist() == [IGNORED] * 11 + [*ids("cd"), END]
    assert targets[1].tolist() == [IGNORED] * 2 + [*ids("f"), END] + [IGNORED] * 10
    assert documents.tolist() == [[0] * 14, [0] * 4 + [-1] * 10] and prefix.tolist() == [12, 3]
    expected = np.stack([np.asarray(Image.open(tmp_path / f"{i}.png"), np.float32).transpose(2, 0, 1) for i in (0, 1)])
    mean, std = (np.array(values, np.float32).reshape(3, 1, 1) for values in (STACK.pixel_mean, STACK.pixel_std))
    assert np.array_equal(pixels.numpy(), (expected / np.float32(255) - mean) / std)
    assert rows.rows([1], 20)[0].shape == (1, 4) and len(rows.rows([1], 20)[4]) == 0
    assert rows.count(13) == 1 and rows.rows([0], 13)[0].tolist() == [second]
    with pytest.raises(DataError, match=r"no record fits --context 3: the shortest has 4 tokens, of which an image"):
        rows.count(3)


def test_captions_by_hand(tmp_path: Path) -> None:
    list(halves(tmp_path, 3))
    texts = ("ab", "cdefgh", "ab")
    file = lines(tmp_path, "a.jsonl", [{"image": f"{i}.png", "caption": text} for i, text in enumerate(texts)])
    rows = Captions(kept(file, tmp_path / "run"), STACK, END, Frame((END,)))
    inputs, targets, documents, prefix, pixels = rows.rows([1, 0], 5)
    assert inputs.tolist() == [[END, *ids("cdef")], [END, *ids("ab"), END, END]] and targets.tolist() == [0, 1]
    assert documents.tolist() == [[0] * 5, [0, 0, 0, -1, -1]] and prefix.tolist() == [0, 0] and len(pixels) == 2
    assert [rows.too_long(context) for context in (2, 6, 7)] == [3, 1, 0]
    assert rows.alike([0, 1, 2]).tolist() == [[True, False, True], [False, True, False], [True, False, True]]
    none = lines(tmp_path, "b.jsonl", [{"image": "0.png", "caption": "x"}, {"suffix": "x"}])
    with pytest.raises(DataError, match=r"b\.jsonl, line 2: it has 0 images, and --objective contrastive"):
        list(picture_files.captions(picture_files.read([str(none)])))


@pytest.mark.parametrize(
    ("around", "generation", "expected"),
    [
        ("$A", {}, [1, 2, 3, 4, 5]),
        ("$A", {"bos_token_id": END}, [END, 1, 2, 3, 4]),
        ("$A <image>", {}, [1, 2, 3, 4, IMAGE]),
        ("<image> $A <image>", {"bos_token_id": IMAGE}, [IMAGE, 1, 2, 3, IMAGE]),
    ],
)
def test_the_frame_of_a_text(around: str, generation: dict[str, Any], expected: list[int]) -> None:
    """What the source's tokenizer adds around a text, and the start token that the file names; then padding."""
    words = tokenizer.build("byte", [], 258, tokenizer.IMAGE)
    words.post_processor = TemplateProcessing(single=around, special_tokens=[("<image>", IMAGE)])
    assert Frame.of(words, generation).around(np.arange(1, 9), 5).tolist() == expected
    filled = Frame.of(words, generation | {"padding": {"length": 9, "token_id": 8, "side": "left"}})
    short = [each for each in expected if each not in (3, 4, 5)]
    assert filled.around(np.arange(1, 3), 11).tolist() == [8] * (9 - len(short)) + short


def test_a_context_that_cuts_what_fills_texts_up_is_refused(tmp_path: Path) -> None:
    list(halves(tmp_path, 1))
    file = lines(tmp_path, "a.jsonl", [{"image": "0.png", "caption": "ab"}])
    rows = Captions(kept(file, tmp_path / "run"), STACK, END, Frame((END,), (), 9, 8))
    assert rows.count(9) == 1
    with pytest.raises(DataError, match=r"--context is 8, and a text is filled up to 9 tokens .* give 9 or more"):
        rows.count(8)


def test_record_n_is_a_function_of_the_seed_and_n(tmp_path: Path) -> None:
    list(halves(tmp_path, 9))
    file = lines(tmp_path, "a.jsonl", [{"image": f"{i}.png", "caption": str(i)} for i in range(9)])
    rows = Captions(kept(file, tmp_path / "run"), STACK, END, Frame((END,)))
    batches = picture_rows.Batches(rows, 2, 8, 5, "crop-flip")
    one_by_one = [batches.sequences(n, n + 1) for n in range(18)]
    for part in (0, 4):  # texts and pictures
        together = torch.cat([batches.sequences(n, n + 2)[part] for n in range(0, 8, 2)])
        assert together.equal(torch.cat([one[part] for one in one_by_one[:8]]))
    assert {int(one[0][0, 1]) for one in one_by_one[:9]} == {ids(str(i))[0] for i in range(9)}
    plain = picture_rows.Batches(rows, 2, 8, 5, "none")
    for n in range(0, 90, 4):  # over the end of an epoch, too
        assert len({tuple(text) for text in plain.sequences(n, n + 4)[0].tolist()}) == 4
    seen, changed = plain.sequences(0, 9), batches.sequences(0, 9)
    assert seen[0].equal(changed[0]) and not seen[4].equal(changed[4])
    with pytest.raises(DataError, match="there are 9 captions, one batch needs 10"):
        picture_rows.Batches(rows, 10, 8, 5, "none")


# ---- crops ----


def test_crops_are_small_and_keep_the_picture() -> None:
    """A ramp stays one: shifted by the crop's place, and steeper by at most what 80 % of the area leaves."""
    ramp = torch.linspace(0, 1, 32).expand(1, 3, 32, 32)
    slopes = []
    for seed in range(50):
        (cropped,) = changed(ramp, "crop", seed)
        assert cropped.shape == (3, 32, 32) and float(cropped.min()) >= 0 and float(cropped.max()) <= 1
        slopes.append(float(cropped[0, 16, -3] - cropped[0, 16, 2]) / float(ramp[0, 0, 16, -3] - ramp[0, 0, 16, 2]))
        assert changed(ramp, "crop", seed).equal(cropped[None])
    assert min(slopes) > 0.7 and max(slopes) < 1.02 and max(slopes) - min(slopes) > 0.1
    flipped = [bool(changed(ramp, "crop-flip", seed)[0, 0, 16, 0] > 0.5) for seed in range(50)]
    assert 10 < sum(flipped) < 40 and changed(ramp, "none", 0) is ramp


# ---- losses ----


def test_sigmoid_loss_by_hand() -> None:
    """The pseudocode of arXiv 2303.15343, times the number of pairs: z = 2·eye − 1, −Σ log σ(z·logits)."""
    images, texts = torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    cosines = [[1.0, 0.6], [0.0, 0.8]]
    expected = 0.0
    for i in range(2):
        for j in range(2):
            z = 1 if i == j else -1
            expected += math.log(1 + math.exp(-z * (10 * cosines[i][j] - 10)))
    found = contrast.sigmoid(lambda first, second: 10 * first @ second.mT - 10, images, texts)
    assert found.item() == pytest.approx(expected, rel=1e-6)


def test_the_sigmoid_loss_in_chunks_is_the_whole_one() -> None:
    """Value and gradients, of vectors, scale and bias; to the rounding of a sum in another order."""
    random = torch.Generator().manual_seed(0)
    results = []
    vectors = [torch.nn.functional.normalize(torch.randn(11, 7, generator=random).double(), dim=-1) for _ in range(2)]
    for chunk in (100, 4, 1):
        images, texts = (each.clone().requires_grad_() for each in vectors)
        scale, bias = torch.tensor([2.3]).double().requires_grad_(), torch.tensor([-1.0]).double().requires_grad_()

        def compare(a: torch.Tensor, b: torch.Tensor, s: torch.Tensor = scale, c: torch.Tensor = bias) -> torch.Tensor:
            return s.exp() * (a @ b.mT) + c

        loss = contrast.sigmoid(compare, images, texts, chunk)
        loss.backward()  # type: ignore[no-untyped-call]
        results.append([loss.detach(), *(each.grad for each in (images, texts, scale, bias))])
    for parts in results[1:]:
        for part, whole in zip(parts, results[0], strict=True):
            assert part is not None and whole is not None and torch.allclose(part, whole, rtol=1e-12, atol=1e-14)


def test_a_fault_that_many_records_have_is_said_once(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no image"}\n' * 10)
    with pytest.raises(DataError, match=r"^10 of 10 records cannot be used: ") as error:
        list(picture_files.read([str(tmp_path / "a.jsonl")]))
    said = f"{tmp_path / 'a.jsonl'}, {', '.join(f'line {n}' for n in range(1, 11))}: has 'text'"
    assert said in str(error.value) and str(error.value).count("image") < 4
