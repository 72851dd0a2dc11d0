r"""Pictures: from a file to tiles of pixels, and from tiles to the feature that stands at an image token.

**Image processing.** Sizes are kept. Pixels with alpha are composited over a checkerboard of 8x8-pixel squares:

$$ p = \lfloor (\alpha\, p_{rgb} + (255 - \alpha)\, board_{yx} + 127) / 255 \rfloor, \quad
   board_{yx} = 204 \text{ if } \lfloor y/8 \rfloor + \lfloor x/8 \rfloor \text{ is even, else } 153 $$

Right and bottom are padded with the level -1 to whole tiles (40x40 pixels), levels become

$$ x = (p - 127.5) / 127.5 $$

and the picture is cut into tiles in raster order. One tile is one text token.

**Encoder.** Patches come in block order: tiles in raster order, the m x m patches of each tile in raster order.
Row i of a picture n patches high reads the learned position grid (g x g) by linear interpolation between the centres
of the grid's rows, clamped at the border; columns likewise:

$$ A_{ij} = \max(0,\; 1 - |\mathrm{clamp}((i + 1/2)\, g/n - 1/2,\; 0,\; g - 1) - j|) $$

    position = einsum("npi,npj,ijD->npD", A_row[row], A_column[column], grid)

Queries and keys are rotated in 2-D: the first half of the channel pairs turns with the column, the second half with
the row, with the same d/4 frequencies. Patches count from 1; the class token, which precedes the patches of each
picture, sits at (0, 0).

$$ \omega_i = \theta^{-2i/(d/2)}, \quad i = 0 .. d/4-1 $$

$$ (x_0, x_1) \mapsto (x_0 \cos\phi - x_1 \sin\phi,\; x_1 \cos\phi + x_0 \sin\phi), \quad \phi = \omega_i\, t $$

After a LayerNorm come the blocks, whose attention is full within one picture, scale 1/sqrt(d):

$$ x \leftarrow x + \gamma_1\, Attn(LN_1(x)) $$

$$ x \leftarrow x + \gamma_2\, W_{proj}\, GELU(W_{fc}\, LN_2(x)) $$

The class token is dropped, the patches of a tile are concatenated, and two matrices lead to the text model's width:

$$ y = W_{out}\, GELU(W_{in}\, [x_1; ...; x_{m^2}]) $$

Shapes are written in words (images, tiles, patches, tokens = 1 + patches) with D the encoder's own width.
Released tensors: `model.visual.backbone.{embeddings,ln_pre,layers}.*`, `model.visual.proj_in.weight`,
`model.visual.proj_out.weight`. Config keys: those of `vision_config`.
"""

import base64
import io
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote_to_bytes

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, UInt8
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from .config import VisionConfig
from .errors import InputError
from .residual import wide

PAD_LEVEL = -1  # one below black: the encoder can tell padding from a dark picture
LEVEL_CENTRE = LEVEL_SCALE = 127.5
BOARD_SQUARE, BOARD_LIGHT, BOARD_DARK = 8, 204, 153
MAX_PIXELS = 89_478_485  # per picture, padding included; the number at which Pillow speaks of a decompression bomb

_ARRAYS = "uint8 [rows, columns, 3], [rows, columns, 4] with alpha or [rows, columns] grey"


# --- Image files ---------------------------------------------------------------------------------------------------


def load_image(source: Any) -> Image.Image:
    """The picture that a viewer shows, as an RGB or (where anything is transparent) RGBA image.

    source: a path, the bytes of a file, a `data:` URL, or a Pillow image. Of an animation, the first frame.

    Deviations from what the release makes of an opened image: the EXIF orientation is applied, once, and grey of more
    than 8 bits is scaled instead of saturating at 255: 16-bit (modes I;16 and I) by >> 8, float (mode F) from 0..1
    to 0..255.

    Raises:
        InputError: if the file is missing, not an image, cut short, without pixels or beyond `MAX_PIXELS`, or if
            its grey values lie outside 0..65535 (mode I) or 0..1 (mode F).
    """
    if isinstance(source, Image.Image):
        return _as_shown(source, "image")
    if isinstance(source, bytes):
        return _decode(io.BytesIO(source), "image bytes")
    if isinstance(source, str) and source[:5].lower() == "data:":
        return _decode(io.BytesIO(_data_url_bytes(source)), "image data URL")
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(f"image: {type(source).__name__}, expected a path, bytes, a data URL or a Pillow image")
    try:
        file = open(source, "rb")  # noqa: SIM115  closed below; only the opening itself may speak of a missing file
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"image {os.fspath(source)!r}: {reason}, expected a readable image file") from None
    with file:
        return _decode(file, f"image {os.fspath(source)!r}")


