"""The graph as the pass reads it: values, one vocabulary of operations, dimensions, views,
constants.
"""
