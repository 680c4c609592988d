"""The functions that users call: they collect tensors and scalars, which `ops.eager` runs."""
