"""From a captured step to something that runs: the stages in their order, and what they see."""
