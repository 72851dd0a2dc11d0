"""Pictures to tiles, against the golden ones; the encoder against golden, transformers and itself; cases 43 to 49."""

import base64
import io
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import NoNarrowFloat, relative_rms, unchecked
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features
from safetensors.torch import load_file
from torch import Tensor

from inkling_ref import vision
from inkling_ref.config import InklingConfig, VisionConfig
from inkling_ref.errors import InputError
from inkling_ref.vision import VisionModel, load_image, process_images

GOLDEN = Path(__file__).parent / "golden"
PICTURES = GOLDEN / "image_processing"
NOTES = json.loads((PICTURES / "notes.json").read_text())
CASES = NOTES["cases"]
EXPECTED = load_file(PICTURES / "expected.safetensors")

# Sizes pairwise distinct; grids wider, higher, 1 x n, n x 1, larger and smaller than the learned position grid.
ENCODERS = {
    "d8": VisionConfig(40, 3, 5, 44, patch_size=3, posemb_grid_size=7, projection_hidden_dim=28),
    "d12": VisionConfig(36, 2, 3, 52, patch_size=5, posemb_grid_size=4, projection_hidden_dim=20, rope_theta=300.0),
    "d16-merge3": VisionConfig(
        32, 2, 2, 60, patch_size=2, spatial_merge_size=3, posemb_grid_size=5, projection_hidden_dim=24
    ),
    "d4-deep": VisionConfig(28, 5, 7, 48, patch_size=4, posemb_grid_size=11, projection_hidden_dim=34),
}
GRIDS = [(2, 3), (1, 5), (7, 1), (2, 3), (1, 1), (3, 4)]
D_TEXT = 38


def encoder(config: VisionConfig, seed: int = 0) -> VisionModel:
    """Random weights that make every term matter."""
    model = VisionModel(config, D_TEXT).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 and "position" not in name else 0.5
        parameter.copy_(scale * torch.randn(parameter.shape, generator=generator) + 1.0 * ("ln_" in name))
    return model


def tiles(config: VisionConfig, grids=GRIDS, seed: int = 1) -> tuple[Tensor, Tensor]:
    n, side = sum(r * c for r, c in grids), config.tile_size
    pixels = torch.rand(n, side, side, 3, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return pixels, torch.tensor([(1, r, c) for r, c in grids])


def drawn(mode: str = "RGB", size: tuple[int, int] = (43, 27), seed: int = 0) -> Image.Image:
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}[mode]
    data = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), np.uint8)
    return Image.fromarray(data.squeeze(-1) if channels == 1 else data)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(image: Image.Image) -> Tensor:
    """Levels of the first tile's corner, as large as the image, after processing."""
    values, _ = process_images(image)
    return (values[0, : image.height, : image.width] * 127.5 + 127.5).round().int()


# --- Image processing: golden ----------------------------------------------------------------------------------------


