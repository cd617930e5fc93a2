"""Recorded loads: when requests came, how long they were, and which prefixes they shared. Free of torch."""
