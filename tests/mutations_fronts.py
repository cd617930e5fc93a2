"""Bugs to plant in what starts a server, keeps it alive and ends it."""

from __future__ import annotations

from tests.mutation import Mutation

SUPERVISOR = "tests/serve/test_supervisor.py"
PLAN = "tests/specs/test_server_plan.py"
PORTS = "tests/serve/test_ports.py"
LISTENER = "tests/serve/test_listener.py"
COMMAND = "tests/serve/test_serve_command.py"
LINES = "tests/actors/test_lines.py"

FRONTS = (
    Mutation(
        "losses of a steady part add up",
        "rayk/serve/supervisor.py",
        "losses = 1 if time.monotonic() - began > STEADY_S else losses + 1",
        "losses = losses + 1",
        f"{SUPERVISOR}::test_losses_of_a_part_that_was_steady_do_not_add_up",
    ),
    Mutation(
        "a first start that fails is tried for ever",
        "rayk/serve/supervisor.py",
        "                if not losses:\n                    raise\n",
        "",
        f"{SUPERVISOR}::test_a_first_start_that_fails_ends_it",
    ),
    Mutation(
        "nothing is ever given up",
        "rayk/serve/supervisor.py",
        "if losses >= MAX_LOSSES:",
        "if losses > 1 << 20:",
        f"{SUPERVISOR}::test_what_is_lost_again_and_again_is_given_up",
    ),
    Mutation(
        "readiness is told at the end, too",
        "rayk/serve/supervisor.py",
        "if ready in done and stop not in done:",
        "if ready in done or stop in done:",
        f"{SUPERVISOR}::test_a_stop_before_the_start_is_over_ends_it_quietly",
    ),
    Mutation(
        "a part that hangs at its end keeps the others",
        "rayk/serve/supervisor.py",
        "async with asyncio.timeout(timeout_s):",
        "async with asyncio.timeout(None):",
        f"{SUPERVISOR}::test_every_part_is_stopped_whatever_becomes_of_others",
    ),
    Mutation(
        "a port that lingers is refused",
        "rayk/serve/ports.py",
        "found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)",
        "found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)",
        f"{PORTS}::test_a_free_port_is_given_back",
    ),
    Mutation(
        "heads that come whole may be of any size",
        "rayk/serve/listener.py",
        "if self._num_parsed > self.max_head_bytes:",
        "if self._num_parsed > 1 << 30:",
        f"{LISTENER}::test_a_head_has_a_largest_size",
    ),
    Mutation(
        "heads that never end may be of any size",
        "rayk/serve/listener.py",
        "if self._num_fed > self.max_head_bytes:",
        "if self._num_fed > 1 << 30:",
        f"{LISTENER}::test_what_never_becomes_a_head_is_not_kept",
    ),
    Mutation(
        "bodies count as heads",
        "rayk/serve/listener.py",
        '        """A part of it."""\n        self._num_fed = 0\n',
        '        """A part of it."""\n',
        f"{LISTENER}::test_long_bodies_and_many_requests_are_no_long_heads",
    ),
    Mutation(
        "a connection that is used again may be slow",
        "rayk/serve/listener.py",
        "self._timer is None and (self._in_head or not self._is_answering)",
        "False",
        f"{LISTENER}::test_a_head_that_does_not_come_is_not_waited_for",
    ),
    Mutation(
        "a process that stands still is well until it is ended",
        "rayk/actors/members.py",
        'if self.state == "ready" and silent_s > SILENT_S:',
        'if self.state == "ready" and silent_s > patience_s:',
        "tests/actors/test_members.py::test_silence_and_standing_still_are_told_apart",
    ),
    Mutation(
        "pools have no room for what is handed over",
        "rayk/specs/server_plan.py",
        "wanted = 2 * each * engine.max_seqs + 1",
        "wanted = each * engine.max_seqs + 1",
        f"{PLAN}::test_pools_hold_every_row_at_its_longest_or_what_memory_allows",
        needs_fixtures=True,
    ),
    Mutation(
        "blocks that somebody gave are counted again",
        "rayk/specs/server_plan.py",
        'if any(text.startswith(f"{key}=") for text in overrides for key in POOL_KEYS):',
        "if not overrides:",
        f"{PLAN}::test_settings_of_engines",
        needs_fixtures=True,
    ),
    Mutation(
        "every engine has the size of the first",
        "rayk/specs/server_plan.py",
        "return cells[min(i, len(cells) - 1)]",
        "return cells[0]",
        f"{PLAN}::test_each_engine_of_a_role_may_have_a_size_of_its_own",
        needs_fixtures=True,
    ),
    Mutation(
        "a list is taken for an axis of one value",
        "rayk/specs/server_plan.py",
        "if loaded.spec.matrix:",
        "if len(loaded.spec.matrix) > 1:",
        f"{COMMAND}::test_bad_options_are_refused",
        needs_fixtures=True,
    ),
    Mutation(
        "settings of decode engines are dropped in silence",
        "rayk/specs/server_plan.py",
        'if text.startswith(("decode.", "transfer."))]',
        'if text.startswith("nothing.")]',
        f"{COMMAND}::test_bad_options_are_refused",
        needs_fixtures=True,
    ),
    Mutation(
        "lines serve whoever connects",
        "rayk/actors/lines.py",
        "            if is_known:\n",
        "            if True:\n",
        f"{LINES}::test_nothing_is_unpickled_for_who_does_not_know_the_secret",
    ),
    Mutation(
        "lines believe whoever listens",
        "rayk/actors/lines.py",
        'if not hmac.compare_digest(shown, _proof(secret, b"service", nonces)):',
        "if not shown:",
        f"{LINES}::test_who_listens_where_a_service_was_learns_no_secret_and_has_nothing_unpickled",
    ),
    Mutation(
        "a caller may show what the service showed",
        "rayk/actors/lines.py",
        'hmac.digest(secret, whose + nonces, "sha256")',
        'hmac.digest(secret, nonces, "sha256")',
        f"{LINES}::test_nothing_is_unpickled_for_who_does_not_know_the_secret",
    ),
    Mutation(
        "a call that cannot be told of is not answered",
        "rayk/actors/lines.py",
        "            last = _last_frame(number, method, failure)\n",
        "            return\n",
        f"{LINES}::test_whatever_cannot_be_told_ends_the_call_all_the_same",
    ),
    Mutation(
        "what a lost caller asked for goes on",
        "rayk/actors/lines.py",
        "            for call in under_way.values():\n                call.cancel()\n",
        "",
        f"{LINES}::test_who_loses_the_caller_gives_up_what_it_asked_for",
    ),
    Mutation(
        "a stream that is left early goes on at the service",
        "rayk/actors/lines.py",
        "wire.write(_frame((number, None, (), {})))",
        "pass",
        f"{LINES}::test_a_stream_that_is_left_early_is_closed_at_the_service",
    ),
    Mutation(
        "who waits on a lost line waits for ever",
        "rayk/actors/lines.py",
        "                answers.put_nowait(None)\n",
        "                pass\n",
        f"{LINES}::test_a_killed_process_is_noticed_at_once",
    ),
    Mutation(
        "an item that ends a stream is lost",
        "rayk/actors/lines.py",
        "if item is not None or not is_last:",
        "if not is_last:",
        f"{LINES}::test_a_stream_may_end_with_an_item",
    ),
    Mutation(
        "a funnel misses what comes before it waits",
        "rayk/actors/lines.py",
        "            if not self._items:  # an item that came before the line above woke nobody\n",
        "            if True:\n",
        f"{LINES}::test_a_funnel_that_is_filled_while_it_goes_to_sleep_wakes",
    ),
)
