"""Strings made from substitutes."""
