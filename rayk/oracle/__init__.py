"""Transformers as the reference, and the writer of tiny checkpoints to compare on.

 checkpoint.py   write_checkpoint: a tiny random checkpoint of a real architecture, tokenizer included
 tiny.py         the families it writes and their debug dimensions
 hybrids.py      those of families with recurrent states or latents
 gains.py        the distributions that tensors are drawn from
 draw.py         the search for random weights whose greedy output is worth comparing
 trials.py       results of earlier searches
 routing.py      how near routers come to another choice, and routers that never come near
 text.py         a text fed to a transformers model piece by piece, with its cache
 mtp.py          multi-token prediction layers: transformers' own, and random ones
 eagle3.py       EAGLE-3 heads of transformers' llama modules, and the writer of random ones
 drafting.py     what these propose, computed over the whole text
 sharing.py      a cache through which layers of a transformers model share keys and values
 quantised.py    rounding of keys and values to a quantised format, apart from rayk's kernels
 following.py    a reference that takes over what an engine stored, where that is a legal rounding
 kv_scales.py    a checkpoint's KV scales, read apart from rayk's loader
 tokenizer.py    the byte-level BPE tokenizer it puts beside the weights
 reference.py    Reference: greedy tokens, margins, teacher forcing and KV values of transformers
 states.py       transformers' cache by the names of rayk's page fields
 remake.py       the command that writes a checkpoint again
 cache.py        answers of the reference, kept on disk
 files.py        hashing checkpoints and replacing folders atomically
 release_formats.py   the formats of quantised releases that tiny checkpoints are written in
 packing.py      what packs weights in them
 dequantised.py  the plain checkpoint that a quantised release means, by the formats' own libraries
 quiet.py        transformers without progress bars and advice

transformers lives here and is imported late: recognising a finished checkpoint or a cached answer costs no
import.
"""
