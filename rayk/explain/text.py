"""Write an explanation for people, as text and HTML."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rayk.explain.drawing import svg_drawing, tokens_text
from rayk.explain.explanation import Explanation, FastPrefill, Group, Sharing, Sight
from rayk.explain.places import counted, numbers
from rayk.explain.reads import FormatChange, Transfer, Units

HEAD = (
    "consumer",
    "producer",
    "group",
    "kind",
    "layers",
    "units",
    "bytes",
    "descriptors",
    "merged",
    "direct, us",
    "staged, us",
    "way",
)
LEFT = ("kind", "layers", "units", "way")  # those of HEAD that are text, not numbers


def refusal(explanation: Explanation) -> str:
    return f"not supported: {explanation.reason.removeprefix('not supported yet: ')}"


def summary(explanation: Explanation) -> str:
    return (
        f"{explanation.bytes:,} bytes in {explanation.num_descriptors:,} descriptors "
        f"for a sequence of {explanation.num_tokens:,} tokens"
    )


def remarks(explanation: Explanation) -> Iterator[str]:
    """Yield lines on the model and on numbers that may surprise."""
    if explanation.conversion is not None:
        yield conversion_text(explanation.conversion)
    if explanation.transfer is not None:
        yield transfer_text(explanation.transfer)
    for text in explanation.left_out:
        yield f"left out: {text}"
    if explanation.sharing:
        yield sharing_text(explanation.sharing)
    fast = explanation.fast_prefill
    if fast is not None and (fast.sides or explanation.sharing):
        yield fast_prefill_text(fast, explanation.num_tokens)
    yield from explanation.notes


def conversion_text(conversion: FormatChange) -> str:
    """Describe it, e.g. `decode converts on receive: float32 -> fp8_e4m3, ...`."""
    formats = (", ".join(f) for f in (conversion.producer_formats, conversion.consumer_formats))
    return (
        f"decode converts on receive: {' -> '.join(formats)}; {conversion.wire_bytes:,} bytes on the wire "
        f"become {conversion.kept_bytes:,}"
    )


def transfer_text(transfer: Transfer) -> str:
    costs = f"expected times are those of {transfer.costs}"
    if transfer.mode == "pull":
        return f"pull, staging {transfer.staging}; {costs}"
    first, *others = transfer.push_layers
    slower = ", ".join(f"{p.layers} from {p.from_layer_us:,.0f} us of computing a layer" for p in others)
    return f"push, {first.layers} layers per write" + (f" ({slower})" if slower else "") + f"; {costs}"


def fast_prefill_text(fast: FastPrefill, num_tokens: int) -> str:
    """Say what fast prefill saves where it was asked for, or would save."""
    subject = f"fast prefill ({', '.join(fast.sides)})" if fast.sides else "fast prefill (not asked for)"
    if not fast.layers:
        return f"{subject}: no trailing layers share: nothing changes"
    does = ("compute" if len(fast.layers) > 1 else "computes") if fast.sides else "would compute"
    return (
        f"{subject}: {counted('layer', fast.layers)} {does} only tokens whose "
        f"logits are wanted, {fast.num_token_layers:,} instead of {fast.num_token_layers_without:,} "
        f"token-layers for a prompt of {num_tokens:,} tokens"
    )


def sharing_text(sharing: Sequence[Sharing]) -> str:
    """E.g. `layers 4-7 keep and send nothing: 4, 6 use the pages of layer 2; 5, 7 use the pages of layer
    3`."""
    users: dict[int, list[int]] = {}
    for s in sharing:
        users.setdefault(s.uses, []).append(s.layer)
    texts = [
        f"{numbers(layers)} use{'s'[: len(layers) == 1]} the pages of layer {source}"
        for source, layers in users.items()
    ]
    ending = "s" if len(sharing) == 1 else ""
    return (
        f"{counted('layer', [s.layer for s in sharing])} keep{ending} and send{ending} "
        f"nothing: {'; '.join(texts)}"
    )


def side_lines(explanation: Explanation) -> list[tuple[str, list[str]]]:
    lines = []
    for name, side in explanation.sides.items():
        waste = f"{side.kv_waste_bytes:,} bytes ({side.kv_waste_percent:.1f} %) before TP"
        lines.append(
            (
                f"{name}: {side.parallel}, {side.layout}, {side.block_bytes:,} bytes per block and rank; "
                f"a request of {side.waste_tokens:,} tokens wastes {waste}",
                [
                    f"KV group {i}: {_group_text(group, explanation.sharing)}"
                    for i, group in enumerate(side.groups)
                ],
            )
        )
    return lines


def _group_text(group: Group, sharing: Sequence[Sharing]) -> str:
    layers = counted("layer", group.layers)
    if group.rides is not None:
        layers = f"draft {counted('layer', group.draft_layers)} on the blocks of KV group {group.rides}"
    texts = [
        f"{group.kind}, {layers}" + _uses_text(group, sharing),
        "one block per request" if group.covers_request else f"blocks of {group.block_size:,} tokens",
        f"pages of {group.page_bytes:,} bytes before TP",
    ]
    texts += [_sight_text(sight, group) for sight in group.sights]
    if group.kernel_block_size != group.rows:
        texts.append(f"kernel blocks of {group.kernel_block_size}")
    unused = group.unused_bytes_per_block
    if group.wasted_bytes_per_block or any(unused):
        by_rank = f"{unused[0]:,} on each rank"
        if len(set(unused)) > 1:
            by_rank = "by rank " + " | ".join(f"{n:,}" for n in unused)
        texts.append(f"unused of a block {group.wasted_bytes_per_block:,} bytes before TP, {by_rank}")
    return ", ".join(texts) + "; by rank " + " | ".join(_share_texts(group))


def _share_texts(group: Group) -> Iterator[str]:
    """Say what each rank keeps: units, and layers and tokens where these are not all."""
    for units, layers, tokens in zip(group.units, group.rank_layers, group.tokens, strict=True):
        if not layers:
            yield "nothing"
            continue
        texts = [units_text(units)]
        texts += [counted("layer", layers)] if layers != group.layers else []
        texts += (
            [tokens_text(tokens.rows(tokens.period).tolist(), tokens.period)] if tokens.period > 1 else []
        )
        yield ", ".join(texts)


def _sight_text(sight: Sight, group: Group) -> str:
    """Say how far its tokens see, e.g. `chunks of 64 positions`, with the layers if not all have them."""
    what = f"chunks of {sight.chunk:,}" if sight.chunk is not None else f"windows of {sight.window:,}"
    if sight.layers == group.layers:
        return f"{what} positions"
    return f"{counted('layer', sight.layers)} see{'s'[: len(sight.layers) == 1]} {what} positions"


def _uses_text(group: Group, sharing: Sequence[Sharing]) -> str:
    """Say which of the group's layers are used by which others."""
    users = {n: [s.layer for s in sharing if s.layer in group.readers and s.uses == n] for n in group.layers}
    if len(group.layers) == 1:
        return _users_text(group.readers)
    texts = [f"layer {n} by {numbers(layers)}" for n, layers in users.items() if layers]
    if texts:
        texts[0] = texts[0].replace(" by", " is used by")
    return f" ({', '.join(texts)}, too)" if texts else ""