def check_pixels(values: Tensor, grid: Tensor, name: str, levels: int = 0) -> None:
    case = CASES[name]
    assert values.dtype == torch.float32
    assert grid.dtype == torch.int64
    assert grid.tolist() == case["grid"] == EXPECTED[f"{name}.image_grid_thw"].tolist()
    assert list(values.shape) == case["shape"]
    if case["stored"] == "slice":
        weights = torch.arange(values.numel()) % 65521
        assert values.double().sum().item() == pytest.approx(case["sum"], rel=1e-7)
        assert (values.double().flatten() * weights).sum().item() == pytest.approx(case["weighted_sum"], rel=1e-7)
        values = values[tuple(slice(*bounds) for bounds in case["slice"])]
        want = EXPECTED[f"{name}.pixel_values_slice"]
    else:
        want = EXPECTED[f"{name}.pixel_values"]
    assert (values - want).abs().max() <= 1.2e-7 + levels / 127.5


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "PIL" in case["given_as"]])
def test_golden_opened_images(name):
    images = [Image.open(PICTURES / file) for file in CASES[name]["files"]]
    same_jpeg_decoder = features.version("jpg") == NOTES["made_with"]["libjpeg-turbo in pillow"]
    is_jpeg = CASES[name]["files"][0].endswith("jpg")
    check_pixels(*process_images(images), name, levels=2 if is_jpeg and not same_jpeg_decoder else 0)
    if CASES[name].get("array_result") == "same":
        check_pixels(*process_images([np.array(Image.open(PICTURES / file)) for file in CASES[name]["files"]]), name,
                     levels=2 if is_jpeg and not same_jpeg_decoder else 0)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["rgb_wide_line_array", "rgb_few_rows_array", "rgb_pixel_array", "grey_array", "rgb_key_array"]
)
def test_golden_arrays_are_rows_columns_channels(name):
    """Our deviation: the release guesses channels first for the first three, and refuses grey arrays."""
    array = np.array(Image.open(PICTURES / CASES[name]["files"][0]))
    assert CASES[name]["given_as"] == f"array (uint8, shape {list(array.shape)})"
    ours = name if name == "rgb_key_array" else name.removesuffix("_array")  # an array has no colour key
    check_pixels(*process_images(array), ours)
    check_pixels(*process_images(torch.from_numpy(array)), ours)


def test_golden_arrays_refused():
    with pytest.raises(InputError, match=r"^image 1: float32 array of shape \[37, 43, 3\], expected uint8 \[rows"):
        process_images(np.load(PICTURES / "float_rgb.npy"))
    with pytest.raises(InputError, match=r"^image 1: uint8 array of shape \[52, 44, 2\], expected uint8 \[rows"):
        process_images(np.array(Image.open(PICTURES / "grey_alpha.png")))


def test_every_golden_case_is_tested():
    arrays = {"rgb_wide_line_array", "rgb_few_rows_array", "rgb_pixel_array", "grey_array", "rgb_key_array"}
    opened = {name for name, case in CASES.items() if "PIL" in case["given_as"]}
    assert len(CASES) == 29
    assert set(CASES) == opened | arrays | {"float_rgb", "grey_alpha_array"}


