"""vLLM's engines under rayk's proof. What runs in vLLM's environment needs numpy and torch only."""
