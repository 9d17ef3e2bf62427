"""Dependencies, fusion, order, lifetimes and the arena: a lowered program becomes a plan."""

from treadle.schedule.plan import schedule

__all__ = ["schedule"]