# --- Image processing: ours ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((5, 7, 3), np.int64), r"image 2: int64 array of shape \[5, 7, 3\]"),
        (np.zeros((5, 7, 5), np.uint8), r"image 2: uint8 array of shape \[5, 7, 5\]"),
        (np.zeros((2, 5, 7, 3), np.uint8), r"image 2: uint8 array of shape \[2, 5, 7, 3\]"),
        (np.zeros(7, np.uint8), r"image 2: uint8 array of shape \[7\]"),
        (np.zeros((0, 7, 3), np.uint8), "image 2: 7x0 pixels"),
        (torch.zeros(5, 7, 3, dtype=torch.bfloat16), r"image 2: bfloat16 array of shape \[5, 7, 3\]"),
        (torch.zeros(5, 7, 3, dtype=torch.bool), r"image 2: bool array of shape \[5, 7, 3\]"),
        ("picture.png", r"image 2: str, expected a Pillow image \(load_image opens files\)"),
        (None, "image 2: NoneType, expected"),
        (Image.new("La", (3, 2)), "image 2: cannot be decoded"),
        (Image.new("RGB", (0, 5)), "image 2: 0x5 pixels"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_refused_by_name(image, message):
    with pytest.raises(InputError, match=f"^{message}[^\n]*$"):
        process_images([drawn(), image])


def test_no_images():
    with pytest.raises(InputError, match="at least one image"):
        process_images([])


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=4),
    mode=st.sampled_from(["L", "RGB", "RGBA"]),
)
@settings(max_examples=30, deadline=None)
def test_any_sizes_reassemble(sizes, mode):
    """Arrays and images agree; tiles put together again are the picture, then padding."""
    config = VisionConfig(8, 1, 1, 8, patch_size=4)
    images = [drawn(mode, size, seed) for seed, size in enumerate(sizes)]
    values, grid = process_images(images, config)
    from_arrays, _ = process_images(tuple(np.array(image) for image in images), config)
    assert torch.equal(values, from_arrays)
    levels = values * 127.5 + 127.5
    for (width, height), image, (_, rows, columns) in zip(sizes, images, grid.tolist(), strict=True):
        picture, levels = levels[: rows * columns], levels[rows * columns :]
        assert (rows, columns) == (-(-height // 8), -(-width // 8))
        whole = torch.full((rows * 8, columns * 8, 3), -1.0)
        if mode == "RGBA":
            board = np.where(np.add.outer(np.arange(height) // 8, np.arange(width) // 8) % 2 == 0, 204, 153)[..., None]
            data = np.array(image).astype(int)
            flat = (data[..., :3] * data[..., 3:] + board * (255 - data[..., 3:]) + 127) // 255
        else:
            flat = np.array(image.convert("RGB"))
        whole[:height, :width] = torch.tensor(flat)
        for index, tile in enumerate(picture):
            r, c = index // columns * 8, index % columns * 8
            assert (tile - whole[r : r + 8, c : c + 8]).abs().max() < 1e-3
    assert levels.numel() == 0


def test_flipped_and_read_only_arrays():
    array = np.array(drawn())
    array.flags.writeable = False
    for view in (array[:, ::-1], array[::-1], array[..., ::-1], array.transpose(1, 0, 2), np.asfortranarray(array)):
        assert torch.equal(process_images(view)[0], process_images(view.copy(order="C"))[0])


# --- load_image ------------------------------------------------------------------------------------------------------

ORIENTED = {  # EXIF orientation -> what a viewer does to the stored rows
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1), 6: lambda a: a[::-1].swapaxes(0, 1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1), 8: lambda a: a[:, ::-1].swapaxes(0, 1),
}  # fmt: skip


def sources(data: bytes, folder: Path) -> dict:
    path = folder / "picture"
    path.write_bytes(data)
    url = "data:image/any;base64," + base64.b64encode(data).decode()
    return {"path": path, "str": str(path), "bytes": data, "PIL": Image.open(io.BytesIO(data)), "data URL": url}


@pytest.mark.parametrize("orientation", ORIENTED)
def test_case_43_exif_orientation(orientation, tmp_path):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(drawn(size=(4, 2)), "JPEG", exif=exif.tobytes(), quality=100)
    stored = np.array(Image.open(io.BytesIO(data)))
    want = ORIENTED[orientation](stored)
    for kind, source in sources(data, tmp_path).items():
        image = load_image(source)
        assert np.array_equal(np.array(image), want), kind
        assert np.array_equal(np.array(load_image(image)), want), f"{kind}: applied twice"
    # The release takes an opened image as it is stored.
    assert torch.equal(process_images(Image.open(io.BytesIO(data)))[0], process_images(stored)[0])


@pytest.mark.parametrize("name", ["exif_3", "exif_6", "exif_8"])
def test_case_43_golden_photos(name):
    stored = np.array(Image.open(PICTURES / f"{name}.jpg"))
    image = load_image(PICTURES / f"{name}.jpg")
    assert np.array_equal(np.array(image), ORIENTED[int(name[-1])](stored))
    assert process_images(image)[1].tolist() == ([[1, 1, 2]] if name == "exif_3" else [[1, 2, 1]])


def test_case_44_one_scene_in_every_mode(tmp_path):
    """Alpha and palette: equal scenes give equal tensors, always three channels, whoever opened the file."""
    opaque = Image.fromarray(np.array([[0, 255], [255, 0]], np.uint8))  # black and white: exact in every mode
    scene = {mode: opaque.convert(mode) for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "YCbCr")}
    want = pixels(opaque)
    assert want.tolist() == [[[0] * 3, [255] * 3], [[255] * 3, [0] * 3]]
    for mode, image in scene.items():
        assert torch.equal(pixels(image), want), mode
        assert torch.equal(pixels(load_image(image)), want), mode
        assert load_image(image).mode in ("RGB", "RGBA")

    # The top right pixel transparent, with a colour hidden beneath it: the checkerboard's 204 shows instead.
    rgba = opaque.convert("RGBA")
    rgba.putpixel((1, 0), (9, 99, 199, 0))
    grey_alpha = opaque.convert("LA")
    grey_alpha.putpixel((1, 0), (99, 0))
    palette = Image.new("P", (2, 2))
    palette.putpalette([0, 0, 0, 255, 255, 255, 9, 99, 199])
    palette.putdata([0, 2, 1, 0])
    key = rgba.convert("RGB")
    files = {
        "RGBA": encoded(rgba), "LA": encoded(grey_alpha), "colour key": encoded(key, transparency=(9, 99, 199)),
        "index": encoded(palette, transparency=2), "table": encoded(palette, transparency=bytes([255, 255, 0])),
        "WebP": encoded(rgba, "WEBP", lossless=True, exact=True), "GIF": encoded(palette, "GIF", transparency=2),
    }  # fmt: skip
    want[0, 1] = 204
    for kind, data in files.items():
        assert torch.equal(pixels(Image.open(io.BytesIO(data))), want), kind
        for source in sources(data, tmp_path).values():
            assert torch.equal(pixels(load_image(source)), want), kind


RAMP = np.array([[0, 64, 256, 32768, 65535]])


@pytest.mark.parametrize("mode", ["I;16", "I;16B", "I", "F", "PNG", "TIFF"])
def test_case_45_deep_grey_is_scaled(mode):
    if mode == "F":
        image = Image.fromarray((RAMP / 65535).astype(np.float32))
    elif mode == "I":
        image = Image.fromarray(RAMP.astype(np.int32))
    elif mode == "I;16B":
        image = Image.frombytes("I;16B", (5, 1), RAMP.astype(">u2").tobytes())
    else:
        image = Image.fromarray(RAMP.astype(np.uint16))
        if mode in ("PNG", "TIFF"):
            image = Image.open(io.BytesIO(encoded(image, mode)))
    loaded = load_image(image)
    assert loaded.mode == "RGB"
    assert np.array(loaded)[0].tolist() == [[level] * 3 for level in (0, 0, 1, 128, 255)]


def test_case_45_golden_grey16_is_not_saturated():
    stored = np.array(Image.open(PICTURES / "grey16.png"))
    assert np.array_equal(np.array(load_image(PICTURES / "grey16.png"))[..., 1], stored >> 8)


def test_case_45_sixteen_bit_colour_key():
    image = Image.open(io.BytesIO(encoded(Image.fromarray(RAMP.astype(np.uint16)))))
    image.info["transparency"] = 64
    assert np.array(load_image(image)).tolist() == [
        [[0] * 3 + [255], [0] * 4, *([v] * 3 + [255] for v in (1, 128, 255))]
    ]


@pytest.mark.parametrize(
    "values",
    [
        np.array([[-1, 5]], np.int32),
        np.array([[0, 65536]], np.int32),
        np.float32([[0, 1.5]]),
        np.float32([[0, np.nan]]),
    ],
    ids=["negative", "17 bits", "above 1", "NaN"],
)
def test_case_45_out_of_range_is_refused(values):
    with pytest.raises(InputError, match=r"^image: grey values .* expected 0 to (1|65535)$"):
        load_image(Image.fromarray(values))


@pytest.mark.parametrize(
    ("size", "grid"),
    [((1, 1), [1, 1, 1]), ((1, 2000), [1, 50, 1]), ((2000, 1), [1, 1, 50]), ((31, 639), [1, 16, 1])],
    ids=lambda value: "x".join(map(str, value)),
)
def test_case_47_extreme_sizes(size, grid, tmp_path):
    for source in sources(encoded(drawn(size=size)), tmp_path).values():
        values, grids = process_images(load_image(source))
        assert grids.tolist() == [grid]
        assert values.shape == (grid[1] * grid[2], 40, 40, 3)


@pytest.mark.parametrize("size", [(0, 5), (5, 0)])
def test_case_47_no_pixels(size):
    with pytest.raises(InputError, match=rf"^image: {size[0]}x{size[1]} pixels .* at least 1x1$"):
        load_image(Image.new("RGB", size))
    with pytest.raises(InputError, match=r"^image 1: .* at least 1x1$"):
        process_images(Image.new("RGB", size))


def test_case_47_too_many_pixels():
    """Refused from the header, before decoding; and by what padding makes of a thin line."""

    def claims(width, height):
        data = bytearray(encoded(Image.new("1", (1, 1))))
        data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        data[29:33] = zlib.crc32(bytes(data[12:29])).to_bytes(4, "big")
        return bytes(data)

    for size in ((10_000, 10_000), (60_000, 60_000)):  # Pillow warns of the first, and refuses the second
        with pytest.raises(InputError, match=r"^image bytes: [^\n]* expected at most 89,478,485[^\n]*$"):
            load_image(claims(*size))
    line = Image.new("1", (3_000_000, 1))
    assert load_image(line.crop((0, 0, 9, 1))).size == (9, 1)
    with pytest.raises(InputError, match=r"^image 1: 3000000x1 pixels padded to multiples of 40, expected at most"):
        process_images(line)


def test_case_48_no_filter_and_constants_once(monkeypatch):
    """The release resizes nothing, so there is no filter to mistake; padding and levels come from named constants."""
    image = Image.open(PICTURES / "rgb_gradient.png")
    assert image.size == (50, 70)
    values, _ = process_images(image)
    assert (values - EXPECTED["rgb_gradient.pixel_values"]).abs().max() * 127.5 < 1e-3
    monkeypatch.setattr(vision, "PAD_LEVEL", 7)
    monkeypatch.setattr(vision, "LEVEL_SCALE", 10.0)
    changed, _ = process_images(image)
    assert changed[-1, -1, -1].tolist() == pytest.approx([(7 - 127.5) / 10] * 3)
    assert torch.allclose(changed[0], values[0] * 12.75)


def test_broken_files_are_refused(tmp_path):
    whole = encoded(drawn(size=(300, 200)))
    jpeg = encoded(drawn(size=(300, 200)), "JPEG")
    (tmp_path / "empty.png").touch()
    (tmp_path / "notes.txt").write_text("no picture\n" * 9)
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "cut.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (tmp_path / "header.png").write_bytes(whole[:40])
    broken = bytearray(whole)
    broken[60:5000] = bytes(4940)
    (tmp_path / "zeros.png").write_bytes(broken)
    expected = {
        "missing.png": "No such file", "empty.png": "not an image", "notes.txt": "not an image",
        "cut.png": "cannot be decoded", "cut.jpg": "cannot be decoded", "header.png": "not an image",
        "zeros.png": "cannot be decoded", ".": "Is a directory", "nul\0": "null byte",
    }  # fmt: skip
    for file, message in expected.items():
        with pytest.raises(InputError, match=rf"^image '[^\n]*: [^\n]*{message}[^\n]*expected[^\n]*$"):
            load_image(f"{tmp_path}/{file}")
    with pytest.raises(InputError, match=r"^image 1: cannot be decoded"):
        process_images(Image.open(tmp_path / "cut.png"))


@pytest.mark.parametrize(
    "source",
    [b"", b"GIF89a", "data:image/png;base64,", "data:image/png", "data:image/png;base64,abc", "data:,text", 7, None],
    ids=repr,
)
def test_bad_sources_are_refused(source):
    with pytest.raises(InputError, match=r"^image[^\n]*expected[^\n]*$"):
        load_image(source)


def test_data_url_without_base64():
    data = encoded(drawn(size=(3, 2)))
    url = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    assert np.array_equal(np.array(load_image(url)), np.array(drawn(size=(3, 2))))


# --- The encoder -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_encoder() -> tuple[VisionModel, dict[str, Tensor]]:
    folder = GOLDEN / "image_text"
    config = InklingConfig.from_pretrained(folder)
    model = VisionModel(config.vision, config.text.hidden_size).eval().requires_grad_(False)
    prefix = "model.visual."
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}, strict=True)
    return model, load_file(folder / "expected.safetensors")


