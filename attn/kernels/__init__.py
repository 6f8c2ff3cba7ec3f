"""Fast computations of sums that are defined elsewhere. A first reading of attn/ can skip this folder.

The equations are in the docstrings of the attentions and of attn/unified.py, and the tests compare the kernels with
them.
"""
