"""Benchmarks: ratios between two things measured alternately, in one run, on one machine."""
