"""Messages to ids and replies to blocks: the wire format letter for letter, spelled markers, cuts, streaming."""

import dataclasses
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tiny_tokenizer import MARKERS, raw_tokenizer, tiny_tokenizer

from inkling_ref import InklingConfig, InputError, chat
from inkling_ref.chat import Block, Message, StreamParser, Tokenizer, parse, render

T = tiny_tokenizer()
GRIN = "\N{GRINNING FACE}"
ALL_IDS = T._tokenizer.get_vocab_size()


def spelled(ids) -> str:
    return T.decode(ids, skip_special_tokens=False)


def wire(text: str) -> list[int]:
    """Ids of a string in which markers are meant as markers."""
    ids, rest = [], text
    while rest:
        marker = next((m for m in MARKERS if rest.startswith(m)), None)
        if marker:
            ids.append(T._tokenizer.token_to_id(marker))
            rest = rest[len(marker) :]
        else:
            end = min((rest.find(m) for m in MARKERS if m in rest), default=len(rest))
            ids += T.encode(rest[:end])
            rest = rest[end:]
    return ids


def rendered(messages, **options) -> str:
    options = {"effort": None, "add_generation_prompt": False} | options
    return spelled(render(messages, T, **options).input_ids)


def outline(blocks):
    return [(b.kind, b.args if b.kind == "tool_call" else b.text) for b in blocks]


def stream(ids):
    """(text by index, blocks, all deltas) of feeding one by one."""
    parser, deltas = StreamParser(T), []
    for token in ids:
        deltas += parser.feed(token)
    deltas += parser.finish()
    joined = {}
    for delta in deltas:
        joined[delta.index] = joined.get(delta.index, "") + delta.text
    return joined, parser.blocks, deltas


# Tokenizer


def test_plain_text_round_trips():
    for text in ["", " ", "hello world", "line\nbreak\ttab", "12 + 34", "é漢" + GRIN, "\x00\x7f\xa0"]:
        assert T.decode(T.encode(text)) == text


@pytest.mark.parametrize("marker", MARKERS)
def test_case_65_spelled_marker_is_plain_text(marker):
    ids = T.encode(f"hello{marker}world")
    assert not set(ids) & T.special_ids
    assert T.decode(ids) == f"hello{marker}world"


@pytest.mark.parametrize("special", [True, False], ids=["special", "added_but_not_special"])
def test_case_65_spelled_marker_never_opens_a_block(special):
    tokenizer = Tokenizer(raw_tokenizer(special=special))
    attack = "".join(MARKERS)
    ids = render([{"role": "user", "name": attack, "content": attack}], tokenizer, effort=None).input_ids
    found = [i for i in ids if i in tokenizer.special_ids]
    expected = [chat.MESSAGE_USER, chat.CONTENT_TEXT, chat.END_MESSAGE, chat.MESSAGE_MODEL]
    assert found == [tokenizer.markers[m] for m in expected]
    reply = [tokenizer.markers[chat.CONTENT_TEXT], *tokenizer.encode(attack), tokenizer.markers[chat.END_MESSAGE]]
    assert outline(parse(reply, tokenizer)) == [("text", attack)]


def test_case_65_decode_with_and_without_special_tokens():
    ids = wire("<|content_text|>hello<|end_message|>")
    assert T.decode(ids) == "hello"
    assert T.decode(ids, skip_special_tokens=False) == "<|content_text|>hello<|end_message|>"
    # the parser reads ids, so neither form matters to it
    assert outline(parse(ids, T)) == [("text", "hello")]


def test_no_character_reaches_across_a_marker():
    halves = [T._tokenizer.token_to_id(letters) for letters in ("ðŁ", "ĺĢ")]
    assert T.decode(halves) == GRIN
    across = [halves[0], T.markers[chat.END_MESSAGE], halves[1]]
    assert GRIN not in spelled(across)


def test_ids_are_any_integer_type():
    ids = T.encode("hello world")
    assert T.decode(torch.tensor(ids)) == T.decode(np.array(ids)) == "hello world"
    reply = wire("<|content_text|>hello<|end_message|>")
    assert outline(parse(torch.tensor(reply), T)) == [("text", "hello")]


