"""Passes, rules, and how a rule is laid over a graph."""
