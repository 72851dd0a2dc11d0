"""The chat wire format: messages to token ids, and the ids of a reply back to blocks.

A message on the wire is::

    role marker   [author name]   content marker   content   <|end_message|>

Every marker is one special token. Text that *spells* a marker is ordinary text, going in and coming out, so a
message is rendered to token ids, never to a string that would be tokenised again, and a reply is parsed from ids.
An assistant turn closes with ``<|content_model_end_sampling|>``; the next one is generated after a bare
``<|message_model|>``.

Text inside a block is bytes: a byte-level vocabulary may cut one UTF-8 character into several tokens. `StreamParser`
therefore decodes bytes incrementally and hands out only whole characters.

Source: the wire format published with the model's serving code; marker ids come from the folder's tokenizer.json.
"""

import codecs
import dataclasses
import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import tokenizers
import torch
from torch import Tensor

from .config import InklingConfig
from .errors import InputError
from .vision import load_image, process_images

MESSAGE_USER = "<|message_user|>"
MESSAGE_MODEL = "<|message_model|>"
MESSAGE_SYSTEM = "<|message_system|>"
MESSAGE_TOOL = "<|message_tool|>"
CONTENT_TEXT = "<|content_text|>"
CONTENT_IMAGE = "<|content_image|>"
CONTENT_THINKING = "<|content_thinking|>"
CONTENT_XML = "<|content_xml|>"
CONTENT_TOOL_JSON = "<|content_invoke_tool_json|>"
CONTENT_TOOL_TEXT = "<|content_invoke_tool_text|>"
CONTENT_TOOL_ERROR = "<|content_tool_error|>"
END_MESSAGE = "<|end_message|>"
END_SAMPLING = "<|content_model_end_sampling|>"
END_OF_TEXT = "<|endoftext|>"
IMAGE_PLACEHOLDER = "<|unused_200054|>"

ROLES = {
    "user": MESSAGE_USER,
    "assistant": MESSAGE_MODEL,
    "system": MESSAGE_SYSTEM,
    "developer": MESSAGE_SYSTEM,
    "tool": MESSAGE_TOOL,
}
EFFORTS = {"none": 0.0, "minimal": 0.1, "low": 0.2, "medium": 0.7, "high": 0.9, "xhigh": 0.99, "max": 0.99}

# part type -> (content marker, key that holds the payload, roles that may carry it; None = every role)
_PARTS = {
    "text": (CONTENT_TEXT, "text", None),
    "image": (CONTENT_IMAGE, "image", ("user", "system", "developer", "tool")),
    "image_url": (CONTENT_IMAGE, "image_url", ("user", "system", "developer", "tool")),
    "thinking": (CONTENT_THINKING, "thinking", ("assistant",)),
    "tool_call": (CONTENT_TOOL_JSON, "args", ("assistant",)),
    "tool_text": (CONTENT_TOOL_TEXT, "text", ("assistant",)),
    "tool_error": (CONTENT_TOOL_ERROR, "text", ("assistant", "tool")),
}
_ROLE_MARKERS = set(ROLES.values())
_CONTENT_MARKERS = {marker for marker, _, _ in _PARTS.values()} | {CONTENT_XML}
_SPELLINGS = {CONTENT_XML: "<|unused_200024|>"}  # some vocabularies leave the slot unnamed
_OPTIONAL = {CONTENT_TOOL_TEXT, CONTENT_TOOL_ERROR, END_OF_TEXT}
_MARKERS = _ROLE_MARKERS | _CONTENT_MARKERS | {END_MESSAGE, END_SAMPLING, END_OF_TEXT}


