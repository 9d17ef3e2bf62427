"""One run of a step: what stands in for the user's objects, what is recorded, what it leaves."""