def _data_url_bytes(url: str) -> bytes:
    header, comma, payload = url.partition(",")
    data = unquote_to_bytes(payload)
    try:
        if comma:
            return base64.b64decode(data) if header.lower().rstrip().endswith(";base64") else data
    except ValueError:
        pass
    raise InputError("image data URL: cannot be decoded, expected data:image/png;base64,...")


def _decode(file: Any, name: str) -> Image.Image:
    with _readable(name), warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # _check_size says it as an error
        image = Image.open(file)
    return _as_shown(image, name)


def _as_shown(image: Image.Image, name: str) -> Image.Image:
    _check_size(name, image.height, image.width)  # before anything is decoded
    with _readable(name):
        image = ImageOps.exif_transpose(image)  # also removes the tag: a second call changes nothing
        if image.mode.startswith(("I", "F")):
            image = _eight_bit_grey(image, name)
        return _colours(image)


def _eight_bit_grey(image: Image.Image, name: str) -> Image.Image:
    """Mode I;16, I or F to L, or to LA if one grey value is declared transparent."""
    values = np.asarray(image)
    top = 1 if image.mode == "F" else 65535
    if not (values.min() >= 0 and values.max() <= top):  # so written, NaN fails too
        raise InputError(f"{name}: grey values {values.min()} to {values.max()}, expected 0 to {top}")
    levels = np.rint(values * 255.0) if image.mode == "F" else values >> 8
    grey = Image.fromarray(levels.astype(np.uint8))
    key = image.info.get("transparency")
    if key is not None:  # Pillow compares it with 8-bit levels
        grey.putalpha(Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)))
    return grey


def _colours(image: Image.Image) -> Image.Image:
    """RGBA where anything can be transparent (alpha channel; tRNS index, table or colour key), else RGB."""
    return image.convert("RGBA" if image.has_transparency_data else "RGB")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turn whatever a decoder raises on bad bytes into one line."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise InputError(f"{name}: not an image, expected PNG, JPEG or another format that Pillow reads") from None
    except Image.DecompressionBombError:
        raise InputError(f"{name}: too many pixels, expected at most {MAX_PIXELS:,}") from None
    except Exception as error:  # from OSError to struct.error, by format
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{name}: cannot be decoded ({reason}), expected a whole image") from None