class Tokenizer:
    """A byte-level BPE vocabulary that keeps plain text and markers apart.

    Attributes:
        markers: marker -> token id, for the markers of the wire format that the vocabulary has.
        special_ids: ids of all added tokens; they carry no text, and `encode` never returns one.
        image_token_id: id of the image placeholder, or None if the vocabulary names none.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: str = "tokenizer") -> None:
        """Takes `tokenizer` over: its added tokens become special, its truncation and padding are switched off.

        Raises InputError if a marker is missing or if plain text could produce one.
        """
        self._tokenizer = tokenizer
        self.markers: dict[str, int] = {}
        for marker in sorted(_MARKERS):
            token = tokenizer.token_to_id(marker)
            if token is None and marker in _SPELLINGS:
                token = tokenizer.token_to_id(_SPELLINGS[marker])
            if token is not None:
                self.markers[marker] = token
            elif marker not in _OPTIONAL:
                raise InputError(f"{source}: the vocabulary lacks the marker {marker}")
        self.image_token_id: int | None = tokenizer.token_to_id(IMAGE_PLACEHOLDER)
        # The library finds added tokens inside plain text unless they are special and this flag is set.
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        named = [*self.markers.values(), *([] if self.image_token_id is None else [self.image_token_id])]
        tokenizer.add_special_tokens(sorted(added.union(tokenizer.id_to_token(i) for i in named)))
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        specials = {i: token.content for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.special_ids = frozenset(specials)
        for token, spelled in specials.items():
            if token in tokenizer.encode(spelled, add_special_tokens=False).ids:
                raise InputError(f"{source}: plain text that spells {spelled} would become the special token {token}")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "Tokenizer":
        """Read `folder`/tokenizer.json.

        Raises:
            InputError: if the file is missing or invalid, or its vocabulary lacks a marker.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise InputError(f"{path}: not found, expected a tokenizer.json beside the checkpoint")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise InputError(f"{path}: not a valid tokenizer.json ({' '.join(str(error).split())})") from None
        return cls(tokenizer, str(path))

    def encode(self, text: str) -> list[int]:
        """Ids of plain text. A marker spelled in it stays text; no special token is ever returned.

        Raises:
            InputError: if `text` is not a string, or holds half of a surrogate pair.
        """
        try:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:
            what = "text with a lone surrogate" if isinstance(text, str) else type(text).__name__
            raise InputError(f"encode: got {what}, expected a string of Unicode characters") from None

    def marker_id(self, marker: str) -> int:
        """Raises InputError if the vocabulary lacks this optional marker."""
        if marker not in self.markers:
            raise InputError(f"the vocabulary lacks the marker {marker}")
        return self.markers[marker]

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end a reply: `eos_token_id` of `generate`."""
        return [self.markers[marker] for marker in (END_SAMPLING, END_OF_TEXT) if marker in self.markers]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of text that a token stands for; none for special tokens and for ids without an entry."""
        if token not in self._bytes:
            if not 0 <= token < 2**32:
                raise InputError(f"token id {token}, expected 0 <= id < 2**32")
            entry = None if token in self.special_ids else self._tokenizer.id_to_token(token)
            try:
                self._bytes[token] = bytes(_BYTE_OF_LETTER[letter] for letter in entry or "")
            except KeyError:
                raise InputError(f"token {token} is {entry!r}, expected a byte-level entry") from None
        return self._bytes[token]

    def decode(self, ids: Iterable[Any], skip_special_tokens: bool = True) -> str:
        """The text of ids, with the special tokens dropped or, on request, spelled out.

        Bytes that are not UTF-8 become U+FFFD.
        """
        ids = [operator.index(i) for i in ids]
        if skip_special_tokens:
            return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
        # A special token ends the run of bytes before it: no character reaches across a marker.
        text, run = [], b""
        for i in ids:
            if i in self.special_ids:
                text += [run.decode("utf-8", errors="replace"), self._tokenizer.id_to_token(i)]
                run = b""
            else:
                run += self.token_bytes(i)
        return "".join(text) + run.decode("utf-8", errors="replace")


