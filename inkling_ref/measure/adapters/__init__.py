"""The same names from other implementations: `transformers` by hooks, any other by a naming map (`recorded`)."""
