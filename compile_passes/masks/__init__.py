"""Masks: symbolic evaluation of their elements, and which arguments of the operator they become."""
