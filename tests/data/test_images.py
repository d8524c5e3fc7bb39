"""Images: every mode and every kind of damage, geometry against closed forms, random crops, and what a crop removes."""

import io
import json
import struct
import warnings
import zlib

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageCms

from pictures import encoded
from retouch.data.base import DataContext
from retouch.data.images import EncodedImage, fit, fit_mask, load_image, load_mask, read_header
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import TableData, encoded_image
from retouch.data.sources.stream import IterableData
from retouch.data.tasks import SMALLEST, Crop, load_task, random_crop
from retouch_serve.requests import Limits, decode_images
from retouch_serve.wire import PictureHead

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, *, depth, colour, raw, extra=b""):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")


def noise(width=40, height=24):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixels(data):
    return np.asarray(load_image(EncodedImage("test", data))).reshape(-1, 3).tolist()


def test_images_of_every_mode_become_rgb_by_the_high_byte_and_over_white():
    grey_16 = {"depth": 16, "colour": 0, "raw": b"\0" + struct.pack(">4H", 0, 257, 0x80FF, 65535)}
    colours_16 = png(2, 1, depth=16, colour=2, raw=b"\0" + struct.pack(">6H", 0x1234, 0x5678, 65535, 0, 1, 256))
    for data, expected in (
        (encoded(Image.new("L", (1, 1), 90), "PNG"), [[90] * 3]),
        (encoded(Image.new("RGB", (1, 1), BLUE).convert("P"), "PNG"), [[*BLUE]]),
        (encoded(Image.new("1", (1, 1), 1), "PNG"), [[*WHITE]]),
        (png(4, 1, **grey_16), [[0] * 3, [1] * 3, [0x80] * 3, [255] * 3]),
        (png(4, 1, **grey_16, extra=chunk(b"tRNS", struct.pack(">H", 257))), [[0] * 3, [*WHITE], [0x80] * 3, [255] * 3]),
        (colours_16, [[0x12, 0x56, 0xFF], [0, 0, 1]]),
        (encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 51)), "PNG"), [[204] * 3]),  # a fifth of black
        (encoded(Image.new("LA", (1, 1), (7, 0)), "PNG"), [[*WHITE]]),
        (encoded(palette((9, 9, 9)), "PNG", transparency=0), [[*WHITE]] * 16),
    ):
        assert pixels(data) == expected
    first_of_two = encoded(Image.new("RGB", (8, 8), RED), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8), BLUE)])
    for data in (first_of_two, encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=100)):
        assert np.abs(np.array(pixels(data)) - np.array(RED)).max() <= 2
    for format in ("PNG", "WEBP"):
        loaded = load_image(EncodedImage("a", encoded(noise(), format, lossless=True, icc_profile=b"x" * 200, dpi=(300, 300))))
        assert (loaded.mode, loaded.info) == ("RGB", {})
        assert np.array_equal(np.asarray(loaded), np.asarray(noise()))


