"""Storages that replacements have joined: each is known by the last one that it is a part of."""


class JoinedStorages:
    """``join(a, b)``, then ``join(b, c)``: ``root`` of all three is ``c``."""

    def __init__(self) -> None:
        self._into: dict[int, int] = {}

    def root(self, storage: int) -> int:
        """The storage that holds its bytes now."""
        while storage in self._into:
            storage = self._into[storage]
        return storage

    def join(self, storage: int, into: int) -> None:
        """The bytes of ``storage`` are those of ``into`` from now on; both are roots."""
        self._into[storage] = into
