"""Replacing an attention by one call: emission of its arguments as nodes, and verification."""