def test_golden_image_features(golden_encoder):
    model, expected = golden_encoder
    features = model(expected["pixel_values"], expected["image_grid_thw"])
    assert relative_rms(features, expected["image_features"]) < 2e-6


def test_float64_is_float64_throughout(golden_encoder):
    model, expected = golden_encoder
    pixel_values, grid = expected["pixel_values"], expected["image_grid_thw"]
    narrow = model(pixel_values, grid)
    model = VisionModel(model.config, narrow.shape[1]).double()
    model.load_state_dict(golden_encoder[0].state_dict())
    with torch.no_grad(), NoNarrowFloat():
        exact = model(pixel_values.double(), grid)
    assert 1e-8 < relative_rms(narrow, exact) < 2e-6


RENAMED = {  # released name -> name inside transformers
    "backbone.": "", "ln_pre": "pre_layernorm", "ln_1": "layernorm_before", "ln_2": "layernorm_after",
    "ls_1.gamma": "lambda_1", "ls_2.gamma": "lambda_2", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2",
    ".position_embedding": ".position_embedding.weight", "proj_in": "merger.linear_1", "proj_out": "merger.linear_2",
}  # fmt: skip


def transformers_twin(model: VisionModel):
    from transformers.models.inkling2.configuration_inkling2 import Inkling2VisionConfig
    from transformers.models.inkling2.modeling_inkling2 import Inkling2VisionModel

    values = {**vars(model.config), "text_hidden_size": D_TEXT}
    values["rope_parameters"] = {"rope_type": "axial", "rope_theta": values.pop("rope_theta")}
    twin = Inkling2VisionModel(Inkling2VisionConfig(**values)).eval()
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        state[name] = tensor
    twin.load_state_dict(state, strict=True)
    return twin.to(next(model.parameters()).dtype).requires_grad_(False)


