"""Fast computations that attentions share. A first reading of attn/ can skip this folder.

A kernel's equation is in its own docstring, or in that of the attention that uses it. The tests compare the results
with attn/unified.py.
"""
