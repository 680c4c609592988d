"""One call: its tensors and options, and what makes it legal."""
