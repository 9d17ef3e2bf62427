"""One run of a step: substitutes for the user's objects, recordings, side effects."""
