"""Measure speed as ratios, each within one run against a named peer or limit."""
