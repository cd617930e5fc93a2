"""The decoder's parts, each holding one rank's weights as plain tensors.

Shapes: T packed tokens, R requests, Q query heads and H KV heads of the rank, D head dim.
No module system: a layer is its tensors and a `forward`, which keeps a decode step's overhead small.
"""
