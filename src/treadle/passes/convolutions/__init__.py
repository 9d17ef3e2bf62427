"""Convolutions in the form in which libraries are fastest."""
