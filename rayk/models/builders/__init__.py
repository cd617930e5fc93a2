"""Building one rank's layers from a checkpoint: a file per kind of mixer and feed-forward half.

A builder takes the `Build` that all share and a layer's index. It cuts the layer's weights by the rank's
units and says which units those are; nothing else decides what a rank holds.
"""