@pytest.mark.parametrize("name", ENCODERS)
def test_parity_with_transformers(name):
    model = encoder(ENCODERS[name])
    pixel_values, grid = tiles(model.config)
    want = transformers_twin(model)(pixel_values, grid).pooler_output
    assert relative_rms(model(pixel_values, grid), want) < 1e-5


@pytest.mark.parametrize("name", ENCODERS)
def test_bfloat16_is_as_near_to_float32_as_transformers(name):
    ours, theirs = [], []
    for seed in range(3):
        model = encoder(ENCODERS[name], seed).bfloat16().float()  # weights that bfloat16 holds exactly
        pixel_values, grid = tiles(model.config, seed=seed)
        exact = model(pixel_values, grid)
        model = model.bfloat16()
        features = model(pixel_values, grid)
        assert features.dtype == torch.bfloat16
        ours.append(relative_rms(features, exact))
        theirs.append(relative_rms(transformers_twin(model)(pixel_values.bfloat16(), grid).pooler_output, exact))
    assert sum(ours) / sum(theirs) < 1.2


@pytest.mark.parametrize(
    "term", ["ls_1", "ls_2", "position_embedding", "class_embedding", "cls_position", "bias", "rope"]
)
def test_every_term_moves_the_features(term):
    """The parity tests can fail: without any one term the features are elsewhere."""
    model = encoder(ENCODERS["d8"])
    pixel_values, grid = tiles(model.config)
    want = model(pixel_values, grid)
    for name, parameter in model.named_parameters():
        if term in name:
            parameter.zero_()
    if term == "rope":
        model.config = VisionConfig(**{**vars(model.config), "rope_theta": 300.0})
    assert relative_rms(model(pixel_values, grid), want) > 1e-3


