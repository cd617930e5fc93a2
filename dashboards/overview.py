"""The dashboards of people who use a deployment or run an experiment."""

from __future__ import annotations

from dashboards.panels import TURNS, Dashboard, Panel, latencies, stat
from dashboards.queries import quantile, rate, ratio, total, value

OVERVIEW = Dashboard(
    uid="rayk-overview",
    title="rayk / Overview",
    help="Is it up, how fast does it answer, and what waits.",
    panels=(
        stat(
            "KV mismatches",
            "Since Ray started: requests whose KV differed between the engines, or that ended in NaN.",
            total("rayk_nixl_failed_requests_total", reason="KV_MISMATCH")
            .or_zero(total("rayk_turns_total"))
            .named("requests"),
            total("rayk_not_finite_requests_total").or_zero(total("rayk_turns_total")).named("not finite"),
        ),
        stat(
            "Failed transfers",
            "Requests whose KV did not come, or came wrong, whatever became of them.",
            total("rayk_nixl_failed_requests_total").or_zero(total("rayk_turns_total")).named("requests"),
        ),
        stat(
            "Engines lost",
            "Engines that died or hung.",
            total("rayk_engines_lost_total").or_zero(total("rayk_turns_total")).named("engines"),
        ),
        stat("Running", "Requests in running batches.", value("rayk_num_requests_running").named("requests")),
        stat(
            "Waiting",
            "Requests that wait for an engine, and at engines.",
            value("rayk_waiting_room_requests").named("for an engine"),
            value("rayk_num_requests_waiting").named("at engines"),
        ),
        stat(
            "Tokens per second",
            "Tokens sampled by all engines.",
            rate("rayk_generation_tokens_total").named("tokens/s"),
        ),
        latencies("Time to first token", "rayk_ttft_seconds", "Arrival to first token."),
        latencies("Time per output token", "rayk_tpot_seconds", "A request's mean, the first token aside."),
        latencies("Gaps between tokens", "rayk_itl_seconds", "Every gap: what a reader notices."),
        latencies("Whole requests", "rayk_e2e_seconds", "Arrival to last token."),
        Panel(
            title="Where a request's time goes (p50)",
            help="The queue before an engine is asked, then its prefill, then its decode.",
            queries=(
                quantile(0.5, "rayk_request_queue_time_seconds", "model").named("queue {{model}}"),
                quantile(0.5, "rayk_request_prefill_time_seconds", "model").named("prefill {{model}}"),
                quantile(0.5, "rayk_request_decode_time_seconds", "model").named("decode {{model}}"),
            ),
            unit="s",
        ),
        Panel(
            title="Requests ended",
            help="By how they ended for whoever asked, also where an engine died. The budget is theirs.",
            queries=(
                rate("rayk_request_outcomes_total", "model", "finish_reason").named(
                    "{{model}} {{finish_reason}}"
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Requests in a server",
            help="Those that have a place on its engines, and those that wait for one (--max-queue).",
            queries=(
                value("rayk_placed_requests", "model").named("{{model}} placed"),
                value("rayk_waiting_room_requests", "model").named("{{model}} waiting"),
            ),
        ),
        Panel(
            title="Requests ended at engines",
            help="By engine and how they ended. `handed_over` ends at a prefill engine, to go on elsewhere.",
            queries=(
                rate("rayk_requests_total", "engine", "finish_reason").named(
                    "{{model}}/{{engine}} {{finish_reason}}"
                ),
            ),
            unit="reqps",
        ),
        Panel(
            title="Requests at engines",
            help="Running, waiting to be scheduled, and waiting for KV of another engine.",
            queries=(
                value("rayk_num_requests_running", "engine").named("{{model}}/{{engine}} running"),
                value("rayk_num_requests_waiting", "engine").named("{{model}}/{{engine}} waiting"),
                value("rayk_num_requests_receiving", "engine").named("{{model}}/{{engine}} receiving"),
            ),
        ),
        Panel(
            title="Tokens",
            help="Prompt tokens computed and tokens sampled, per second.",
            queries=(
                rate("rayk_prompt_tokens_total", "engine").named("{{model}}/{{engine}} prompt"),
                rate("rayk_generation_tokens_total", "engine").named("{{model}}/{{engine}} sampled"),
            ),
        ),
        Panel(
            title="Drafts accepted",
            help="Share of the proposed tokens that the model agreed to. Only of engines that draft.",
            queries=(
                ratio(
                    rate("rayk_spec_decode_num_accepted_tokens_total", "engine"),
                    rate("rayk_spec_decode_num_draft_tokens_total", "engine"),
                ).named("{{model}}/{{engine}}"),
            ),
            unit="percentunit",
        ),
        Panel(
            title="Tokens accepted per draft",
            help="A step with a draft gives so many tokens, and one more. Drafts that never help cost time.",
            queries=(
                ratio(
                    rate("rayk_spec_decode_num_accepted_tokens_total", "engine"),
                    rate("rayk_spec_decode_num_drafts_total", "engine"),
                ).named("{{model}}/{{engine}}"),
            ),
        ),
        Panel(
            title="Drafted tokens accepted, by position",
            help="Per second, by position in the draft: where the last ones are near 0, propose fewer.",
            queries=(
                rate("rayk_spec_decode_num_accepted_tokens_per_pos_total", "engine", "position").named(
                    "{{model}}/{{engine}} {{position}}"
                ),
            ),
            unit="ops",
        ),
        Panel(
            title="HTTP requests",
            help="Of a server's front, by path and status; 499: the client went before the answer. A stream "
            "that broke off has the status of its error.",
            queries=(rate("rayk_front_requests_total", "path", "status").named("{{path}} {{status}}"),),
            unit="reqps",
        ),
        Panel(
            title="HTTP requests under way",
            help="At a server's fronts.",
            queries=(value("rayk_front_running_requests").named("requests"),),
        ),
        Panel(
            title="HTTP latency",
            help="As a server's front sees it.",
            queries=(
                quantile(0.5, "rayk_front_ttft_seconds").named("first token p50"),
                quantile(0.95, "rayk_front_ttft_seconds").named("first token p95"),
                quantile(0.95, "rayk_front_e2e_seconds").named("last token p95"),
            ),
            unit="s",
        ),
        Panel(
            title="Engines that serve",
            help="1 where a server's engine takes requests, by the address of its front.",
            queries=(
                value("rayk_front_engine_ready", "engine", "role", how="max").named(
                    "{{instance}} {{engine}} {{role}}"
                ),
            ),
        ),
        Panel(
            title="Tokens of HTTP calls",
            help="Of ended calls: prompt tokens, those of them that prefix caches had, and output tokens.",
            queries=(
                rate("rayk_front_prompt_tokens_total").named("prompt"),
                rate("rayk_front_cached_tokens_total").named("cached"),
                rate("rayk_front_output_tokens_total").named("output"),
            ),
        ),
    ),
)

EXPERIMENT = Dashboard(
    uid="rayk-experiment",
    title="rayk / Experiment",
    help="How far a matrix is and what it finds.",
    panels=(
        stat("Cells planned", "Of each run.", value("rayk_cells_planned", "run").named("{{run}}"), width=6),
        stat(
            "Cells done",
            "Earlier sessions' included.",
            value("rayk_cells_done", "run").named("{{run}}"),
            width=6,
        ),
        stat(
            "Done",
            "Share of the cells.",
            ratio(value("rayk_cells_done", "run"), value("rayk_cells_planned", "run")).named("{{run}}"),
            unit="percentunit",
            width=6,
        ),
        stat("Cells per second", "Of each run.", rate("rayk_cells_total", "run").named("{{run}}"), width=6),
        Panel(
            title="Progress",
            help="Cells done, beside those planned.",
            queries=(
                value("rayk_cells_planned", "run").named("{{run}} planned"),
                value("rayk_cells_done", "run").named("{{run}} done"),
            ),
            width=12,
        ),
        Panel(
            title="Verdicts",
            help="Cells of each run by verdict.",
            queries=(total("rayk_cells_total", "run", "verdict").named("{{run}} {{verdict}}"),),
            is_stacked=True,
            width=12,
        ),
        Panel(
            title="Engines lost",
            help="That died or hung; some experiments plant that.",
            queries=(
                total("rayk_engines_lost_total", "engine", "role")
                .or_zero(TURNS, "engine")
                .named("{{model}}/{{engine}} {{role}}"),
            ),
            width=12,
        ),
        Panel(
            title="Engines meant to turn",
            help="1 where an engine is to be at work, 0 while it is formed. The next panel says if it is.",
            queries=(
                value("rayk_engine_up", "engine", "role", how="max").named("{{model}}/{{engine}} {{role}}"),
            ),
            width=12,
        ),
        Panel(
            title="Engines at work",
            help="Turns per second of the cell that runs.",
            queries=(TURNS.named("{{model}}/{{engine}}"),),
            unit="ops",
            width=12,
        ),
    ),
)
