"""Benchmarks: implementations on the same inputs in one run, checked before they are timed."""