@pytest.mark.parametrize(("orientation", "format"), [*((number, "PNG") for number in range(1, 9)), (6, "WEBP"), (6, "JPEG")])
def test_exif_rotation_is_undone(orientation, format):
    upright = Image.new("RGB", (48, 32))
    upright.paste(RED, (0, 0, 24, 16))
    upright.paste(GREEN, (24, 0, 48, 16))
    upright.paste(BLUE, (0, 16, 24, 32))
    inverse = (0, 3, 1, 5, 2, 6, 4)  # the Transpose of Pillow that is the inverse of each EXIF orientation from 2
    stored = upright if orientation == 1 else upright.transpose(Image.Transpose(inverse[orientation - 2]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(stored, format, exif=exif, **({"quality": 95, "subsampling": 0} if format == "JPEG" else {"lossless": True}))
    loaded = load_image(EncodedImage("a", data))
    header = read_header(EncodedImage("a", data))
    assert (loaded.size, header.size, header.rotated) == ((48, 32), (48, 32), orientation > 1)
    assert np.abs(np.asarray(loaded, dtype=int) - np.asarray(upright, dtype=int)).max() <= (40 if format == "JPEG" else 0)
    assert loaded.getexif().get(0x0112) is None


FRAMES = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN, BLUE)]
UNREADABLE = {
    **{f"{share} of a {format}": ((data := encoded(noise(), format))[: int(share * len(data))], "truncated or damaged|not a PNG")
       for format in ("PNG", "JPEG", "WEBP") for share in (0.0, 0.01, 0.5, 0.9)},
    **{format: (encoded(noise(16, 16), format), "not a PNG, JPEG or WebP") for format in ("GIF", "BMP", "TIFF", "PPM", "ICO")},
    **{f"frames in a {format}": (encoded(FRAMES[0], format, save_all=True, append_images=FRAMES[1:]), "animation of 3 frames")
       for format in ("PNG", "WEBP")},
    # These files contain no pixels: decoding them would raise the error for damaged files.
    "too many pixels": (png(8000, 8000, depth=8, colour=2, raw=b""), "64000000 pixels, more than the 50000000"),
    "far too many": (png(60_000, 60_000, depth=8, colour=2, raw=b""), "far more than"),
    "a bomb in a text": (png(1, 1, depth=8, colour=0, raw=b"\0\0",
                             extra=chunk(b"zTXt", b"k\0\0" + zlib.compress(b"a" * 8_000_000))), "damaged"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_unreadable_files_raise_with_the_file_name_whatever_its_extension(tmp_path, case):
    data, message = UNREADABLE[case]
    path = tmp_path / "picture.png"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"picture\.png: .*({message})"):
        load_image(path)


@given(
    st.sampled_from(["PNG", "JPEG", "WEBP"]), st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6), st.data()
)
def test_damaged_bytes_give_an_image_or_a_value_error(format, changes, data):
    raw = bytearray(encoded(noise(16, 8), format, exif=Image.Exif()))
    for place, value in changes:
        raw[place % len(raw)] = value
    raw = raw[: data.draw(st.integers(0, len(raw)))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow warns of odd EXIF
        try:
            assert load_image(EncodedImage("bad", bytes(raw)), max_pixels=10_000).mode == "RGB"
            said = "bad: "
        except ValueError as error:
            said = str(error)
    assert said.startswith("bad: ")
    assert "0x" not in said  # Pillow's messages can contain memory addresses


def test_masks_are_loaded_as_greyscale_and_transparent_masks_raise(tmp_path):
    assert load_mask(EncodedImage("m", encoded(Image.new("L", (2, 2), 128), "PNG"))).getcolors() == [(4, 128)]
    assert load_mask(EncodedImage("m", encoded(Image.new("1", (2, 2), 1), "PNG"))).getcolors() == [(4, 255)]
    assert load_mask(EncodedImage("m", encoded(Image.new("RGBA", (2, 2), (255, 255, 255, 255)), "PNG"))).getcolors() == [(4, 255)]
    path = tmp_path / "mask.png"
    Image.new("RGBA", (2, 2), (255, 255, 255, 0)).save(path)
    with pytest.raises(ValueError, match=r"mask\.png: a mask with transparent parts"):
        load_mask(path)
    with pytest.raises(ValueError, match="101 pixels, more than the 100"):
        load_mask(EncodedImage("bomb", png(101, 1, depth=8, colour=0, raw=b"")), max_pixels=100)


def test_fit_scales_to_cover_and_crops_at_the_centre():
    thirds = Image.new("RGB", (90, 30))
    for place, colour in enumerate((RED, GREEN, BLUE)):
        thirds.paste(colour, (30 * place, 0, 30 * place + 30, 30))
    assert fit(thirds, size=(30, 30)).getcolors() == [(900, GREEN)]
    small = fit(thirds, size=(10, 10)).crop((3, 0, 7, 10))  # away from Lanczos's ringing at the seams
    assert np.abs(np.asarray(small, dtype=int) - np.array(GREEN)).max() <= 2


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60), st.integers(1, 60))
def test_fitted_masks_have_no_new_values_and_the_requested_size(width, height, out_width, out_height):
    mask = Image.fromarray((np.arange(width * height).reshape(height, width) % 2 * 255).astype(np.uint8))
    fitted = fit_mask(mask, size=(out_width, out_height))
    assert fitted.size == fit(mask.convert("RGB"), size=(out_width, out_height)).size == (out_width, out_height)
    assert {value for _, value in fitted.getcolors()} <= {0, 255}


