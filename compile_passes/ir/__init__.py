"""The graph as the pass reads it: values, canonical operation names, dimensions, layouts and
constants.
"""