def test_images_do_not_see_one_another():
    model = encoder(ENCODERS["d12"])
    pixel_values, grid = tiles(model.config)
    together = model(pixel_values, grid).split([r * c for r, c in GRIDS])
    for image, row, alone in zip(pixel_values.split([r * c for r, c in GRIDS]), grid, together, strict=True):
        assert relative_rms(model(image, row[None]), alone) < 1e-6


@pytest.mark.parametrize("name", ["d8", "d16-merge3"])
def test_padded_batch_equals_pictures_alone(name):
    """What a trainer does: one static shape, pictures of any grid, one place without a picture."""
    model = encoder(ENCODERS[name])
    pixel_values, grid = tiles(model.config)
    counts = [r * c for r, c in GRIDS]
    places, side = max(counts) + 2, model.config.tile_size
    batch = torch.full((len(GRIDS) + 1, places, side, side, 3), 3.0)  # the padding's content must not matter
    for row, image in zip(batch, pixel_values.split(counts), strict=False):
        row[: len(image)] = image
    padded_grid = torch.cat([grid[:, 1:], torch.zeros(1, 2, dtype=torch.int64)])
    features = model.encode(batch, padded_grid, padded=True)
    assert features.isfinite().all()
    real = torch.cat([row[:n] for row, n in zip(features, counts, strict=False)])
    assert relative_rms(real, model(pixel_values, grid)) < 1e-6