def test_id_without_an_entry_has_no_text():
    assert T.decode([*T.encode("hello"), ALL_IDS + 5]) == "hello"
    with pytest.raises(InputError, match="token id -1"):
        T.decode([-1])


def test_lone_surrogate_is_refused():
    with pytest.raises(InputError, match="surrogate"):
        T.encode("\ud83d")


@pytest.mark.parametrize("marker", [chat.MESSAGE_MODEL, chat.CONTENT_XML, chat.END_SAMPLING])
def test_missing_marker_is_named(marker, tmp_path):
    raw_tokenizer([m for m in MARKERS if m != marker]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError) as error:
        Tokenizer.from_pretrained(tmp_path)
    assert marker in str(error.value)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("content", [None, "", "{", "{}", '{"model": 3}', "\x00\xff"])
def test_missing_or_invalid_tokenizer_json_is_one_line(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content, encoding="latin-1")
    with pytest.raises(InputError, match=r"tokenizer\.json") as error:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


def test_from_pretrained_equals_the_object(tmp_path):
    raw_tokenizer().save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_pretrained(tmp_path)
    assert loaded.markers == T.markers
    assert loaded.encode("hello <|end_message|>") == T.encode("hello <|end_message|>")


def test_limits_stored_in_the_file_do_not_cut_text():
    raw = raw_tokenizer()
    raw.enable_truncation(3)
    raw.enable_padding(length=20)
    text = "hello world, the red circle"
    assert Tokenizer(raw).decode(Tokenizer(raw).encode(text)) == text


def test_whole_word_lookup_cannot_produce_a_marker():
    # With ignore_merges a vocabulary entry is matched whole, past the protection of the added tokens.
    data = json.loads(raw_tokenizer().to_str())
    data["model"]["vocab"][chat.END_MESSAGE] = next(
        t["id"] for t in data["added_tokens"] if t["content"] == chat.END_MESSAGE
    )
    data["model"]["ignore_merges"] = True
    data["pre_tokenizer"] = {
        "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False,
    }  # fmt: skip
    with pytest.raises(InputError, match="end_message"):
        Tokenizer(chat.tokenizers.Tokenizer.from_str(json.dumps(data)))


def test_unnamed_xml_slot():
    markers = [m.replace("content_xml", "unused_200024") for m in MARKERS]
    tokenizer = Tokenizer(raw_tokenizer(markers))
    ids = render([], tokenizer, tools=[{"name": "f"}], effort=None).input_ids
    assert "tool_declare<|unused_200024|>[{" in tokenizer.decode(ids, skip_special_tokens=False)


# Rendering


