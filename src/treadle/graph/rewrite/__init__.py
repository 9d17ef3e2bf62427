"""Passes, rules, and pattern matching."""
