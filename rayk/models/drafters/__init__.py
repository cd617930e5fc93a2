"""What proposes tokens on the ranks of an engine, before the model computes them together.

 config.py      DrafterConfig: the drafter of a SpeculativeConfig, its layers and their KV; free of torch
 refusals.py    which engines and models cannot have one, and what would do; free of torch
 drafter.py     RankDrafter: what an engine calls
 draft_model.py a smaller model of the same vocabulary
 eagle3.py      a head that takes three hidden states of the model
 mtp.py         multi-token prediction layers of the model's own checkpoint
 loader.py      builds one rank's drafter from its checkpoint
 riders.py      its KV as groups that ride on one of the model's; free of torch

A drafter's row at position p reads token p + 1 and what the model computed at p (a smaller model: token p
alone). Its layers have numbers from the model's number of layers on, by which their caches are known.
"""
