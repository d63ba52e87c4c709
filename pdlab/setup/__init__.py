"""From a bare machine to an environment in which engines run. Standard library only (`model` calls on transformers)."""
