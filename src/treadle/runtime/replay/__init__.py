"""Launches recorded once and replayed."""
