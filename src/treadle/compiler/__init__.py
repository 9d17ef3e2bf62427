"""From a captured step to a program: the stages in their order, and their inputs."""
