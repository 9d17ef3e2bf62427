"""Launches that are recorded once and replayed."""
