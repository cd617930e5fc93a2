"""What the bytes of a layer's cache mean, as facts that two engines compare. Pure; free of torch."""

from __future__ import annotations

from rayk.kv.fields import PageField
from rayk.kv.formats import FORMATS
from rayk.kv.specs import KVCacheSpec

Facts = dict[str, str]
"""Name -> value of what must agree."""


def meaning(spec: KVCacheSpec) -> Facts:
    """Say what of a layer is live. That tells windows and chunks apart whatever the kind of spec, but not at
    the very end of so many tokens, where chunks of many sizes have nothing."""
    live = spec.live_rows(spec.fullest_at(1_000_000))
    return {"kind": spec.kind, "live_rows(1000000)": str(live)}


def kept_as(spec: KVCacheSpec) -> Facts:
    """Say how a layer keeps it: what its bytes mean, whatever the layout."""
    return {"kv_dtype": spec.dtype} | {f.name: _describe_field(f) for f in spec.fields()}


def differences(ours: Facts, theirs: Facts) -> list[tuple[str, str, str]]:
    """Return (name, ours, theirs) of what differs, most telling first."""
    names = [*ours, *(name for name in theirs if name not in ours)]
    pairs = ((name, ours.get(name, "absent"), theirs.get(name, "absent")) for name in names)
    return [(name, a, b) for name, a, b in pairs if a != b]


def can_convert(ours: KVCacheSpec, theirs: KVCacheSpec) -> bool:
    """Tell whether a producer's rows of one spec can be made a consumer's of another: keys and values, or
    latents, of as many elements, in any two formats."""
    if not ours.has_token_rows or not theirs.has_token_rows:
        return False
    if ours.dtype not in FORMATS or theirs.dtype not in FORMATS:
        return False
    return _elements(ours) == _elements(theirs)


def _elements(spec: KVCacheSpec) -> dict[str, int]:
    """Count the elements of a head by side, whatever scales lie beside them."""
    kv_format = FORMATS[spec.dtype]
    return {f.name: kv_format.elements(f.row_bytes) for f in spec.fields() if not f.name.endswith("_scale")}


def _describe_field(field: PageField) -> str:
    """Return what its bytes mean, whatever the layout. Rows per block may differ where a row is a token."""
    taps = f", {field.taps} taps" if field.taps else ""
    return f"{field.units} units x {field.row_bytes} bytes of {field.dtype}{taps}"