def test_encode_compiles_to_one_graph():
    model = encoder(ENCODERS["d8"])
    side = model.config.tile_size
    batch = torch.rand(3, 6, side, side, 3)
    grid = torch.tensor([[2, 3], [1, 4], [0, 0]])
    compiled = torch.compile(model.encode, fullgraph=True, backend="aot_eager")
    with unchecked():
        out = compiled(batch, grid, padded=True)
    assert relative_rms(out, model.encode(batch, grid, padded=True)) < 1e-6


def test_autocast_runs_on_float32_masters():
    model = encoder(ENCODERS["d8"])
    pixel_values, grid = tiles(model.config)
    with torch.autocast("cpu", torch.bfloat16):
        features = model(pixel_values, grid)
    assert 1e-4 < relative_rms(features, model(pixel_values, grid)) < 2e-2


def test_gradients_reach_every_parameter():
    model = encoder(ENCODERS["d8"]).requires_grad_(True)
    pixel_values, grid = tiles(model.config)
    model(pixel_values, grid).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


# --- Positions -------------------------------------------------------------------------------------------------------


def raster(values: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """[patches in block order, ...] -> [rows, columns, ...] in patches."""
    place, real = vision.patch_places(torch.tensor([[rows, columns]]), rows * columns, merge)
    assert real.all()
    out = torch.full((rows * merge, columns * merge, *values.shape[1:]), torch.nan, dtype=values.dtype)
    out[place[0, :, 0], place[0, :, 1]] = values
    return out


def interpolated(table: Tensor, rows: int, columns: int, merge: int) -> Tensor:
    """table [side, side] read at every patch -> [rows, columns] in patches."""
    grid = torch.tensor([[rows, columns]])
    place, _ = vision.patch_places(grid, rows * columns, merge)
    weights = vision.position_weights(place, grid * merge, len(table), table.dtype)
    return raster(weights[0] @ table.flatten(), rows, columns, merge)


@pytest.mark.parametrize(("rows", "columns"), [(2, 5), (5, 2), (1, 7), (7, 1), (6, 6)])
@pytest.mark.parametrize("merge", [1, 2, 3])
def test_case_49_position_table_axes_and_corners(rows, columns, merge):
    side = 6
    line = torch.arange(side, dtype=torch.float64)
    table = 100 * line[:, None] + line
    got = interpolated(table, rows, columns, merge)
    want = F.interpolate(
        table[None, None], (rows * merge, columns * merge), mode="bilinear", align_corners=False, antialias=False
    )[0, 0]
    assert relative_rms(got, want) < 1e-12
    assert relative_rms(interpolated(table.T, columns, rows, merge), got.T) < 1e-12
    # Corners: half a patch in, clamped at the centre of the table's border entries.
    corner = max(0.0, 0.5 * side / (rows * merge) - 0.5) * 100 + max(0.0, 0.5 * side / (columns * merge) - 0.5)
    assert got[0, 0].item() == pytest.approx(corner, abs=1e-9)
    if rows * merge == columns * merge == side:
        assert torch.equal(got, table)


@pytest.mark.parametrize("merge", [2, 3])
def test_patches_are_where_their_places_say(merge):
    """patchify and patch_places agree: a picture whose pixels hold their patch's row and column."""
    rows, columns, patch = 2, 3, 5
    height, width = rows * merge * patch, columns * merge * patch
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    pixels = torch.stack([row // patch, column // patch, (row % patch) * patch + column % patch], dim=-1).float()
    patches = vision.patchify(vision.cut_tiles(pixels, merge * patch)[None], merge)
    place, _ = vision.patch_places(torch.tensor([[rows, columns]]), rows * columns, merge)
    values = patches.unflatten(-1, (patch * patch, 3))
    assert torch.equal(values[..., :2].long(), place[:, :, None].expand(-1, -1, patch * patch, -1))
    assert torch.equal(values[0, 0, :, 2], torch.arange(patch * patch).float())


def test_rotation_depends_on_differences_only():
    """q . k of two patches is that of two others equally far apart; columns turn the first half."""
    place = torch.tensor([[[0, 0], [2, 1], [3, 4], [5, 5]]])
    angles = vision.rotary_angles(place, 12, 50.0)[:, None]
    assert angles.dtype == torch.float64
    assert torch.equal(angles[0, 0, 0], torch.zeros(6, dtype=torch.float64))
    assert angles[0, 0, 2].tolist() == pytest.approx([p * 50 ** (-i / 3) for p in (2, 3) for i in range(3)])
    q, k = torch.randn(2, 1, 1, 1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    q, k = (vision.rotate(x.expand(1, 1, 5, 12), angles.cos(), angles.sin())[0, 0] for x in (q, k))
    assert (q[2] @ k[1]).item() == pytest.approx((q[4] @ k[3]).item())  # both 2 rows, 1 column apart
    assert (q[2] @ k[1]).item() != pytest.approx((q[1] @ k[2]).item())
    assert q.norm(dim=-1).tolist() == pytest.approx([q[0].norm().item()] * 5)


# --- Input errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((6, 6, 6, 3), [[1, 2, 2]], r"image_grid_thw: 4 tiles, but pixel_values holds 6"),
        ((6, 40, 40, 3), [[1, 2, 3]], r"pixel_values: shape \[6, 40, 40, 3\], expected \[tiles, 6, 6, 3\]"),
        ((6, 6, 6, 3), [[2, 1, 3]], r"image_grid_thw: \[\[2, 1, 3\]\], expected integers"),
        ((6, 6, 6, 3), [[1, 2, 3], [1, 0, 4]], r"image_grid_thw: .* expected integers"),
        ((0, 6, 6, 3), [], r"image_grid_thw: \[\], expected"),
    ],
)
def test_wrong_tiles_are_refused(shape, grid, message):
    model = encoder(ENCODERS["d8"])
    with pytest.raises(InputError, match=f"^{message}"):
        model(torch.zeros(shape), torch.tensor(grid, dtype=torch.int64).view(-1, 3))


def test_levels_are_no_pixel_values():
    with pytest.raises(InputError, match=r"^pixel_values: torch.uint8, expected floats"):
        encoder(ENCODERS["d8"])._grids(torch.zeros(6, 6, 6, 3, dtype=torch.uint8), torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("grid", [torch.tensor([1, 2, 3]), torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[2, 3]])])
def test_grids_of_another_kind_are_refused(grid):
    model = encoder(ENCODERS["d8"])
    with pytest.raises(InputError, match=r"^image_grid_thw: .* expected integers \(1, rows, columns\)"):
        model._grids(torch.zeros(6, 6, 6, 3), grid)  # behind the signature, whose shapes a type checker sees first
