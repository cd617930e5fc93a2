"""The decoder's layers, each holding one rank's weights as plain tensors.

Shapes: T packed tokens, R requests, Q query heads and H KV heads of the rank, D head dim. A layer is its
tensors and a `forward`, without torch.nn.Module, which keeps a decode step's overhead small.
"""
