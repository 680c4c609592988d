"""Benchmarks: all implementations in one run, on the same inputs, checked before they are timed."""
