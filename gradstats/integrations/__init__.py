"""Callbacks that run a Monitor inside a trainer: of lightning, and of transformers."""
