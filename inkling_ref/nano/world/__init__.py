"""The generators of the small world: pictures, stories, codes, sums and small talk, all from a `random.Random`."""