def _byte_letters() -> dict[str, int]:
    """Byte-level BPE writes a byte as one visible letter: itself if printable Latin-1, else 256, 257, ... in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


_BYTE_OF_LETTER = _byte_letters()


# Messages to ids


@dataclass
class Message:
    """One message; `render` takes these or dicts with the same keys.

    role: user, assistant, system, developer (rendered as system) or tool.
    content: a string, or a list of parts: strings, `Block`s of an earlier reply, or dicts with a type:
        {"type": "text", "text"}, {"type": "image", "image": whatever `load_image` opens, or a uint8 array},
        {"type": "image_url", "image_url": data URL, path, or {"url": ...}}; from the assistant also
        {"type": "thinking", "thinking"}, {"type": "tool_call", "name", "args"}, {"type": "tool_text", "text"};
        from the assistant or a tool {"type": "tool_error", "text"}.
    name: author; for a tool its name, which may instead be found by tool_call_id.
    reasoning_content, tool_calls: an assistant's thinking before, and calls after its content.
    """

    role: str
    content: Any = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[Any] | None = None
    tool_call_id: str | None = None


_MESSAGE_KEYS = {f.name for f in dataclasses.fields(Message)}


@dataclass
class Prompt:
    """A rendered conversation. The last two fields are as the model takes them, and None without images.

    input_ids: token ids; images: the opened pictures, in order;
    pixel_values [n_tiles, p, p, 3] float32; image_grid_thw [n_images, 3] int64, in tiles.
    """

    input_ids: list[int] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    pixel_values: Tensor | None = None
    image_grid_thw: Tensor | None = None


def render(
    messages: Any,
    tokenizer: Tokenizer,
    tools: Any = None,
    effort: Real | str | None = 0.9,
    config: InklingConfig | None = None,
    add_generation_prompt: bool = True,
) -> Prompt:
    """Messages as the model reads them.

    Order: tool declarations, leading system messages, the effort message, everything else. A list of parts becomes
    one message per part. Empty string content renders nothing, and an assistant turn without any block no end marker.

    Args:
        messages: a list of `Message`s, or of dicts with the same keys.
        tools: a list of {"name", "description", "parameters"}, or {"type": "function", "function": {the same}}.
        effort: 0 to 0.99, or a name of `EFFORTS`; None leaves the effort message out.
        config: the model's, for the tile size and the image placeholder; needed only for images whose
            placeholder the vocabulary does not name, or whose tiles are not the released 40 x 40.
        add_generation_prompt: end with the bare model marker that a reply continues.

    Raises:
        InputError: naming the message and part that cannot be rendered.
    """
    if not isinstance(messages, (list, tuple)):
        raise InputError(f"messages is {type(messages).__name__}, expected a list of messages")
    writer = _Writer(tokenizer, config)
    if tools:
        if not isinstance(tools, (list, tuple)):
            raise InputError(f"tools is {type(tools).__name__}, expected a list of tool declarations")
        declared = _canonical_json([_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)], "tools")
        writer.message("tools", "system", CONTENT_XML, declared, "tool_declare")
    effort_text = None if effort is None else f"Thinking effort level: {_format_effort(effort)}"
    tool_names: dict[str, str] = {}
    for i, message in enumerate(messages):
        message = _read_message(message, f"messages[{i}]")
        if effort_text and message.role not in ("system", "developer"):
            writer.message("effort", "system", CONTENT_TEXT, effort_text)
            effort_text = None
        parts = _read_parts(message, tool_names, f"messages[{i}]")
        for marker, payload, author, where in parts:
            writer.message(where, message.role, marker, payload, author)
        if message.role == "assistant" and parts:
            writer.ids.append(tokenizer.marker_id(END_SAMPLING))
    if effort_text:
        writer.message("effort", "system", CONTENT_TEXT, effort_text)
    if add_generation_prompt:
        writer.ids.append(tokenizer.marker_id(MESSAGE_MODEL))
    return writer.prompt()


class _Writer:
    """Collects ids and image tiles."""

    def __init__(self, tokenizer: Tokenizer, config: InklingConfig | None) -> None:
        self.tokenizer, self.config = tokenizer, config
        self.ids: list[int] = []
        self.images: list[Any] = []
        self.pixels: list[Tensor] = []
        self.grids: list[Tensor] = []

    def message(self, where: str, role: str, marker: str, payload: Any, author: str | None = None) -> None:
        """One message on the wire; `where` names it in errors."""
        encode, marker_id = self.tokenizer.encode, self.tokenizer.marker_id
        try:
            self.ids += [marker_id(ROLES[role]), *encode(author or ""), marker_id(marker)]
            self.ids += self.image(payload) if marker == CONTENT_IMAGE else encode(payload)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
        self.ids.append(marker_id(END_MESSAGE))

    def image(self, source: Any) -> list[int]:
        """One placeholder for every tile of the picture."""
        if self.config is not None and self.config.vision is None:
            raise InputError("an image, but this model has no image encoder")
        placeholder = self.tokenizer.image_token_id if self.config is None else self.config.image_token_id
        if placeholder is None:
            raise InputError(f"the vocabulary lacks {IMAGE_PLACEHOLDER}, expected a config with image_token_id")
        image = source if isinstance(source, (np.ndarray, Tensor)) else load_image(source)
        pixels, grid = process_images([image], None if self.config is None else self.config.vision)
        self.images.append(image)
        self.pixels.append(pixels)
        self.grids.append(grid)
        return [placeholder] * len(pixels)

    def prompt(self) -> Prompt:
        if not self.images:
            return Prompt(self.ids)
        return Prompt(self.ids, self.images, torch.cat(self.pixels), torch.cat(self.grids))


def _read_message(message: Any, where: str) -> Message:
    """A checked `Message` from whatever spelling the caller used; unknown keys and roles are refused by name."""
    if dataclasses.is_dataclass(message) and not isinstance(message, type):
        message = {f.name: getattr(message, f.name) for f in dataclasses.fields(message)}
    if not isinstance(message, Mapping):
        raise InputError(f"{where} is {type(message).__name__}, expected a message with role and content")
    unknown = [key for key, value in message.items() if key not in _MESSAGE_KEYS and value is not None]
    if unknown:
        raise InputError(f"{where}: unknown key {unknown[0]!r}, expected {', '.join(sorted(_MESSAGE_KEYS))}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InputError(f"{where}: role is {role!r}, expected one of {', '.join(ROLES)}")
    for key in ("name", "reasoning_content", "tool_call_id"):
        value = message.get(key)
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}: {key} is {type(value).__name__}, expected a string")
    if not isinstance(message.get("tool_calls") or [], (list, tuple)):
        raise InputError(f"{where}: tool_calls is {type(message['tool_calls']).__name__}, expected a list")
    for key in ("reasoning_content", "tool_calls"):
        if message.get(key) and role != "assistant":
            raise InputError(f"{where}: {key} in a message of role {role}, expected role assistant")
    return Message(**{key: value for key, value in message.items() if key in _MESSAGE_KEYS})


def _read_parts(message: Message, tool_names: dict[str, str], where: str) -> list[tuple[str, Any, str | None, str]]:
    """(content marker, payload, author name, place) for every message on the wire, in order.

    `tool_names` learns the ids of calls, so that a later result can be given the name of its tool.
    """
    author = message.name
    if message.role == "tool":
        author = author or tool_names.get(message.tool_call_id or "")
        if not author:
            raise InputError(f"{where}: a tool message without name, expected the tool's name")
    content = message.content
    if content is None or isinstance(content, str):
        # a tool's result is a message even when it is empty
        content = [content or ""] if content or message.role == "tool" else []
    elif not isinstance(content, (list, tuple)):
        raise InputError(f"{where}: content is {type(content).__name__}, expected a string or a list of parts")
    numbered = [(part, f"{where}.content[{i}]") for i, part in enumerate(content)]
    if message.reasoning_content:
        thinking = {"type": "thinking", "thinking": message.reasoning_content}
        numbered.insert(0, (thinking, f"{where}.reasoning_content"))

    parts = []
    for part, place in numbered:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        elif isinstance(part, Block):
            part = part.as_part()
        if not isinstance(part, Mapping):
            raise InputError(f"{place} is {type(part).__name__}, expected a string or a part with a type")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise InputError(f"{place}: part type is {kind!r}, expected one of {', '.join(_PARTS)}")
        marker, key, roles = _PARTS[kind]
        if roles is not None and message.role not in roles:
            raise InputError(f"{place}: a part of type {kind} from {message.role}, expected from {' or '.join(roles)}")
        if kind == "tool_call":
            name, payload = _tool_call(part, tool_names, place)
            parts.append((marker, payload, name, place))
            continue
        payload = part.get(key, part.get("text"))
        if kind == "image_url" and isinstance(payload, Mapping):
            payload = payload.get("url")
        if payload is None or (marker != CONTENT_IMAGE and not isinstance(payload, str)):
            expected = "an image" if marker == CONTENT_IMAGE else "a string"
            raise InputError(f"{place}: {key} of a part of type {kind} is {payload!r:.60}, expected {expected}")
        parts.append((marker, payload, author, place))
    for i, call in enumerate(message.tool_calls or ()):
        place = f"{where}.tool_calls[{i}]"
        name, payload = _tool_call(call, tool_names, place)
        parts.append((CONTENT_TOOL_JSON, payload, name, place))
    return parts


def _tool_call(call: Any, tool_names: dict[str, str], where: str) -> tuple[str, str]:
    """Name and wire payload of {"name", "args"} or {"id", "function": {"name", "arguments"}}."""
    function = _function(call, where)
    args = function.get("args", function.get("arguments"))
    if isinstance(args, str):
        try:
            args = json.loads(args) if args.strip() else {}
        except (ValueError, RecursionError):
            raise InputError(f"{where}: arguments of {function['name']!r} are not valid JSON") from None
    if args is None:
        args = {}
    if not isinstance(args, Mapping):
        raise InputError(f"{where}: arguments of {function['name']!r} are {type(args).__name__}, expected an object")
    if isinstance(call.get("id"), str):
        tool_names[call["id"]] = function["name"]
    name = json.dumps(function["name"], ensure_ascii=False)
    return function["name"], f'{{"name":{name},"args":{_canonical_json(args, where)}}}'


def _tool(tool: Any, where: str) -> dict[str, Any]:
    """The declared form of one tool."""
    function = _function(tool, where)
    description, parameters = function.get("description") or "", function.get("parameters") or {}
    if not isinstance(description, str):
        raise InputError(f"{where}: description is {type(description).__name__}, expected a string")
    if not isinstance(parameters, Mapping):
        raise InputError(f"{where}: parameters is {type(parameters).__name__}, expected a JSON schema object")
    kind = tool.get("type", "function")
    return {"description": description, "name": function["name"], "parameters": parameters, "type": kind}


def _function(value: Any, where: str) -> Mapping[str, Any]:
    """The mapping that holds a tool's name: the value itself, or its "function"."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where} is {type(value).__name__}, expected an object with a name")
    function = value.get("function", value)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise InputError(f"{where}: a tool without name, expected a name that is a non-empty string")
    return function