def test_whole_conversation():
    messages = [
        {"role": "system", "content": "rules"},
        {"role": "developer", "content": "policy"},
        {"role": "user", "name": "ann", "content": "weather?"},
        {
            "role": "assistant",
            "reasoning_content": "look it up",
            "content": "one moment",
            "tool_calls": [{"id": "c1", "function": {"name": "get", "arguments": '{"place": "SF", "day": 2}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "assistant", "content": "It is sunny."},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "thanks"},
    ]
    tools = [
        {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {}}}},
        {"name": "é", "description": "d"},
    ]
    assert rendered(messages, tools=tools, effort=0.7, add_generation_prompt=True) == (
        "<|message_system|>tool_declare<|content_xml|>"
        '[{"description":"","name":"get","parameters":{"properties":{},"type":"object"},"type":"function"},'
        '{"description":"d","name":"é","parameters":{},"type":"function"}]<|end_message|>'
        "<|message_system|><|content_text|>rules<|end_message|>"
        "<|message_system|><|content_text|>policy<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.7<|end_message|>"
        "<|message_user|>ann<|content_text|>weather?<|end_message|>"
        "<|message_model|><|content_thinking|>look it up<|end_message|>"
        "<|message_model|><|content_text|>one moment<|end_message|>"
        '<|message_model|>get<|content_invoke_tool_json|>{"name":"get","args":{"day":2,"place":"SF"}}<|end_message|>'
        "<|content_model_end_sampling|>"
        "<|message_tool|>get<|content_text|>sunny<|end_message|>"
        "<|message_model|><|content_text|>It is sunny.<|end_message|><|content_model_end_sampling|>"
        "<|message_system|><|content_text|>late<|end_message|>"
        "<|message_user|><|content_text|>thanks<|end_message|>"
        "<|message_model|>"
    )


def test_default_prompt():
    ids = render([Message("user", "hello")], T).input_ids
    assert spelled(ids) == (
        "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
        "<|message_user|><|content_text|>hello<|end_message|><|message_model|>"
    )


def test_author_and_text_are_tokenised_apart_from_the_markers():
    ids = render([{"role": "user", "content": "hello"}], T, effort=None, add_generation_prompt=False).input_ids
    assert ids == [T.markers[chat.MESSAGE_USER], T.markers[chat.CONTENT_TEXT], *T.encode("hello"),
                   T.markers[chat.END_MESSAGE]]  # fmt: skip


@pytest.mark.parametrize("kind", [dict, Message, dataclasses.make_dataclass("Mine", ["role", "content"])])
def test_messages_are_dicts_or_dataclasses(kind):
    assert rendered([kind(role="user", content="hello")]) == ("<|message_user|><|content_text|>hello<|end_message|>")


@pytest.mark.parametrize(
    ("effort", "text"),
    [
        (0.9, "0.9"), (0.99, "0.99"), (0.7, "0.7"), (0.25, "0.25"), (0.5, "0.5"), (0.123, "0.12"), (0.1, "0.1"),
        (0, "0.0"), (0.0, "0.0"), (-0.0, "0.0"), (0.004, "0.0"),
        ("none", "0.0"), ("minimal", "0.1"), ("low", "0.2"), ("medium", "0.7"), ("high", "0.9"),
        ("xhigh", "0.99"), ("max", "0.99"),
    ],
)  # fmt: skip
def test_effort_is_spelled_in_one_way(effort, text):
    assert rendered([], effort=effort) == (
        f"<|message_system|><|content_text|>Thinking effort level: {text}<|end_message|>"
    )


@pytest.mark.parametrize("effort", [1, 0.991, -0.1, float("nan"), float("inf"), True, "huge", "0.9", ""])
def test_wrong_effort_is_named(effort):
    with pytest.raises(InputError, match=f"effort is {effort!r}"):
        render([], T, effort=effort)


def test_effort_comes_last_if_there_are_only_system_messages():
    text = rendered([{"role": "system", "content": "rules"}], effort=0.2, tools=[{"name": "f"}])
    assert text.index("tool_declare") < text.index("rules") < text.index("Thinking effort level: 0.2")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "user", "content": ""}, ""),
        ({"role": "user", "content": None}, ""),
        ({"role": "user", "content": []}, ""),
        ({"role": "assistant", "content": ""}, ""),
        ({"role": "user", "content": [""]}, "<|message_user|><|content_text|><|end_message|>"),
        ({"role": "tool", "name": "f", "content": ""}, "<|message_tool|>f<|content_text|><|end_message|>"),
    ],
)
def test_empty_content(message, text):
    assert rendered([message]) == text


def test_parts_become_messages_in_order():
    parts = ["a", {"type": "text", "text": "b"}, {"type": "tool_error", "text": "c"}]
    assert rendered([{"role": "tool", "name": "f", "content": parts}]) == (
        "<|message_tool|>f<|content_text|>a<|end_message|>"
        "<|message_tool|>f<|content_text|>b<|end_message|>"
        "<|message_tool|>f<|content_tool_error|>c<|end_message|>"
    )
    parts = [
        {"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"},
        {"type": "tool_call", "name": "f", "args": {}}, {"type": "tool_text", "text": "c"},
    ]  # fmt: skip
    assert rendered([{"role": "assistant", "content": parts}]) == (
        "<|message_model|><|content_text|>a<|end_message|>"
        "<|message_model|><|content_thinking|>b<|end_message|>"
        '<|message_model|>f<|content_invoke_tool_json|>{"name":"f","args":{}}<|end_message|>'
        "<|message_model|><|content_invoke_tool_text|>c<|end_message|>"
        "<|content_model_end_sampling|>"
    )


