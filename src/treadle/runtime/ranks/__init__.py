"""The other processes of a group."""
