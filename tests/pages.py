"""README.md and docs/*.md: what they link to, name and tell readers to run."""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rayk.specs.experiment import EngineSettings, ExperimentSpec, OffloadSpec, SideSpec, TransferSpec
from rayk.specs.speculative import SpeculativeSpec

ROOT = Path(__file__).resolve().parent.parent

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?:rayk|tests|jobs|docs|dashboards)/[\w./-]+")
_TEST = re.compile(r"`(tests/[\w/]+\.py::\w+)`")
_SEPARATORS = {";", "|", "||", "&", "&&", "(", ")"}
_SHELL = {".", "chmod", "export", "grep", "kill", "sleep", "umask"}

QUICK = ("rayk checkpoint", "rayk explain", "rayk report", "rayk conformance --list")
"""How commands begin that tests/test_pages.py runs as they stand."""

RUN_BY = {
    "curl": "tests/serve/test_serve_command.py::test_a_server_on_ray_serve_answers_drains_and_leaves_nothing",
    "make attack": "tests/jobs/test_attack.py::test_nothing_gets_in_but_where_nothing_is_asked_for",
    "make chaos": "tests/experiments/test_chaos_on_ray.py"
    "::test_every_cell_ends_in_its_verdict_with_an_empty_ledger",
    "make check": "tests/test_house.py::test_the_house_is_in_order",
    "make dashboards": "tests/dashboards/test_start.py::test_it_starts_all_and_ends_by_one_interrupt",
    "make experiment": "tests/cli/test_job.py::test_all_cells_of_make_experiment_pass",
    "make fast-prefill": "tests/jobs/test_fast_prefill.py::test_a_run_leaves_tables_and_a_page",
    "make gpu-day": "tests/jobs/test_gpu_day.py"
    "::test_a_bare_machine_measures_every_stage_and_goes_on_where_it_was_left",
    "make groups": "tests/test_groups_end_to_end.py::test_tokens_equal_those_of_transformers",
    "make help": "tests/test_pages.py::test_make_help_names_every_target",
    "make hybrid": "tests/test_hybrid_end_to_end.py::test_tokens_equal_those_of_transformers",
    "make kernels": "tests/kernels/test_compile_ahead.py::test_every_kernel_was_compiled",
    "make nightly": "tests/transfer/test_any_pair.py::test_every_byte_of_any_pair_arrives_once",
    "make offload-bench": "tests/jobs/test_offload.py::test_a_small_run",
    "make quantised": "tests/test_quantised_end_to_end.py::test_converted_on_receive",
    "make serve-bench": "tests/jobs/test_serve_bench.py::test_real_servers_are_compared",
    "make serve-chaos": "tests/serve/test_serve_chaos.py::test_each_part_is_struck_under_load",
    "make serve-swap": "tests/serve/test_offload_server.py"
    "::test_engines_that_swap_all_the_time_answer_as_the_reference_does",
    "make sweep": "tests/jobs/test_transfer_sweep.py::test_some_cells_on_ray",
    "make test": "tests/test_pages.py::test_commands_and_their_options_exist",
    "make test-generators": "tests/serve/test_load_generators.py::test_aiperf_streams",
    "pytest --rayk-connector": "tests/conformance/test_kit.py::test_the_plugin_makes_a_test_of_every_check",
    "python jobs/benchmarks/failure_policies.py": "tests/jobs/test_failure_policies.py"
    "::test_every_fault_is_planted_once_where_it_can_strike",
    "python jobs/serve_bench.py": "tests/jobs/test_serve_bench.py::test_real_servers_are_compared",
    "python -m dashboards.check": "tests/dashboards/test_on_ray.py::test_no_query_is_an_error",
    "python -m rayk.metrics": "tests/metrics/test_registry.py"
    "::test_the_table_for_people_has_every_metric_once",
    "python -m tests.transfer.simulator": "tests/transfer/test_simulated_faults.py"
    "::test_a_world_is_told_from_the_command_line",
    "ray": "tests/jobs/test_job_submit.py::test_the_pages_job_runs_and_strangers_are_refused",
    "rayk bench": "tests/bench/test_bench_command.py::test_loads_leave_tables_and_a_report",
    "rayk conformance": "tests/conformance/test_kit.py::test_the_command_fails_and_leaves_tables",
    "rayk costs": "tests/planner/test_fitting.py::test_the_command_fits_a_run_that_is_there",
    "rayk doctor": "tests/cli/test_commands.py::test_doctor_says_what_it_found",
    "rayk plan": "tests/cli/test_plan_command.py::test_the_answer_stands_before_the_tables",
    "rayk run": "tests/cli/test_job.py::test_all_cells_of_make_experiment_pass",
    "rayk serve": "tests/serve/test_serve_command.py"
    "::test_a_server_on_ray_serve_answers_drains_and_leaves_nothing",
    "rayk top": "tests/cli/test_top.py::test_once_prints_a_line_per_engine",
}
"""How other commands begin -> the test that runs them, runs the like but smaller, or holds what they tell.

What no test runs says on its page what it needs."""


