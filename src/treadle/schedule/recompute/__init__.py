"""Cheap values computed again where they are read: who may, by one account of what is cheap."""
