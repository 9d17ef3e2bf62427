"""What a graph is: roles, facts of nodes, types, operators and their effects."""