def half(white, *, mode="L", size=(8, 4)):
    """A mask whose right half has the value ``white``."""
    mask = Image.new(mode, size, 0)
    mask.paste(white, (size[0] // 2, 0, *size))
    return mask


def palette(*colours):
    """A picture of indices 0, 1, ... of a palette, in equal columns."""
    mask = Image.fromarray(np.repeat(np.arange(len(colours), dtype=np.uint8), 4)[None].repeat(4, 0))
    mask.putpalette([value for colour in colours for value in colour])
    return mask


MASKS = {
    "0 and 1": (half(1), True), "0 and 128": (half(128), True), "0 and 254": (half(254), True),
    "one bit": (half(1, mode="1"), True), "palette, black and dark red": (palette((0, 0, 0), (128, 0, 0)), True),
    "RGB, black and blue": (palette((0, 0, 0), (0, 0, 255)).convert("RGB"), True),
    "16 bits, 0 and 1": (Image.fromarray(np.asarray(half(1)).astype(np.uint16)), True),
    "16 bits, 0 and 255": (Image.fromarray(np.asarray(half(255)).astype(np.uint16)), True),
    "16 bits, 0 and 65535": (Image.fromarray(np.asarray(half(255)).astype(np.uint16) * 257), True),
    "grey and alpha 255": (Image.merge("LA", (half(1), Image.new("L", (8, 4), 255))), True),
    "numbers of objects": (palette((0, 0, 0), (1, 1, 1), (2, 2, 2)), False),
    "16 bits, numbers of objects": (Image.fromarray(np.arange(32, dtype=np.uint16).reshape(4, 8)), False),
    "palette of classes": (palette((0, 0, 0), (128, 0, 0), (0, 128, 0)), False),
    "black for the region, on white and red": (palette((255, 255, 255), (255, 0, 0)), False),
    "the region in the alpha channel": (Image.merge("LA", (Image.new("L", (8, 4)), half(255))), False),
}  # fmt: skip


@pytest.mark.parametrize("name", MASKS)
def test_point_1_7_a_mask_is_the_region_that_it_shows_or_is_refused_in_files_rows_and_on_the_server(name):

    mask, readable = MASKS[name]
    data = encoded(mask, "PNG")
    (served,) = decode_images([PictureHead(form="encoded", mode="L")], [data], Limits())
    if not readable:
        assert served == "bad_picture"
        for source in (EncodedImage("m", data), encoded_image(mask)):
            with pytest.raises(ValueError, match="save it as black and white"):
                load_mask(source)
        return
    region = np.asarray(half(255, size=mask.size))
    for found in (served, load_mask(EncodedImage("m", data)), load_mask(encoded_image(mask))):
        assert np.array_equal(np.asarray(found), region)


def test_point_1_7_soft_masks_keep_their_grey_levels():
    soft = Image.fromarray(np.arange(0, 256, 8, dtype=np.uint8)[None])
    assert np.array_equal(np.asarray(load_mask(EncodedImage("m", encoded(soft, "PNG")))), np.asarray(soft))
    noisy = encoded(half(255, size=(32, 32)), "JPEG", quality=70)
    assert np.array_equal(np.asarray(load_mask(EncodedImage("m", noisy))) > 127, np.asarray(half(255, size=(32, 32))) > 127)


def display_p3():
    """Pillow's profile of sRGB with the primaries of Display P3; the curve is the same."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    columns = {b"rXYZ": (0.51512, 0.24120, -0.00105), b"gXYZ": (0.29198, 0.69225, 0.04189), b"bXYZ": (0.15710, 0.06657, 0.78407)}
    out = bytearray(profile)
    for number in range(struct.unpack_from(">I", profile, 128)[0]):
        name, offset, _ = struct.unpack_from(">4sII", profile, 132 + 12 * number)
        if name in columns:
            struct.pack_into(">3i", out, offset + 8, *(round(value * 65536) for value in columns[name]))
    return bytes(out)


@pytest.mark.parametrize(("format", "mode"), [("PNG", "RGBA"), ("PNG", "P"), ("WEBP", "rotated"), ("JPEG", "RGB")])
def test_point_1_7_colours_of_a_wide_profile_are_read_as_srgb(format, mode):
    colour, profile, exif = (60, 160, 60), display_p3(), Image.Exif()
    if mode == "rotated":
        exif[0x0112] = 6
    plain = Image.new("RGB", (8, 4), colour)
    stored = plain.quantize(2) if mode == "P" else plain.convert("RGB" if mode == "rotated" else mode)
    options = {"lossless": True} if format == "WEBP" else {"quality": 100} if format == "JPEG" else {}
    data = encoded(stored, format, icc_profile=profile, exif=exif, **options)
    source = EncodedImage("a", data)
    loaded = load_image(source)
    in_srgb = (0, 163, 40)  # by the matrices of both primaries, with red cut off at 0
    assert np.abs(np.array(loaded.getpixel((1, 1))) - in_srgb).max() <= (3 if format == "JPEG" else 1)
    assert loaded.size == ((4, 8) if mode == "rotated" else (8, 4))
    assert read_header(source).profile == "converted"
    assert load_image(encoded_image(Image.open(io.BytesIO(data)))).getpixel((1, 1)) == loaded.getpixel((1, 1))


def test_point_1_7_an_srgb_profile_changes_no_pixel_and_an_unusable_profile_is_not_applied():
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    other_colours = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    for profile, use in ((srgb, "none"), (b"damaged" * 40, "unusable"), (other_colours, "unusable")):
        source = EncodedImage("a", encoded(noise(), "PNG", icc_profile=profile))
        assert np.array_equal(np.asarray(load_image(source)), np.asarray(noise()))
        assert read_header(source).profile == use
    grey = EncodedImage("a", encoded(noise().convert("L"), "PNG", icc_profile=display_p3()))  # as cameras write greyscale
    assert np.abs(np.asarray(load_image(grey), dtype=int) - np.asarray(noise().convert("L"), dtype=int)[..., None]).max() <= 2


SIDE = 40


def gradient(tmp_path, rows=4):
    """A folder of images, and masks and targets equal to them, whose pixels tell their place: red is x, green is y."""
    folder = tmp_path / "own"
    folder.mkdir()
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    lines = []
    for row in range(rows):
        pixels = np.stack([x * 6, y * 6, np.full_like(x, 10 * row)], axis=-1).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{row}.png")
        Image.fromarray(pixels).save(folder / f"{row}_target.png")
        Image.fromarray(pixels).save(folder / f"{row}_ref.png")
        Image.fromarray((x * 6).astype(np.uint8)).save(folder / f"{row}_mask.png")
        files = {name: f"{row}_{name}.png" for name in ("target", "mask")} | {"reference": f"{row}_ref.png"}
        lines.append({"file_name": f"{row}.png", "instruction": "warmer", "id": f"row{row}", **files})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_training_images_are_cropped_with_their_masks_and_targets_and_held_out_images_are_not(tmp_path):
    data = FolderData(path=str(gradient(tmp_path)), held_out=1, crops=5)
    sets, again, other = (data.build(DataContext(seed=seed)) for seed in (0, 0, 1))
    assert (len(sets.train), len(sets.heldout)) == (15, 1)
    assert len({task.id for task in sets.train}) == 15
    assert sets.heldout[0].images[0].size == (SIDE, SIDE)
    for index, task in enumerate(sets.train):
        image, target, mask, reference = (np.asarray(each) for each in (task.images[0], task.target, task.mask, task.reference))
        assert (image == target).all()
        assert (image[..., 0] == mask).all()
        assert reference.shape == (SIDE, SIDE, 3)
        height, width, _ = image.shape
        assert abs(height - width) <= 1
        assert width >= SMALLEST * SIDE - 1
        assert ("#crop" in task.id) == (index >= 3)
        if index < 3:  # the first tasks are the rows as they are
            assert width == SIDE
        x, y = image[0, 0, 0] // 6, image[0, 0, 1] // 6
        assert image[-1, -1, 0] // 6 == x + width - 1
        assert image[-1, -1, 1] // 6 == y + height - 1
    assert len({task.images[0].size for task in sets.train}) > 3
    crops = [[task.images[0].tobytes() for task in each.train] for each in (sets, again, other)]
    assert crops[0] == crops[1] != crops[2]
    resized = data.model_copy(update={"size": (16, 16)}).build(DataContext())
    assert {task.images[0].size for task in resized.train} == {(16, 16)}


@pytest.mark.parametrize("size", [(1, 1), (3, 50), (101, 7)])
def test_a_crop_lies_in_its_image_and_has_a_pixel(size):
    image = Image.new("RGB", size, (1, 2, 3))
    for number in range(50):
        made = random_crop(0, "row", number).of(image)
        assert 1 <= made.width <= size[0]
        assert 1 <= made.height <= size[1]
        assert made.getcolors() == [(made.width * made.height, (1, 2, 3))]  # no black border
    assert Crop(left=0.0, top=0.0, size=1.0).of(image).size == size


WIDE, SQUARE = (192, 48), (48, 48)


def mask(box, size=WIDE):
    made = Image.new("L", size)
    made.paste(255, box)
    return made


# The part of the photograph that the mask shows, the size of the model, (height, width), and whether the crop keeps any of it.
REGIONS = {
    "at the left": (mask((0, 10, 30, 40)), SQUARE, False),
    "at both ends, with a bounding box around the middle": (mask((190, 10, 192, 40)), SQUARE, False),
    "one pixel beyond the crop": (mask((71, 10, 72, 40)), SQUARE, False),
    "at the first pixel of the crop": (mask((72, 10, 73, 40)), SQUARE, True),
    "at the left of a size of the same shape": (mask((0, 10, 30, 40)), (24, 96), True),
    "at the top of an upright photograph": (mask((10, 0, 40, 30), (48, 192)), SQUARE, False),
    "nowhere: nothing should change": (Image.new("L", WIDE), SQUARE, True),
}
REGIONS["at both ends, with a bounding box around the middle"][0].paste(255, (0, 0, 2, 9))


def rows(shape, count=4):
    return [{"prompt": f"edit {n}", "image": Image.new("RGB", shape.size, (n, 9, 9)), "mask": shape} for n in range(count)]


@pytest.mark.parametrize("case", REGIONS)
def test_point_1_7_a_row_whose_mask_the_crop_removes_is_refused_at_the_start(case, tmp_path):
    shape, size, kept = REGIONS[case]
    stream = datasets.Dataset.from_list(rows(shape)).to_iterable_dataset()
    for number, row in enumerate(rows(shape)):
        row["image"].save(tmp_path / f"{number}.png")
    shape.save(tmp_path / "m.png")
    lines = [{"file_name": f"{n}.png", "instruction": f"edit {n}", "mask": "m.png"} for n in range(4)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    folder = FolderData(path=str(tmp_path), held_out=1)
    for data in (TableData.of(rows(shape), held_out=1), folder, folder, IterableData.of(stream, held_out=1, ahead=0)):
        if kept:
            sets = data.build(DataContext(size=size))
            assert sets.heldout[0].mask.getextrema()[1] == shape.getextrema()[1]
        else:  # the second time from the stored check
            with pytest.raises(ValueError, match=r"the crop of \d+x\d+ to the middle.* removes the whole mask"):
                data.build(DataContext(size=size))


def test_point_1_7_a_row_that_is_not_checked_at_the_start_is_refused_when_it_is_drawn():
    row = TableData.of(rows(REGIONS["at the left"][0])).rows(seed=0)[1]
    with pytest.raises(ValueError, match=r"train_dataset:2: the crop of .* removes the whole mask"):
        load_task(row, resize=(48, 48))


def test_point_1_7_no_random_crop_removes_the_whole_mask(tmp_path):
    Image.new("RGB", (48, 48), "red").save(tmp_path / "0.png")
    mask((0, 0, 6, 6), (48, 48)).save(tmp_path / "m.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "0.png", "instruction": "x", "mask": "m.png"}\n')
    sets = FolderData(path=str(tmp_path), held_out=0, crops=40).build(DataContext(size=(48, 48), eval_split="train"))
    assert [task.mask.getextrema() for task in sets.train] == [(0, 255)] * 40


def test_point_1_7_crops_of_more_than_half_and_of_what_the_target_changes_are_notes(caplog):
    edited = Image.new("RGB", WIDE, "white")
    edited.paste("blue", (0, 0, 20, 48))
    for target, what in ((edited, "removes the whole region that the target changes"), (None, "keeps 25% of the image")):
        pairs = [{"prompt": f"{n}", "image": Image.new("RGB", WIDE, (255 - n,) * 3), "target": target} for n in range(4)]
        data = TableData.of(pairs if target else rows(mask((0, 0, *WIDE))), held_out=0)
        sets = data.build(DataContext(size=SQUARE, eval_split="train"))
        assert len(sets.problems) == 4
        assert all(what in str(problem) for problem in sets.problems)
        assert "4 of 4 rows are cropped to less than half, or lose what they change" in caplog.text