@pytest.mark.parametrize("arguments", ["", " ", None, {}, "{}"])
def test_empty_arguments(arguments):
    text = rendered([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}])
    assert '<|content_invoke_tool_json|>{"name":"f","args":{}}<|end_message|>' in text


def test_canonical_json_sorts_at_every_depth_and_keeps_unicode():
    args = {"z": [{"b": 1, "a": "é" + GRIN}], "a": {"y": None, "x": True}}
    text = rendered([{"role": "assistant", "content": [{"type": "tool_call", "name": 'é"', "args": args}]}])
    assert f'{{"name":"é\\"","args":{{"a":{{"x":true,"y":null}},"z":[{{"a":"é{GRIN}","b":1}}]}}}}' in text


def picture(columns, rows):
    return Image.fromarray(np.arange(rows * columns * 3, dtype=np.uint8).reshape(rows, columns, 3))


def test_images_get_one_placeholder_a_tile(tmp_path):
    picture(81, 40).save(tmp_path / "wide.png")
    messages = [
        {"role": "user", "content": ["see", {"type": "image", "image": picture(40, 79)}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": str(tmp_path / "wide.png")}}]},
        {"role": "user", "content": [{"type": "image", "image": np.zeros((5, 7, 3), np.uint8)}, "and?"]},
    ]
    prompt = render(messages, T, effort=None)
    tile = "<|unused_200054|>"
    assert spelled(prompt.input_ids) == (
        "<|message_user|><|content_text|>see<|end_message|>"
        f"<|message_user|><|content_image|>{tile * 2}<|end_message|>"
        f"<|message_user|><|content_image|>{tile * 3}<|end_message|>"
        f"<|message_user|><|content_image|>{tile}<|end_message|>"
        "<|message_user|><|content_text|>and?<|end_message|><|message_model|>"
    )
    assert prompt.image_grid_thw.tolist() == [[1, 2, 1], [1, 1, 3], [1, 1, 1]]
    assert prompt.pixel_values.shape == (6, 40, 40, 3)
    assert len(prompt.images) == 3
    assert prompt.input_ids.count(T.image_token_id) == len(prompt.pixel_values)


def test_tile_size_and_placeholder_come_from_the_config():
    config = InklingConfig.tiny()  # tiles of 8 pixels
    prompt = render([{"role": "user", "content": [{"type": "image", "image": picture(17, 8)}]}], T, config=config)
    assert prompt.input_ids.count(config.image_token_id) == len(prompt.pixel_values) == 3
    assert prompt.pixel_values.shape == (3, 8, 8, 3)


def test_placeholder_unknown_to_the_vocabulary():
    tokenizer = Tokenizer(raw_tokenizer([m for m in MARKERS if m != chat.IMAGE_PLACEHOLDER]))
    messages = [{"role": "user", "content": [{"type": "image", "image": picture(8, 8)}]}]
    with pytest.raises(InputError, match=r"messages\[0\]\.content\[0\].*unused_200054"):
        render(messages, tokenizer)
    config = InklingConfig.tiny()
    assert render(messages, tokenizer, config=config).input_ids.count(config.image_token_id) == 1


def test_no_images_no_tensors():
    prompt = render([{"role": "user", "content": "hello"}], T)
    assert prompt.images == []
    assert prompt.pixel_values is None
    assert prompt.image_grid_thw is None


def test_case_47_a_one_pixel_image_still_has_a_token():
    prompt = render([{"role": "user", "content": [{"type": "image", "image": picture(1, 1)}]}], T)
    assert prompt.input_ids.count(T.image_token_id) == 1
    empty = np.zeros((0, 5, 3), np.uint8)
    with pytest.raises(InputError, match=r"content\[0\].*5x0"):
        render([{"role": "user", "content": [{"type": "image", "image": empty}]}], T)


USER, MODEL = {"role": "user"}, {"role": "assistant"}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ("hello", "messages is str"),
        ({"role": "user", "content": "x"}, "messages is dict"),
        (["hello"], r"messages\[0\] is str"),
        ([{"content": "x"}], "role is None"),
        ([{"role": "User", "content": "x"}], "role is 'User'.*developer"),
        ([{"role": ["user"], "content": "x"}], "role is"),
        ([USER | {"contents": "x"}], "unknown key 'contents'"),
        ([USER | {"content": 3}], "content is int"),
        ([USER | {"content": b"x"}], "content is bytes"),
        ([USER | {"content": {"type": "text"}}], "content is dict"),
        ([USER | {"content": [3]}], r"content\[0\] is int"),
        ([USER | {"content": [{"text": "x"}]}], "part type is None"),
        ([USER | {"content": ["a", {"type": "audio"}]}], r"content\[1\].*'audio'.*image"),
        ([USER | {"content": [{"type": ["text"]}]}], "part type is"),
        ([USER | {"content": [{"type": "text"}]}], "text.*is None"),
        ([USER | {"content": [{"type": "text", "text": 3}]}], "is 3, expected a string"),
        ([USER | {"content": [{"type": "image"}]}], "expected an image"),
        ([USER | {"content": [{"type": "image", "image": "/none.png"}]}], r"content\[0\].*none\.png"),
        ([USER | {"content": [{"type": "thinking", "thinking": "x"}]}], "thinking from user.*assistant"),
        ([MODEL | {"content": [{"type": "image", "image": "x.png"}]}], "image from assistant"),
        ([USER | {"content": [Block("tool_call", name="f", args={})]}], "tool_call from user"),
        ([USER | {"tool_calls": [{"name": "f"}]}], "tool_calls in a message of role user"),
        ([USER | {"reasoning_content": "x"}], "reasoning_content in a message of role user"),
        ([MODEL | {"reasoning_content": 3}], "reasoning_content is int"),
        ([MODEL | {"tool_calls": {"name": "f"}}], "tool_calls is dict"),
        ([MODEL | {"tool_calls": ["f"]}], r"tool_calls\[0\] is str"),
        ([MODEL | {"tool_calls": [{"args": {}}]}], "tool without name"),
        ([MODEL | {"tool_calls": [{"function": {"name": ""}}]}], "tool without name"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": [1]}]}], "'f' are list"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": "[1]"}]}], "'f' are list"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": "{"}]}], "'f' are not valid JSON"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": {"x": float("nan")}}]}], "no JSON form"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": {"x": {1, 2}}}]}], "no JSON form"),
        ([MODEL | {"tool_calls": [{"name": "f", "args": {"x": "\ud800"}}]}], "no JSON form"),
        ([USER | {"content": "x", "name": 3}], "name is int"),
        ([USER | {"content": ["x", "\ud83d"]}], r"messages\[0\]\.content\[1\].*surrogate"),
        ([{"role": "tool", "content": "x"}], r"messages\[0\].*without name"),
        ([{"role": "tool", "tool_call_id": "c9", "content": "x"}], "without name"),
        ([USER | {"content": "x"}, {"role": "nobody"}], r"messages\[1\]"),
    ],
)
def test_unusable_messages_are_named(messages, named):
    with pytest.raises(InputError, match=named) as error:
        render(messages, T)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        ({"name": "f"}, "tools is dict"),
        (["f"], r"tools\[0\] is str"),
        ([{"name": "f"}, {"description": "x"}], r"tools\[1\]: a tool without name"),
        ([{"type": "function", "function": {}}], "without name"),
        ([{"name": "f", "description": 3}], "description is int"),
        ([{"name": "f", "parameters": [1]}], "parameters is list"),
        ([{"name": "f", "parameters": {"x": float("inf")}}], "no JSON form"),
        ([{"name": "f", "parameters": {1: 1, "a": 2}}], "no JSON form"),
    ],
)
def test_unusable_tools_are_named(tools, named):
    with pytest.raises(InputError, match=named):
        render([], T, tools=tools)


