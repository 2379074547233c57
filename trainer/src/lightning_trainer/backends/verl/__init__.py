"""The verl backend: trains the same program with verl's trainer and vLLM, on one accelerator or on a cluster.

The only code that imports verl and Ray. Importing this package imports neither.
"""
