"""What a run does to lists, dicts and objects, done again at every call."""
