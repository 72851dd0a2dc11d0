"""A byte-level BPE vocabulary of a few hundred tokens with the markers of the wire format, made on the spot."""

from functools import cache

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from inkling_ref import chat

MARKERS = [
    chat.MESSAGE_USER, chat.MESSAGE_MODEL, chat.MESSAGE_SYSTEM, chat.MESSAGE_TOOL,
    chat.CONTENT_TEXT, chat.CONTENT_IMAGE, chat.CONTENT_THINKING, chat.CONTENT_XML,
    chat.CONTENT_TOOL_JSON, chat.CONTENT_TOOL_TEXT, chat.CONTENT_TOOL_ERROR,
    chat.END_MESSAGE, chat.END_SAMPLING, chat.END_OF_TEXT, chat.IMAGE_PLACEHOLDER,
]  # fmt: skip

# Enough text for merges of a few words and of one emoji, whose four bytes, two halves and whole are tokens.
CORPUS = ["hello world, the red circle is left of the blue square", "\N{GRINNING FACE}" * 3] * 20


def raw_tokenizer(markers: list[str] = MARKERS, special: bool = True) -> tokenizers.Tokenizer:
    """The library's object, its markers special tokens or (a trap) plain added tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(markers)
    return tokenizer


@cache
def tiny_tokenizer() -> chat.Tokenizer:
    return chat.Tokenizer(raw_tokenizer())
