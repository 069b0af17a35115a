"""A backbone from outside the package: Llama, whose queries and keys are rotated, and grouped."""
