"""From a product of query and key to the product with the value: what each operation does to the
scores and weights, and the axes of the call that replaces them.
"""
