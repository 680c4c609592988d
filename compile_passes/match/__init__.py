"""Matching attention: what each operation does to scores and weights, from the product of query and
key to the product with the value, and the axes of the call that replaces them.
"""
