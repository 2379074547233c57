"""The verl backend: the same program trained on verl's trainer and vLLM, on one accelerator or on a cluster.

The only code that imports verl and Ray; this package's own import brings neither.
"""
