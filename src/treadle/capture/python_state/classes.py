"""What a class says of itself, whatever its metaclass says."""


def class_module(kind: type) -> str:
    """The name of the module that made a class."""
    name = type.__dict__["__module__"].__get__(kind)
    return name if type(name) is str else "builtins"
