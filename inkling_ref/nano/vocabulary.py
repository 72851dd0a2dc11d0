"""Train nano's tokenizer on the text of its world: byte-level BPE, 1536 ids, the release's markers last.

    python -m inkling_ref.nano.vocabulary OUT      writes OUT/tokenizer.json

Digits are split one by one, so that a number is read and written column by column. All 256 bytes are in the
vocabulary: any text can be encoded. Training is deterministic.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .. import chat
from ..errors import InputError
from ..files import whole_file
from .rows import Encoder, generator, make_row, short_plan

SHIPPED = Path(__file__).parent.parent / "data" / "nano"  # the folder of the shipped tokenizer.json and checkpoint
VOCABULARY = 1536
# The last ids, in this order. One is spare; the image placeholder, InklingConfig.nano().image_token_id, is the last.
MARKERS = (
    chat.END_OF_TEXT,
    chat.MESSAGE_SYSTEM,
    chat.MESSAGE_USER,
    chat.MESSAGE_MODEL,
    chat.MESSAGE_TOOL,
    chat.CONTENT_TEXT,
    chat.CONTENT_THINKING,
    chat.CONTENT_IMAGE,
    chat.CONTENT_XML,
    chat.CONTENT_TOOL_JSON,
    chat.CONTENT_TOOL_TEXT,
    chat.CONTENT_TOOL_ERROR,
    chat.END_MESSAGE,
    chat.END_SAMPLING,
    "<|unused_200055|>",
    chat.IMAGE_PLACEHOLDER,
)
TEXT_IDS = VOCABULARY - len(MARKERS)


def _add_markers(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return tokenizer


def _untrained(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def training_text(conversations: int) -> Iterator[str]:
    """All text of many conversations of every kind, string by string."""
    # Rows are filled by length in tokens; without a vocabulary yet, bytes are the tokens.
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    encoder = Encoder(chat.Tokenizer(_add_markers(_untrained(letters))))
    plan = short_plan(64)
    for i in range(conversations):
        conversation, _ = make_row(plan[i % len(plan)], generator("train", "vocabulary", i), encoder, length=600)
        yield from conversation.system
        if conversation.effort is not None:
            yield f"Thinking effort level: {conversation.effort}"
        for turn in conversation.turns:
            yield from (part for part in turn.user if isinstance(part, str))
            yield turn.answer
            if turn.thinking is not None:
                yield turn.thinking


def train(conversations: int = 12_000) -> Tokenizer:
    """The tokenizer.

    Raises:
        InputError: if the text has too few different words to fill the vocabulary.
    """
    tokenizer = _untrained({})
    trainer = trainers.BpeTrainer(
        vocab_size=TEXT_IDS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(conversations), trainer)
    if tokenizer.get_vocab_size() != TEXT_IDS:
        raise InputError(f"nano: the text gives {tokenizer.get_vocab_size()} tokens, expected {TEXT_IDS}: draw more")
    return _add_markers(tokenizer)


def main(folder: str) -> None:
    """Train and write `folder`/tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial:
        train().save(str(partial))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m inkling_ref.nano.vocabulary OUT")
    main(sys.argv[1])
