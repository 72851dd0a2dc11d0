"""Checks and worked solutions of the notebooks' exercises: one module a notebook, named as its component."""
