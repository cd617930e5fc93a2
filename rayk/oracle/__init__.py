"""Transformers as the reference, and the writer of tiny checkpoints to compare on.

checkpoint.py   write_checkpoint: a tiny random checkpoint of a real architecture, tokenizer included
tiny.py         the families it writes and their debug dimensions
hybrids.py      those of families with recurrent states or latents
gains.py        what every tensor is drawn from
draw.py         the search for random weights whose greedy output is worth comparing
routing.py      how near routers come to another choice, and routers that never come near
text.py         a text fed to a transformers model piece by piece, with its cache
sharing.py      a cache through which layers of a transformers model share keys and values
tokenizer.py    the byte-level BPE tokenizer it puts beside the weights
reference.py    Reference: greedy tokens, margins, teacher forcing and KV values of transformers
states.py       what transformers' cache holds, by the names of rayk's page fields
cache.py        answers of the reference, kept on disk
files.py        hashing checkpoints and replacing folders at once
quiet.py        transformers without progress bars and advice

transformers lives here and is imported late: recognising a finished checkpoint or a kept answer
costs no import.
"""
