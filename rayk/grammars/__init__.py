"""Which tokens may come next where an output must fit a schema, an expression or a grammar.

`check` refuses a bad description, `Grammars` holds what is compiled for one vocabulary, `OutputGrammar` is
where one output stands: a pure function of the description and the output's tokens, so that an engine which
takes a request over makes it again from these. The library behind it, llguidance, is imported when first
needed.
"""

from rayk.grammars.compiled import Grammars, OutputGrammar
from rayk.grammars.descriptions import check, refusal

__all__ = ["Grammars", "OutputGrammar", "check", "refusal"]