def test_image_for_a_text_only_model():
    config = dataclasses.replace(InklingConfig.tiny(), vision=None)
    with pytest.raises(InputError, match="no image encoder"):
        render([{"role": "user", "content": [{"type": "image", "image": picture(8, 8)}]}], T, config=config)


# Parsing

CALL = '{"name":"get","args":{"place":"SF"}}'


def test_blocks_in_any_order_and_repeated():
    ids = wire(
        "<|content_thinking|>one<|end_message|>"
        f"<|message_model|>get<|content_invoke_tool_json|>{CALL}<|end_message|>"
        "<|message_model|><|content_text|>two<|end_message|>"
        "<|message_model|><|content_thinking|>three<|end_message|>"
        "<|message_model|><|content_text|>four<|end_message|><|content_model_end_sampling|>"
    )
    blocks = parse(ids, T)
    assert outline(blocks) == [
        ("thinking", "one"), ("tool_call", {"place": "SF"}), ("text", "two"), ("thinking", "three"), ("text", "four"),
    ]  # fmt: skip
    assert all(b.complete for b in blocks)
    assert blocks[1].name == "get"
    assert blocks[1].text == CALL
    assert outline(parse([T.markers[chat.MESSAGE_MODEL], *ids], T)) == outline(blocks)


BEFORE = "<|content_text|>before<|end_message|><|message_model|>"
AFTER = "<|message_model|><|content_text|>after<|end_message|><|content_model_end_sampling|>"


