"""Parts of attention_gpu.py: problem (shapes and their tensors), paths (who computes them)."""
