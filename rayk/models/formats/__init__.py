"""The formats of quantised releases: which stored tensors make a piece of a plain one, and how.

config.json's `quantization_config` is read by families/quantisation.py into a `Quantisation`, which names the
`WeightFormat` of each tensor. A weight reader asks the format for pieces; the format reads only the stored
tensors that the piece needs, and returns it in float32, the dtype to which every format is dequantised here.
The modules load without torch, so that sizes can be told without it.
"""

from rayk.models.formats.format import DEQUANTISED, Source, WeightFormat
from rayk.models.formats.fp8 import Fp8
from rayk.models.formats.integers import Awq, Gptq, PackQuantized
from rayk.models.formats.mxfp4 import Mxfp4
from rayk.models.formats.nvfp4 import Nvfp4
from rayk.models.formats.quantisation import Quantisation, Scheme

__all__ = [
    "DEQUANTISED",
    "Awq",
    "Fp8",
    "Gptq",
    "Mxfp4",
    "Nvfp4",
    "PackQuantized",
    "Quantisation",
    "Scheme",
    "Source",
    "WeightFormat",
]
