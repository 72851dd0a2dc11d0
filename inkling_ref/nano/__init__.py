"""Nano: the small trained model that ships with this package, and the small world it was trained on.

The world generates endless conversations from an integer: pictures of coloured shapes with questions, short stories
with questions, key-value retrieval over long filler text, sums, and small talk. Nothing is stored; the same integer
gives the same conversation on every machine, and training and held-out integers can never meet, because the name of
the split is part of the seed.

    world/        the generators, one file a subject; each makes turns (question, answer) from a `random.Random`
      phrasing.py     paraphrase, spelling, case and punctuation
      scenes.py       scenes of coloured shapes: description and drawing
      questions.py    questions and captions about a scene
      stories.py      who has what, where is it
      retrieval.py    codes hidden in filler text
      sums.py         one- and two-digit sums, direct or with a thinking block
      talk.py         greetings, questions that it cannot answer, running text
    rows.py       conversations, their token ids and the batches that training reads
    vocabulary.py the tokenizer, trained on the generators' own text: `python -m inkling_ref.nano.vocabulary OUT`
    tasks.py      the evaluation tasks, on held-out seeds
    train.py      the training loop; training_ops.py and muon.py, its operations and its optimiser for matrices
    evaluate.py   exact match by task

What training reads (rows.py)
    encoder = Encoder(Tokenizer.from_pretrained(folder))      # a chat.Tokenizer with a cache from words to ids
    batch = short_batch(seed, encoder, rows=256, length=128)  # one batch, a pure function of its arguments
    batch = long_batch(seed, encoder, rows=16, length=2048)   # or rows=8, length=4096

    Batch, all numpy:
      ids      int32 [B, T]            one conversation a row, padded at the right with `encoder.pad_id`
      targets  uint8 [B, T]            what token t is worth as a *target* (predicted from t-1):
                                       NO_LOSS 0 (padding, image tiles, the first token), TEXT 1, ANSWER 2
                                       ANSWER runs from the content marker to <|content_model_end_sampling|>, inclusive
      tiles    uint8 [n_tiles, 40, 40, 3]  pixel levels of all pictures of the batch, in the order of the placeholders
                                       when `ids` is read row by row: feature i belongs to the i-th placeholder
      extents  uint8 [n_tiles, 2]      rows and columns of a tile that lie inside its picture; the rest is padding,
                                       whose level is -1, not 0: (where(inside, tiles, -1) - 127.5) / 127.5
      grids    int32 [n_images, 2]     rows and columns of each picture in tiles, pictures in the same order
      objects  int32 [n_objects, 3]    (tile, colour, shape) of every object's centre, indices into the batch's tiles
                                       and into scenes.COLOURS and scenes.SHAPES, for an auxiliary loss

    Bounds for static shapes:
      short_batch(rows=r): pictures only in the first 5r/8 rows; the first 3r/16 of these hold two, the others one,
          so exactly 13r/16 pictures (208 of 256 rows); at most SHORT_TILES = 30 tiles a picture.
      long_batch(rows=r):  at most LONG_TILES = 96 tiles a picture, at most
          max_long_pictures(rows, length) pictures (a row of 2048 holds at most 8, of 4096 at most 16,
          and only 3 rows of 8 hold any).
    `Batch.pixel_values()` gives float32 exactly as `process_images` would.

What evaluation reads (tasks.py)
    TASKS: dict of name -> Task; task.examples(n, seed=0, held_out=True) -> list of Example, deterministic.
    Example.messages   list of dicts for `chat.render` (images as numpy arrays), without the final answer
    Example.effort     for `chat.render(..., effort=example.effort)`; None leaves the effort message out
    Example.answer     text of the final text block: what exact match compares with
    Example.thinking   text of the thinking block that a right reply starts with, or None
    Example.conversation  for teacher forcing: `rows.encode(example.conversation, encoder)` -> Row(ids, targets, ...);
                       the ANSWER targets are exactly the reply to generate
    Names: colour, shape, count, position, yes_no, size, caption, two_pictures, story, retrieval_100, retrieval_2000,
           retrieval_4000, sum_direct, sum_thinking, talk.

Vocabulary: 1536 ids: 1520 of text, then the 16 markers of `vocabulary.MARKERS`, of which the last, id 1535, is the
image placeholder `<|unused_200054|>`. Padding is `<|endoftext|>`; a reply ends with `<|content_model_end_sampling|>`.
"""