def _check_size(name: str, rows: int, columns: int, tile: int = 1) -> None:
    if rows < 1 or columns < 1:
        raise InputError(f"{name}: {columns}x{rows} pixels (width x height), expected at least 1x1")
    if -(-rows // tile) * -(-columns // tile) * tile * tile > MAX_PIXELS:
        padded = f" padded to multiples of {tile}" if tile > 1 else ""
        raise InputError(f"{name}: {columns}x{rows} pixels{padded}, expected at most {MAX_PIXELS:,} pixels")


# --- Image processing ----------------------------------------------------------------------------------------------


def process_images(
    images: Any, config: VisionConfig | None = None
) -> tuple[Float[Tensor, "tiles side side 3"], Int[Tensor, "images 3"]]:
    """Pictures to tiles, exactly as the release's processor does with opened images.

    images: one or a list of Pillow images, or uint8 arrays or tensors: [rows, columns, 3], [rows, columns, 4] with
    alpha, or [rows, columns] grey. config: only its tile size is used; default that of Small, 40 pixels.

    Pillow images are taken as they are (no EXIF orientation, 16-bit grey saturates): open files with `load_image`.
    Deviation: an array is always [rows, columns, channels] of levels 0..255. The release guesses channels first when
    the first axis is 1, 3 or 4 long, and takes floats in 0..1 as levels 0 and 1; here other dtypes and shapes are
    refused.

    Returns:
        pixel_values float32, (level - 127.5) / 127.5, tiles of one picture after those of the one before;
        image_grid_thw int64, per picture (1, rows, columns) in tiles.

    Raises:
        InputError: naming the picture, by its number from 1, that has no pixels, too many, or another shape or dtype.
    """
    side = (config or VisionConfig()).tile_size
    images = images if isinstance(images, (list, tuple)) else [images]
    if not images:
        raise InputError("images: an empty list, expected at least one image")
    tiles, grids = [], []
    for number, image in enumerate(images, start=1):
        levels = _levels(image, f"image {number}", side)
        if levels.shape[2] == 4:
            levels = composite(levels)
        rows, columns, _ = levels.shape
        pixels = F.pad(levels.float(), (0, 0, 0, -columns % side, 0, -rows % side), value=PAD_LEVEL)
        tiles.append(cut_tiles((pixels - LEVEL_CENTRE) / LEVEL_SCALE, side))
        grids.append((1, pixels.shape[0] // side, pixels.shape[1] // side))
    return torch.cat(tiles), torch.tensor(grids)


def _levels(image: Any, name: str, side: int) -> UInt8[Tensor, "rows columns channels"]:
    if isinstance(image, Image.Image):
        _check_size(name, image.height, image.width, side)
        with _readable(name):
            array = np.array(_colours(image))
    elif not isinstance(image, (np.ndarray, Tensor)):
        raise InputError(
            f"{name}: {type(image).__name__}, expected a Pillow image (load_image opens files) or {_ARRAYS}"
        )
    else:
        shape, dtype = tuple(image.shape), str(image.dtype).removeprefix("torch.")
        if dtype != "uint8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,), (4,)):
            raise InputError(f"{name}: {dtype} array of shape {list(shape)}, expected {_ARRAYS}")
        _check_size(name, *shape[:2], side)
        array = np.array(image.numpy(force=True) if isinstance(image, Tensor) else image)  # a copy: may be read-only
        if array.ndim == 2:
            array = np.repeat(array[..., None], 3, axis=2)
    return torch.from_numpy(array)


def composite(rgba: UInt8[Tensor, "rows columns 4"]) -> Int[Tensor, "rows columns 3"]:
    """The picture over the checkerboard, in integers as in the module's first equation."""
    row, column = (torch.arange(n) // BOARD_SQUARE for n in rgba.shape[:2])
    board = torch.where((row[:, None] + column) % 2 == 0, BOARD_LIGHT, BOARD_DARK)[..., None]
    colour, alpha = rgba.int().split([3, 1], dim=2)
    return (colour * alpha + board * (255 - alpha) + 127) // 255


def cut_tiles(pixels: Float[Tensor, "rows columns 3"], side: int) -> Float[Tensor, "tiles {side} {side} 3"]:
    """Whole tiles in raster order; rows and columns are multiples of side."""
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    return pixels.view(rows, side, columns, side, 3).transpose(1, 2).reshape(-1, side, side, 3)


# --- Where each patch sits -----------------------------------------------------------------------------------------


def patchify(
    tiles: Float[Tensor, "images tiles side side 3"], merge: int
) -> Float[Tensor, "images tiles*{merge}*{merge} pixels"]:
    """Patches in block order, each flattened as (row, column, channel)."""
    patch = tiles.shape[2] // merge
    blocks = tiles.unflatten(3, (merge, patch)).unflatten(2, (merge, patch)).transpose(3, 4)
    return blocks.flatten(4).flatten(1, 3)


def patch_places(
    grid: Int[Tensor, "images 2"], n_tiles: int, merge: int
) -> tuple[Int[Tensor, "images patches 2"], Bool[Tensor, "images patches"]]:
    """(row, column) from 0 of every patch in block order, and whether that patch belongs to the picture.

    grid: rows and columns of each picture, in tiles; n_tiles: places for tiles, of which a picture takes the first
    rows * columns. A grid of (0, 0) is a place without a picture.
    """
    rows, columns = grid[:, :1], grid[:, 1:]
    tile = torch.arange(n_tiles, device=grid.device).repeat_interleave(merge**2)
    inside = torch.arange(merge**2, device=grid.device).repeat(n_tiles)
    width = columns.clamp(min=1)
    place = torch.stack([tile // width * merge + inside // merge, tile % width * merge + inside % merge], dim=-1)
    return place, tile < rows * columns


def position_weights(
    place: Int[Tensor, "images patches 2"], size: Int[Tensor, "images 2"], side: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "images patches {side}*{side}"]:
    """How much of each entry of the learned position grid a patch reads: A_row[row] x A_column[column], flattened.

    place: of `patch_places`; size: rows and columns of each picture, in patches; side: g of the module docstring.
    """
    line = torch.arange(side, device=place.device)
    # float64 as in rotary_angles: few numbers, and a float64 model needs them
    centre = ((place.double() + 0.5) * side / size[:, None] - 0.5).clamp(0, side - 1)
    row, column = (1 - (centre[..., None] - line).abs()).clamp(min=0).to(dtype).unbind(2)
    return torch.einsum("npi,npj->npij", row, column).flatten(2)


def rotary_angles(
    place: Int[Tensor, "images patches 2"], head_dim: int, theta: float
) -> Float[Tensor, "images patches+1 {head_dim}//2"]:
    """Angle of every channel pair, columns in the first half, rows in the second; class token first, at 0 (float64)."""
    frequency = theta ** -(torch.arange(head_dim // 4, device=place.device, dtype=torch.float64) / (head_dim // 4))
    column_row = F.pad(place.flip(-1) + 1, (0, 0, 1, 0))
    return (column_row[..., None] * frequency).flatten(2)


def rotate(
    x: Float[Tensor, "images H tokens d"], cos: Float[Tensor, "... tokens d//2"], sin: Float[Tensor, "... tokens d//2"]
) -> Float[Tensor, "images H tokens d"]:
    """Turn interleaved channel pairs, in float32 at least; rounded once."""
    even, odd = wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2).to(x.dtype)


# --- The encoder ---------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Full attention among the tokens of one picture."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(config.hidden_size, config.hidden_size) for _ in range(4)
        )

    def forward(
        self,
        x: Float[Tensor, "images tokens D"],
        cos: Float[Tensor, "... tokens half"],
        sin: Float[Tensor, "... tokens half"],
        mask: Bool[Tensor, "images 1 1 tokens"] | None = None,
    ) -> Float[Tensor, "images tokens D"]:
        """cos, sin: of `rotary_angles`, with a heads axis of 1. mask: True where a key may be seen; None: all."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, attn_mask=mask)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two matrices with an exact GELU between them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.hidden_size, config.intermediate_size)
        self.c_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return self.c_proj(F.gelu(self.c_fc(x)))


class LayerScale(nn.Module):
    """x + gamma * y, gamma learned per channel."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((config.hidden_size,), 0.5))

    def forward(self, x: Float[Tensor, "... D"], y: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return torch.addcmul(x, self.gamma, y)


class Block(nn.Module):
    """One layer; arguments as `Attention` takes them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = (nn.LayerNorm(config.hidden_size, config.layer_norm_eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.ls_1, self.ls_2 = LayerScale(config), LayerScale(config)

    def forward(
        self,
        x: Float[Tensor, "images tokens D"],
        cos: Float[Tensor, "... tokens half"],
        sin: Float[Tensor, "... tokens half"],
        mask: Bool[Tensor, "images 1 1 tokens"] | None = None,
    ) -> Float[Tensor, "images tokens D"]:
        x = self.ls_1(x, self.self_attn(self.ln_1(x), cos, sin, mask))
        return self.ls_2(x, self.mlp(self.ln_2(x)))


class Embeddings(nn.Module):
    """Class token and patches, each with its position."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.patch_embedding = nn.Linear(3 * config.patch_size**2, width, bias=False)
        self.position_embedding = nn.Parameter(0.02 * torch.randn(config.posemb_grid_size**2, width))
        self.class_embedding = nn.Parameter(0.02 * torch.randn(width))
        self.cls_position_embedding = nn.Parameter(0.02 * torch.randn(width))

    def forward(
        self, patches: Float[Tensor, "images patches pixels"], weights: Float[Tensor, "#images patches entries"]
    ) -> Float[Tensor, "images patches+1 D"]:
        """weights: of `position_weights`, in the table's own wide dtype."""
        x = self.patch_embedding(patches)
        x = x + (weights @ wide(self.position_embedding)).to(x.dtype)
        class_token = (self.class_embedding + self.cls_position_embedding).to(x.dtype)
        return torch.cat([class_token.expand(len(x), 1, -1), x], dim=1)


class Backbone(nn.Module):
    """The parts of the encoder that keep its own width; `VisionModel.encode` runs them."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.ln_pre = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))


class VisionModel(nn.Module):
    """The image encoder: tiles to features of the text model's width D_text, one per tile.

    Released tensors: `model.visual.*`, whose names the parameters bear.
    """

    def __init__(self, config: VisionConfig, text_hidden_size: int) -> None:
        super().__init__()
        self.config = config
        self.backbone = Backbone(config)
        tile_width = config.hidden_size * config.spatial_merge_size**2
        self.proj_in = nn.Linear(tile_width, config.projection_hidden_dim, bias=False)
        self.proj_out = nn.Linear(config.projection_hidden_dim, text_hidden_size, bias=False)

    def encode(
        self, tiles: Float[Tensor, "images tiles side side 3"], grid: Int[Tensor, "#images 2"], padded: bool = False
    ) -> Float[Tensor, "images tiles D_text"]:
        """Pictures that share one number of places for tiles; every shape follows from the arguments' shapes.

        grid: rows and columns in tiles, one for all or one each. padded: pictures may fill fewer places than there
        are (training batches of one shape): the rest is not attended to, and its features mean nothing. A grid of
        (0, 0) marks a place without a picture.
        """
        c, backbone = self.config, self.backbone
        dtype = wide(backbone.embeddings.position_embedding).dtype
        place, real = patch_places(grid, tiles.shape[1], c.spatial_merge_size)
        weights = position_weights(place, grid * c.spatial_merge_size, c.posemb_grid_size, dtype)
        angles = rotary_angles(place, c.hidden_size // c.num_attention_heads, c.rope_theta)[:, None]
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        mask = F.pad(real, (1, 0), value=True)[:, None, None] if padded else None

        patches = patchify(tiles.to(self.proj_in.weight.dtype), c.spatial_merge_size)
        x = backbone.ln_pre(backbone.embeddings(patches, weights))
        for block in backbone.layers:
            x = block(x, cos, sin, mask)
        x = x[:, 1:].unflatten(1, (-1, c.spatial_merge_size**2)).flatten(2)
        return self.proj_out(F.gelu(self.proj_in(x)))

    def forward(
        self, pixel_values: Float[Tensor, "tiles side side 3"], image_grid_thw: Int[Tensor, "images 3"]
    ) -> Float[Tensor, "tiles D_text"]:
        """Features of all tiles, in order; arguments as `process_images` returns them.

        Raises:
            InputError: if the tiles have another size than the config's, or the grids do not count them.
        """
        grids = self._grids(pixel_values, image_grid_thw)
        images = pixel_values.split([rows * columns for rows, columns in grids])
        features: dict[int, Tensor] = {}
        for grid in dict.fromkeys(grids):  # pictures of one grid go together, and no key mask is needed
            members = [i for i, other in enumerate(grids) if other == grid]
            tiles = torch.stack([images[i] for i in members])
            features |= zip(members, self.encode(tiles, torch.tensor([grid], device=tiles.device)), strict=True)
        return torch.cat([features[i] for i in range(len(grids))])

    def _grids(self, pixel_values: Tensor, image_grid_thw: Tensor) -> list[tuple[int, int]]:
        side = self.config.tile_size
        if tuple(pixel_values.shape[1:]) != (side, side, 3):
            raise InputError(f"pixel_values: shape {list(pixel_values.shape)}, expected [tiles, {side}, {side}, 3]")
        if not pixel_values.is_floating_point():  # levels 0..255 would pass as pixels, and far too bright ones
            raise InputError(f"pixel_values: {pixel_values.dtype}, expected floats as process_images returns them")
        if not isinstance(image_grid_thw, Tensor):
            raise InputError(f"image_grid_thw: {image_grid_thw!r:.60}, expected a tensor as process_images returns it")
        grids = image_grid_thw.tolist()
        whole = image_grid_thw.shape[1:] == (3,) and not image_grid_thw.is_floating_point() and len(grids) > 0
        if not whole or any(t != 1 or rows < 1 or columns < 1 for t, rows, columns in grids):
            raise InputError(
                f"image_grid_thw: {grids}, expected integers (1, rows, columns), in tiles, for every image"
            )
        n_tiles = sum(rows * columns for _, rows, columns in grids)
        if n_tiles != len(pixel_values):
            raise InputError(f"image_grid_thw: {n_tiles} tiles, but pixel_values holds {len(pixel_values)}")
        return [(rows, columns) for _, rows, columns in grids]
