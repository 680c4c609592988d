"""What the pass reads of a graph: values, canonical operation names, dimensions, layouts and
constants; and the insertion of nodes.
"""