def test_case_64_text_around_a_call_is_kept():
    ids = wire(f"{BEFORE}get<|content_invoke_tool_json|>{CALL}<|end_message|>{AFTER}")
    assert outline(parse(ids, T)) == [("text", "before"), ("tool_call", {"place": "SF"}), ("text", "after")]


@pytest.mark.parametrize("closing", ["", "<|content_model_end_sampling|>", AFTER], ids=["cut", "sampling", "next"])
def test_case_64_a_call_cut_anywhere_is_no_call(closing):
    call = wire(f"get<|content_invoke_tool_json|>{CALL}")
    start, rest = wire(BEFORE), wire(closing)
    expected = [("text", "before")] + ([("text", "after")] if closing == AFTER else [])
    for cut in range(len(call) + 1):
        ids = start + call[:cut] + rest
        assert outline(parse(ids, T)) == expected
        assert stream(ids)[0] == dict(enumerate(text for _, text in expected))


@pytest.mark.parametrize(
    "payload",
    [
        "", "{", "[]", "3", "null", '"get"', "not json", '{"name":"get"', '{"name":"get","args":[1]}',
        '{"name":"get","args":"x"}', '{"name":"get","args":null}', '{"name":3,"args":{}}', '{"name":"","args":{}}',
        '{"args":{}}', '{"name":"get","args":{}} and more', '{"name":"get","args":{"x":NaN}}',
        '{"name":"\\ud800","args":{}}', '{"name":"get","args":{"x":"\\ud800"}}',
        '{"name":"get","args":{"x":' + "[" * 20000 + "]" * 20000 + "}}",
        '{"name":"get","args":{"x":' + "9" * 5000 + "}}",
    ],
)  # fmt: skip
def test_case_64_a_finished_payload_that_is_no_call_is_text(payload):
    ids = wire(f"{BEFORE}get<|content_invoke_tool_json|>") + T.encode(payload) + wire(f"<|end_message|>{AFTER}")
    assert outline(parse(ids, T)) == [("text", "before"), ("text", payload), ("text", "after")]
    joined, blocks, _ = stream(ids)
    assert [joined.get(i, "") for i in range(3)] == [b.text for b in blocks]


def test_case_64_a_cut_call_leaves_nothing_in_the_next():
    ids = wire(
        f"get<|content_invoke_tool_json|>{CALL[:9]}<|message_model|><|content_invoke_tool_json|>{CALL}<|end_message|>"
    )
    assert outline(parse(ids, T)) == [("tool_call", {"place": "SF"})]


def test_author_names_belong_to_one_block():
    ids = wire(
        "<|message_model|>ann<|content_text|>a<|end_message|><|message_model|>bob<|end_message|>"
        "<|content_text|>b<|end_message|>"
    )
    assert [(b.name, b.text) for b in parse(ids, T)] == [("ann", "a"), (None, "b")]


