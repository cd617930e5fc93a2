"""What is refused of drafts before any actor starts: settings that nothing heeds, and drafters that lack what
they need. What an engine cannot do yet makes its cell UNSUPPORTED: see models.drafters.refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rayk.models.config import DecoderConfig
from rayk.models.drafters.config import find_drafter
from rayk.models.drafters.refusals import refuse_speculative
from rayk.specs.cells import Cell
from rayk.specs.load import LoadedSpec
from rayk.specs.speculative import KEYS, NONE, SECTION, SIDES, SpeculativeSpec, axis_value
from rayk.types.errors import SpecError, Unsupported, UserError
from rayk.types.speculative import HEEDED, METHODS

_NEEDS_MODEL = {"draft": "a smaller model's folder", "eagle3": "an EAGLE-3 head's folder"}


def check_drafts_heeded(cells: Sequence[Cell], loaded: LoadedSpec) -> None:
    """Refuse settings of drafts that are given and that no cell heeds. That some cells draft nothing, or by
    another method, is how they are compared with others. Raises SpecError."""
    for key in _given(loaded):
        if any(axis_value(cell.spec, key) not in (None, NONE) for cell in cells):
            continue
        *_, leaf = key.split(".")
        methods = {
            engine.speculative.method for cell in cells for engine in cell.engines if engine.speculative
        }
        takes = [method for method in METHODS if leaf in HEEDED[method]]
        if methods:
            mend = f"leave it out, or speculative: {{method: {' or '.join(takes)}}}"
            problem = f"{key}: drafts of method {' and '.join(sorted(methods))} have no such setting"
        else:
            mend = f"speculative: {{method: {takes[0]}}}, or leave it out"
            problem = f"{key} is given, and no engine drafts"
        raise SpecError(problem=problem, where=loaded.where(key), mend=mend)


def _given(loaded: LoadedSpec) -> Iterator[str]:
    """Yield the keys, but for methods, that have another value than their default, or several, or that an
    override gives. An override of the method may switch off all that a file says."""
    overrides, spec = loaded.marks.overrides, loaded.spec
    varied = {key for matrix in spec.matrix for key in matrix}
    for side in ("", *SIDES):
        section = getattr(spec, side).speculative if side else spec.speculative
        prefix = (side, SECTION) if side else (SECTION,)
        is_off = (*prefix, "method") in overrides and (section is None or section.method in (None, NONE))
        for leaf in KEYS:
            key, value = ".".join((*prefix, leaf)), getattr(section, leaf, None)
            default = None if side else SpeculativeSpec.model_fields[leaf].default
            # A resolved spec, which may be run again, names every key: that alone says nothing.
            is_set = (*prefix, leaf) in overrides and value is not None
            if leaf != "method" and (
                key in varied or is_set or (value not in (default, None) and not is_off)
            ):
                yield key


def check_drafts(cell: Cell, config: DecoderConfig, loaded: LoadedSpec) -> None:
    """Refuse drafters without the checkpoint that they need, or with one that does not fit the model, and
    settings that do not belong together. Raises SpecError."""
    if "drafts" in cell.checks and cell.prefill.dtype != "float32":
        raise SpecError(
            problem="check `drafts` compares what two runs propose, of which rounding decides too much in "
            f"{cell.prefill.dtype}",
            where=loaded.where("checks"),
            mend="dtype: float32, or leave `drafts` out of checks",
        )
    for side, engine in zip(SIDES, cell.engines, strict=False):
        drafts = engine.speculative
        if drafts is None:
            continue
        if drafts.method in _NEEDS_MODEL and drafts.model is None:
            raise SpecError(
                problem=f"{side}: speculative.method: {drafts.method} without a model",
                where=_where(cell, side, "method", loaded),
                mend=f"speculative: {{model: FOLDER}}, {_NEEDS_MODEL[drafts.method]}",
            )
        try:
            refuse_speculative(drafts, engine, config)
            find_drafter(engine, config)
        except UserError as error:
            where = _where(cell, side, "method", loaded)
            told = f"{error.where}: {error.problem}" if error.where else error.problem
            raise SpecError(f"{side}: {told}", where=where, mend=error.mend) from error
        except Unsupported as error:
            raise SpecError(f"{side}: {error.reason}", where=_where(cell, side, "tp", loaded)) from error


def _where(cell: Cell, side: str, leaf: str, loaded: LoadedSpec) -> str:
    """Tell where a setting was given: by the side itself, or for both."""
    is_own = getattr(getattr(cell.spec, side).speculative, leaf, None) is not None
    return loaded.where(f"{side}.{SECTION}.{leaf}" if is_own else f"{SECTION}.{leaf}")


def idle_drafts(cells: Iterable[Cell]) -> list[str]:
    """Say which settings of drafts change nothing in these cells, a sentence each."""
    found: dict[str, None] = {}
    for cell in cells:
        drafting = [engine.speculative for engine in cell.engines if engine.speculative is not None]
        own = cell.spec.prefill.speculative
        if cell.decode is not None and own is not None and own.method not in (None, NONE):
            text = "prefill.speculative: an engine that samples one token of a request proposes none"
            found[text] = None
        if not cell.sampling.temperature and any(drafts.accept == "rejection" for drafts in drafting):
            text = "speculative.accept: rejection, and temperature 0 draws nothing: the same as match"
            found[text] = None
        if drafting and cell.sampling.max_tokens <= 2:
            text = f"speculative.method, and max_tokens {cell.sampling.max_tokens} leaves no token to propose"
            found[text] = None
    return list(found)