@dataclass(frozen=True)
class Command:
    """One command of a page: its words, and whether it stands in a block of its own."""

    page: str
    words: tuple[str, ...]
    fenced: bool = True
    needs: bool = False
    """Whether a line behind the block says what it needs."""

    def __str__(self) -> str:
        return f"{self.page}: {shlex.join(self.words)}"

    @property
    def is_quick(self) -> bool:
        """Whether it is one of QUICK."""
        return " ".join(self.words).startswith(QUICK)


def pages(root: Path = ROOT) -> list[Path]:
    """The README first."""
    return [root / "README.md", *sorted((root / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return [body for name, body in _FENCE.findall(text) if name == language]


def section(name: str, heading: str) -> str:
    """The text of a page between a heading and the next one of its level or above."""
    level = heading.split(" ")[0]
    text = (ROOT / name).read_text(encoding="utf-8")
    assert f"\n{heading}\n" in text, f"{name} has no heading {heading!r}"
    behind = text.partition(f"\n{heading}\n")[2]
    # A comment in a block of shell or Python begins like a heading.
    fenced = [match.span() for match in _FENCE.finditer(behind)]
    for match in re.finditer(rf"^#{{1,{len(level)}}} ", behind, re.MULTILINE):
        if not any(begin <= match.start() < end for begin, end in fenced):
            return behind[: match.start()]
    return behind


def _prose(text: str) -> str:
    return _FENCE.sub("", text)


def _anchors(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", _prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


def check_links(root: Path = ROOT) -> list[str]:
    """Links whose file or heading is not there."""
    violations = []
    for page in pages(root):
        for target in _LINK.findall(_prose(page.read_text(encoding="utf-8"))):
            if target.startswith(("http://", "https://")):
                continue
            name, _, anchor = target.partition("#")
            file = page.parent / name if name else page
            if not file.exists():
                violations.append(f"{page.relative_to(root)}: no file {target}")
            elif anchor and anchor not in _anchors(file.read_text(encoding="utf-8")):
                violations.append(f"{page.relative_to(root)}: no heading {target}")
    return violations


def check_files(root: Path = ROOT) -> list[str]:
    """Files and modules that pages name and that are not there."""
    violations = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        words = [inline.split(" ")[0] for inline in _INLINE.findall(_prose(text))]
        words += [word for command in commands(page) for word in command.words]
        for word in words:
            if _FILE.fullmatch(word) and not (root / word).exists():
                violations.append(f"{page.relative_to(root)}: no file {word}")
        for module in re.findall(r"python -m ([\w.]+)", text):
            if importlib.util.find_spec(module) is None:
                violations.append(f"{page.relative_to(root)}: no module {module}")
    return violations


def check_tests(root: Path = ROOT) -> list[str]:
    """Tests that pages name and that are not there."""
    violations = []
    for page in pages(root):
        named = _TEST.findall(page.read_text(encoding="utf-8"))
        violations += [f"{page.relative_to(root)}: no test {test}" for test in _missing(root, named)]
    return violations


def _missing(root: Path, tests: Iterable[str]) -> list[str]:
    """Of tests, named as `tests/file.py::test_name`, those that are not there."""
    names = (test.partition("::") for test in tests)
    return [f"{file}::{name}" for file, _, name in names if name not in _tests_of(root / file)]


@cache
def _tests_of(file: Path) -> frozenset[str]:
    if not file.exists():
        return frozenset()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _simple_commands(line: str) -> Iterator[tuple[str, ...]]:
    """The commands of a shell line, without assignments, redirections and keywords."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _SEPARATORS:
            while words and (words[0] in ("do", "until", "done") or re.fullmatch(r"\w+=.*", words[0])):
                del words[0]
            if words:
                yield tuple(words)
            words = []
        else:
            words.append(word)


def commands(page: Path) -> list[Command]:
    """What a page tells its readers to run: lines of shell blocks, `make ...` and `rayk ...` in text."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        if match[1] != "bash":
            continue
        needs = text[match.end() :].lstrip("\n").startswith("Needs: ")
        for line in match[2].replace("\\\n", " ").splitlines():
            # "<torch's CPU wheel index, ...>" stands for what a reader fills in.
            written = re.sub(r"<[^<>]*>", "PLACEHOLDER", line)
            found += [Command(page.name, words, needs=needs) for words in _simple_commands(written)]
    for inline in _INLINE.findall(_prose(text)):
        if re.match(r"(make|rayk) [a-z]", inline) and "|" not in inline:
            found.append(Command(page.name, tuple(shlex.split(inline)), fenced=False))
    return found


def check_commands(root: Path = ROOT) -> list[str]:
    """Commands in blocks that no test runs and that do not say what they need; tests that are not there."""
    violations = [f"RUN_BY: no test {test}" for test in _missing(root, RUN_BY.values())]
    for page in pages(root):
        for command in commands(page):
            text = " ".join(command.words) + " "
            run = (
                command.is_quick
                or command.words[0] in _SHELL
                or any(text.startswith(f"{k} ") for k in RUN_BY)
            )
            if command.fenced and not command.needs and not run:
                violations.append(f"{command}: no test of RUN_BY, and no line `Needs: ...` behind its block")
    return violations


def check_keys(root: Path = ROOT) -> list[str]:
    """Keys of specs that their page lacks, and keys of engines that it says may stand elsewhere."""
    texts = {
        name: (root / f"docs/{name}.md").read_text(encoding="utf-8")
        for name in ("experiments", "transfers", "speculative")
    }
    texts["offload"] = "\n".join(blocks((root / "docs/offload.md").read_text(encoding="utf-8"), "yaml"))
    violations = []
    for page, model in {
        "experiments": ExperimentSpec,
        "transfers": TransferSpec,
        "offload": OffloadSpec,
        "speculative": SpeculativeSpec,
    }.items():
        for key in model.model_fields:
            if not re.search(rf"`{key}`|^ +{key}: ", texts[page], re.MULTILINE):
                violations.append(f"docs/{page}.md: no key {key}")
    text = section("docs/experiments.md", "## Engine settings")
    explained = set(re.findall(r"^\| `(\w+): ", text, re.MULTILINE))
    side, shared = set(SideSpec.model_fields), set(EngineSettings.model_fields)
    for where, keys in {
        "`engine`, `prefill`, `decode`": side & shared,
        "`engine` only": shared - side,
        "`prefill`, `decode` only": side - shared,
    }.items():
        (row,) = re.findall(rf"^\| {where} \| (.*) \|$", text, re.MULTILINE)
        named = set(re.findall(r"`(\w+)`", row)) | (explained if "keys below" in row else set())
        violations += [f"docs/experiments.md: {where}: {key}" for key in sorted(named ^ keys)]
    return violations
