"""Buckets of collectives, and removal of duplicates."""
