"""Facts about a class, independent of its metaclass."""


def class_module(kind: type) -> str:
    """The name of the module that made a class."""
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else "builtins"
