"""Measuring: what the model costs on paper (`cost`) and on this machine (`speed`)."""