def test_case_64_end_marker_inside_a_json_string():
    args = {"text": "a<|end_message|>b<|content_model_end_sampling|>"}
    payload = json.dumps({"name": "say", "args": args})
    ids = wire("say<|content_invoke_tool_json|>") + T.encode(payload) + wire(f"<|end_message|>{AFTER}")
    assert outline(parse(ids, T)) == [("tool_call", args), ("text", "after")]


def test_missing_arguments_are_none_given():
    ids = wire('<|content_invoke_tool_json|>{"name":"now"}<|end_message|>')
    assert outline(parse(ids, T)) == [("tool_call", {})]


@pytest.mark.parametrize("marker", ["content_text", "content_thinking"])
def test_a_cut_block_keeps_its_text(marker):
    (block,) = parse(wire(f"<|{marker}|>hello wor"), T)
    assert block.text == "hello wor"
    assert not block.complete
    (block,) = parse(wire(f"<|{marker}|>hello wor<|content_model_end_sampling|>"), T)
    assert block.text == "hello wor"


@pytest.mark.parametrize("marker", ["content_invoke_tool_text", "content_tool_error"])
def test_tool_text_and_errors_show_as_text(marker):
    (block,) = parse(wire(f"<|{marker}|>hello<|end_message|>"), T)
    assert (block.kind, block.text, block.marker) == ("text", "hello", f"<|{marker}|>")


def test_nothing_after_the_end_of_the_turn_counts():
    for end in ("<|content_model_end_sampling|>", "<|endoftext|>"):
        assert outline(parse(wire(f"<|content_text|>a<|end_message|>{end}<|content_text|>b"), T)) == [("text", "a")]


def test_messages_in_another_name_are_not_the_replys():
    ids = wire(
        "<|content_text|>a<|end_message|><|message_user|><|content_text|>b<|end_message|>"
        f"<|message_tool|>get<|content_invoke_tool_json|>{CALL}<|end_message|>"
        "<|message_model|><|content_text|>c<|end_message|>"
    )
    assert outline(parse(ids, T)) == [("text", "a"), ("text", "c")]


def test_parsed_reply_renders_to_the_same_ids():
    ids = wire(
        "<|message_model|><|content_thinking|>one<|end_message|>"
        f"<|message_model|>get<|content_invoke_tool_json|>{CALL}<|end_message|>"
        "<|message_model|><|content_tool_error|>two<|end_message|>"
        "<|message_model|><|content_invoke_tool_text|>three<|end_message|>"
        "<|message_model|><|content_text|>four<|end_message|><|content_model_end_sampling|>"
    )
    history = [{"role": "assistant", "content": parse(ids, T)}]
    assert render(history, T, effort=None, add_generation_prompt=False).input_ids == ids


# Streaming


def letters(*tokens: str) -> list[int]:
    return [T._tokenizer.token_to_id(t) for t in tokens]


GRIN_SPLITS = {"2": ("ðŁ", "ĺĢ"), "4": ("ð", "Ł", "ĺ", "Ģ"), "3": ("ðŁ", "ĺ", "Ģ")}


@pytest.mark.parametrize("split", GRIN_SPLITS.values(), ids=GRIN_SPLITS)
@pytest.mark.parametrize("marker", ["content_text", "content_thinking"])
def test_case_66_an_emoji_comes_whole(split, marker):
    ids = wire(f"<|{marker}|>hello ") + letters(*split) + wire(" world<|end_message|>")
    joined, _, deltas = stream(ids)
    assert joined == {0: f"hello {GRIN} world"}
    assert GRIN in [d.text for d in deltas]
    assert all("\ufffd" not in d.text for d in deltas)