def _canonical_json(value: Any, where: str) -> str:
    """JSON with sorted keys and no spaces: one value, one string.

    Raises:
        InputError: if the value has no JSON form (other types, NaN, infinity, lone surrogates, endless nesting).
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON form ({error})") from None
    return text


def _format_effort(effort: Real | str) -> str:
    """At most two decimals, trailing zeros dropped, zero as 0.0."""
    if isinstance(effort, str):
        if effort not in EFFORTS:
            raise InputError(f"effort is {effort!r}, expected one of {', '.join(EFFORTS)} or a number from 0 to 0.99")
        effort = EFFORTS[effort]
    if isinstance(effort, bool) or not isinstance(effort, Real) or not 0 <= effort <= 0.99:
        raise InputError(f"effort is {effort!r}, expected a number from 0 to 0.99")
    text = f"{float(effort):.2f}".rstrip("0")
    return "0.0" if text in ("0.", "-0.") else text


# Ids to blocks


@dataclass
class Block:
    """One block of a reply.

    kind: "text" (also raw tool text and tool errors, which are shown as text), "thinking" or "tool_call".
    text: what it says; of a tool call its JSON as written. name: the author, of a tool call the tool.
    args: the arguments of a tool call. marker: the content marker it was written under.
    complete: False if the reply was cut, or the next message began, before the block's end marker.
    """

    kind: str
    text: str = ""
    name: str | None = None
    args: dict[str, Any] | None = None
    marker: str = CONTENT_TEXT
    complete: bool = False

    def as_part(self) -> dict[str, Any]:
        """The part that renders this block again."""
        if self.kind == "tool_call":
            return {"type": "tool_call", "name": self.name, "args": self.args}
        kinds = {CONTENT_THINKING: "thinking", CONTENT_TOOL_TEXT: "tool_text", CONTENT_TOOL_ERROR: "tool_error"}
        return {"type": kinds.get(self.marker, "text"), "text": self.text}


@dataclass
class Delta:
    """New text of one block. The deltas of an index, joined, are the text of `blocks[index]`.

    A tool call comes as one delta, when it is complete.
    """

    index: int
    kind: str
    text: str
    block: Block


def parse(ids: Iterable[Any], tokenizer: Tokenizer) -> list[Block]:
    """The blocks of one reply, in order; `ids` follow a bare model marker (one more in front does no harm).

    Cut inside a block, the text up to the cut is kept; cut inside a tool call, no call is made and nothing of it is
    kept. A finished tool call that is not {"name": string, "args": object} is kept as text. Never raises for what a
    model wrote.
    """
    parser = StreamParser(tokenizer)
    for token in ids:
        parser.feed(token)
    parser.finish()
    return parser.blocks


class StreamParser:
    """`parse`, one token at a time. `blocks` holds what has been read so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.blocks: list[Block] = []
        self.finished = False  # the reply has ended; later tokens are ignored
        self._tokenizer = tokenizer
        self._marker_of = {token: marker for marker, token in tokenizer.markers.items()}
        self._own = True  # False inside a message that another role is said to have written
        self._header = b""  # author name, until the content marker
        self._block: Block | None = None  # the open block
        self._payload = b""  # of an open tool call
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: SupportsIndex) -> list[Delta]:
        """Read one token; returns the text that has become certain: whole characters, whole tool calls."""
        if self.finished:
            return []
        token = operator.index(token)
        marker = self._marker_of.get(token)
        if marker is None:
            return self._text(self._tokenizer.token_bytes(token))
        deltas = self._close(complete=marker == END_MESSAGE)
        if marker in (END_SAMPLING, END_OF_TEXT):
            self.finished = True
        elif marker in _ROLE_MARKERS:
            self._own = marker == MESSAGE_MODEL
        elif marker in _CONTENT_MARKERS and self._own:
            self._open(marker)
        self._header = b""
        return deltas

    def finish(self) -> list[Delta]:
        """The end of the ids: flushes what is left of an open text once."""
        if self.finished:
            return []
        self.finished = True
        return self._close(complete=False)

    def _text(self, data: bytes) -> list[Delta]:
        if self._block is None:
            self._header += data
            return []
        if self._block.kind == "tool_call":
            self._payload += data
            return []
        return self._grow(self._block, self._decoder.decode(data))

    def _open(self, marker: str) -> None:
        kind = {CONTENT_THINKING: "thinking", CONTENT_TOOL_JSON: "tool_call"}.get(marker, "text")
        name = self._header.decode("utf-8", errors="replace") or None
        self._block = Block(kind, name=name, marker=marker)
        if kind == "tool_call":
            self._payload = b""
        else:
            self.blocks.append(self._block)

    def _close(self, complete: bool) -> list[Delta]:
        block, self._block = self._block, None
        if block is None:
            return []
        block.complete = complete
        if block.kind != "tool_call":
            return self._grow(block, self._decoder.decode(b"", final=True))
        if not complete:
            return []
        payload = self._payload.decode("utf-8", errors="replace")
        _read_call(block, payload)
        self.blocks.append(block)
        return self._grow(block, payload)

    def _grow(self, block: Block, text: str) -> list[Delta]:
        block.text += text
        return [Delta(len(self.blocks) - 1, block.kind, text, block)] if text else []


def _read_call(block: Block, payload: str) -> None:
    """Fills in name and arguments of a finished call; what is none becomes text."""
    try:
        call = json.loads(payload)
        name, args = call["name"], call.get("args", {})
        if isinstance(name, str) and name and isinstance(args, dict):
            # What could not be written again (NaN, half a surrogate pair) is no call.
            _canonical_json([name, args], "call")
            block.name, block.args = name, args
            return
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    block.kind = "text"
