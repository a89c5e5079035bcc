"""Benchmarks: one script for each question, run as ``python -m benchmarks.NAME``."""