@pytest.mark.parametrize("closing", ["", "<|end_message|>", "<|content_model_end_sampling|>", "<|content_text|>x"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_case_66_a_reply_that_ends_inside_a_character(n, closing):
    ids = wire("<|content_text|>hello") + letters(*GRIN_SPLITS["4"][:n]) + wire(closing)
    joined, blocks, deltas = stream(ids)
    assert joined[0] == blocks[0].text == "hello\ufffd"
    assert [d.text for d in deltas].count("\ufffd") == 1  # the tail, flushed once


def test_case_66_a_space_in_the_middle_of_a_character():
    # Not UTF-8: the half before the space and the half after it are both broken.
    ids = wire("<|content_text|>") + letters("ðŁ", "Ġ", "ĺĢ") + wire("<|end_message|>")
    joined, _, deltas = stream(ids)
    assert joined[0] == T._tokenizer.decode(ids) == b"\xf0\x9f \x98\x80".decode("utf-8", "replace")
    assert deltas[0].text == "\ufffd "  # certain as soon as the space is read


def test_case_66_an_invalid_byte():
    ids = wire("<|content_text|>a") + letters("ÿ", "b") + wire("<|end_message|>")
    assert stream(ids)[0] == {0: "a\ufffdb"}


def test_a_call_streams_as_one_delta_when_complete():
    ids = wire(f"{BEFORE}get<|content_invoke_tool_json|>{CALL}<|end_message|>")
    parser, seen = StreamParser(T), []
    for token in ids:
        seen.append([(d.index, d.kind, d.text) for d in parser.feed(token)])
    assert seen[-1] == [(1, "tool_call", CALL)]
    assert all(kind == "text" for step in seen[:-1] for _, kind, _ in step)
    assert parser.finish() == []


def by_hand(ids):
    """An independent reading of a reply: cut at markers first, decode whole pieces after."""
    blocks, own = [], True
    for end in (chat.END_SAMPLING, chat.END_OF_TEXT):
        if T.markers[end] in ids:
            ids = ids[: ids.index(T.markers[end]) + 1]
    name_of = {i: m for m, i in T.markers.items()}
    cuts = [n for n, i in enumerate(ids) if i in name_of] + [len(ids)]
    for cut, after in pairwise(cuts):
        marker, raw = name_of[ids[cut]], T._tokenizer.decode(ids[cut + 1 : after])
        closed = after < len(ids) and name_of[ids[after]] == chat.END_MESSAGE
        if marker.startswith("<|message"):
            own = marker == chat.MESSAGE_MODEL
        elif marker.startswith("<|content") and marker != chat.END_SAMPLING and own:
            kind = {chat.CONTENT_THINKING: "thinking", chat.CONTENT_TOOL_JSON: "call"}.get(marker, "text")
            if kind != "call" or closed:
                blocks.append((kind, raw))
    return blocks


BYTES = st.sampled_from(letters(*(chr(c) for c in range(0x21, 0x7F)), *"ðŁĺĢÿÃ©â", "ðŁ", "ĺĢ", "ðŁĺĢ", "hello"))
SPECIAL = st.sampled_from(sorted(T.special_ids))
UNKNOWN = st.just(ALL_IDS + 3)


@settings(max_examples=400, deadline=None)
@given(st.lists(BYTES | SPECIAL | UNKNOWN | st.integers(0, ALL_IDS - 1), max_size=40))
def test_any_ids_stream_as_they_parse(ids):
    joined, blocks, deltas = stream(ids)
    assert [joined.get(i, "") for i in range(len(blocks))] == [b.text for b in blocks]
    assert outline(blocks) == outline(parse(ids, T))
    # random ids hold no valid call, so that every finished payload reads as text
    expected = [(kind.replace("call", "text"), text) for kind, text in by_hand(ids)]
    assert [(b.kind, b.text) for b in blocks] == expected
    assert [d.text for d in deltas if not d.text] == []


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30), st.randoms(use_true_random=False))
def test_any_text_in_any_cut_streams_exactly(text, random):
    # Every byte its own token, or merged as the vocabulary likes: the text that comes out is the same.
    alphabet = {b: T._tokenizer.token_to_id(letter) for letter, b in chat._BYTE_OF_LETTER.items()}
    ids = [i for c in text for i in ([alphabet[b] for b in c.encode()] if random.random() < 0.5 else T.encode(c))]
    joined, _, deltas = stream([*wire("<|content_text|>"), *ids, *wire("<|end_message|>")])
    assert joined.get(0, "") == text
    assert "".join(d.text for d in deltas).count("\ufffd") == text.count("\ufffd")
