"""Graphs as texts, and texts as graphs."""