def _users_text(readers: Sequence[int]) -> str:
    return f" (used by {numbers(readers)}, too)" if readers else ""


def units_text(units: Sequence[Units]) -> str:
    """Name units: `heads 0-3`, or by field `conv_x, ssm: heads 0-3; conv_b, conv_c: group 0`."""
    texts = [counted(u.unit_name, u.ids) for u in units]
    if len(units) > 1:
        texts = [f"{', '.join(u.fields)}: {text}" for u, text in zip(units, texts, strict=True)]
    return "; ".join(texts)


def read_rows(explanation: Explanation) -> list[tuple[str, ...]]:
    return [
        (
            str(read.consumer_rank),
            str(read.producer_rank),
            str(read.group),
            read.kind,
            numbers(read.layers),
            units_text(read.units),
            f"{read.bytes:,}",
            f"{read.num_descriptors:,}",
            f"{read.num_descriptors_merged:,}",
            f"{read.direct_us:,.0f}",
            "" if read.staged_us is None else f"{read.staged_us:,.0f}",
            read.way,
        )
        for read in explanation.reads
    ]


def place_lines(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write a line per coordinate of a byte, or per run of bytes of a coordinate."""
    if not found:
        return ["no KV: padding, or block generations"]
    return [_bytes_line(f) if "num_bytes" in f else _coordinate_line(f) for f in found]


def _coordinate_line(found: Mapping[str, Any]) -> str:
    token = f"token {found['row']} of the block, " if found["has_token_rows"] else ""
    layer = f"layer {found['layer']}{_users_text(found['used_by'])}"
    return (
        f"{layer}, block {found['block']}, {found['unit_name']} {found['unit']}, {token}"
        f"{_field_text(found)}, byte {found['byte']} (KV group {found['group']})"
    )


def _bytes_line(found: Mapping[str, Any]) -> str:
    first, last = found["byte"], found["byte"] + found["num_bytes"] - 1
    whose = (
        ""
        if found["asked"] == found["layer"]
        else f" of layer {found['layer']}, whose pages layer {found['asked']} uses"
    )
    return f"{_field_text(found)}{whose}: bytes {first} to {last} (KV group {found['group']})"


def _field_text(found: Mapping[str, Any]) -> str:
    name = str(found["field"])
    return name.upper() if name in ("k", "v") else name


def as_html(explanation: Explanation) -> str:
    title = f"{explanation.model}: " + " to ".join(f"{n} {text}" for n, text in explanation.engines.items())
    title = html.escape(title)
    about = f"supported: {summary(explanation)}" if explanation.supported else refusal(explanation)
    head = "".join(f"<th>{name}</th>" for name in HEAD)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(t)}</td>" for t in row) + "</tr>"
        for row in read_rows(explanation)
    )
    style = (
        ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:1160px;"
        "margin:32px auto;padding:0 16px}table{border-collapse:collapse;width:100%}"
        "th,td{text-align:right;padding:5px 10px;border-bottom:1px solid #8884}div{overflow-x:auto}"
        "figure{margin:16px 0;overflow-x:auto}figcaption{margin-bottom:6px}svg{max-width:100%;height:auto}"
    )
    body = f"<p>{html.escape(about)}</p>"
    body += "".join(f"<p>{html.escape(remark)}</p>" for remark in remarks(explanation))
    for line, groups in side_lines(explanation):
        items = "".join(f"<li>{html.escape(group)}</li>" for group in groups)
        body += f"<p>{html.escape(line)}</p><ul>{items}</ul>"
    table = f"<div><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>" if rows else ""
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>rayk explain: {title}</title><style>{style}</style></head>"
        f"<body><h1>{title}</h1>{body}{svg_drawing(explanation) if rows else ''}{table}</body></html>"
    )
