"""Cheap cleanup: equal values, unread values, operations without effect."""
