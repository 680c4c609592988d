"""The figures of the documentation, drawn as SVG from JSON files that benchmarks wrote."""
