"""Measuring: what the model costs on paper (`cost`) and on this machine (`speed`, `drafting`), and how far another
implementation is from it: `trace`, `compare`, `replay`, `make_golden`, over the table of `sections`.
"""
