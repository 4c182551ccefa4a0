# SPDX-License-Identifier: Apache-2.0
"""The panels of the dashboard, and what they ask Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["ROWS", "Panel", "Query"]

_CHOSEN = 'model_name=~"$model_name",instance=~"$instance"'
_WINDOW = "[$__rate_interval]"


def rate(name: str, by: str = "") -> str:
    """How much a counter of ours grows in a second, all servers together."""
    return f"sum{f' by ({by}) ' if by else ''}(rate(nemo:{name}{{{_CHOSEN}}}{_WINDOW}))"


def total(name: str) -> str:
    """A gauge of ours, all servers together."""
    return f"sum(nemo:{name}{{{_CHOSEN}}})"


def ratio(above: str, below: str) -> str:
    """One counter by another, over the same window."""
    return f"{rate(above)} / {rate(below)}"


def quantiles(name: str) -> tuple[Query, ...]:
    """Median and tails of a histogram of ours, all servers together."""
    buckets = rate(f"{name}_bucket", "le")
    return tuple(Query(f"histogram_quantile({q / 100:g}, {buckets})", f"p{q}") for q in (50, 95, 99))


@dataclass(frozen=True)
class Query:
    """A PromQL expression, and what its series are called."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """A panel.

    Attributes:
        title: Its title.
        about: What it shows, for those who wonder.
        unit: Grafana's name of the unit.
        queries: What it shows.
        width: Columns it takes.
        kind: As lines, as the latest number, or as the names of the series there are.
        top: Upper end of the axis, if that is known.
    """

    title: str
    about: str
    unit: str
    queries: Sequence[Query]
    width: int = 8
    kind: Literal["timeseries", "number", "names"] = "timeseries"
    top: float | None = None

    @property
    def height(self) -> int:
        """Rows of the grid it takes."""
        return 8 if self.kind == "timeseries" else 4


ROWS: dict[str, tuple[Panel, ...]] = {
    "Traffic": (
        Panel(
            "Served",
            "Version, target and speculator of each server.",
            "none",
            [Query(f"nemo:build_info{{{_CHOSEN}}}", "{{instance}}: {{version}}, {{target}}, {{speculator}}")],
            width=12,
            kind="names",
        ),
        Panel(
            "Running",
            "Requests that have a slot.",
            "none",
            [Query(total("num_requests_running"), "")],
            4,
            "number",
        ),
        Panel(
            "Waiting",
            "Requests without a slot.",
            "none",
            [Query(total("num_requests_waiting"), "")],
            4,
            "number",
        ),
        Panel(
            "Tokens",
            "Generated in a second.",
            "none",
            [Query(rate("generation_tokens_total"), "")],
            4,
            "number",
        ),
        Panel(
            "Requests",
            "Requests that ended in a second, by how. `abort`: the client went away.",
            "reqps",
            [Query(rate("request_success_total", "finished_reason"), "{{finished_reason}}")],
        ),
        Panel(
            "Tokens",
            "Tokens in a second: of prompts, how many of these came from the prefix cache, and generated.",
            "none",
            [
                Query(rate("prompt_tokens_total"), "prompt"),
                Query(rate("prompt_tokens_cached_total"), "prompt, cached"),
                Query(rate("generation_tokens_total"), "generated"),
            ],
        ),
        Panel(
            "Errors",
            "HTTP requests answered with an error in a second, by status, and requests whose client went away.",
            "reqps",
            [
                Query(rate("request_errors_total", "status"), "{{status}}"),
                Query(rate("request_aborted_total"), "client went away"),
            ],
        ),
        Panel("Length of prompts", "In tokens.", "none", quantiles("request_prompt_tokens"), 12),
        Panel("Length of answers", "In tokens.", "none", quantiles("request_generation_tokens"), 12),
    ),
    "Latency": (
        Panel("Time to first token", "From the request on.", "s", quantiles("time_to_first_token_seconds")),
        Panel(
            "Time between arrivals",
            "Tokens that a step accepts together arrive together.",
            "s",
            quantiles("inter_token_latency_seconds"),
        ),
        Panel(
            "Time of a token",
            "On average of a request, after its first.",
            "s",
            quantiles("request_time_per_output_token_seconds"),
        ),
        Panel("Time of a request", "From beginning to end.", "s", quantiles("e2e_request_latency_seconds")),
        Panel("Time in the queue", "Until there is a slot.", "s", quantiles("request_queue_time_seconds")),
        Panel(
            "Where time goes",
            "Seconds that requests spend waiting, in their prompts and generating, in a second.",
            "s",
            [
                Query(rate("request_queue_time_seconds_sum"), "queue"),
                Query(rate("request_prefill_time_seconds_sum"), "prompt"),
                Query(rate("request_decode_time_seconds_sum"), "answer"),
            ],
        ),
    ),
    "Engine": (
        Panel(
            "Slots",
            "Sequences that run, those that can, and requests that wait.",
            "none",
            [
                Query(total("num_slots_used"), "used"),
                Query(total("num_slots"), "all"),
                Query(total("num_requests_waiting"), "waiting"),
            ],
        ),
        Panel(
            "State in use",
            "Of the memory for it, where that is the limit; else of the positions of all slots.",
            "percentunit",
            [Query(f"nemo:kv_cache_usage_perc{{{_CHOSEN}}}", "{{instance}}")],
            top=1,
        ),
        Panel(
            "State in memory",
            "Bytes in use, and what there is; both 0 where memory is not the limit.",
            "bytes",
            [
                Query(total("state_memory_used_bytes"), "used"),
                Query(total("state_memory_limit_bytes"), "all"),
            ],
        ),
        Panel(
            "Steps",
            "Steps in a second, and tokens that one gives on average to all sequences together.",
            "none",
            [
                Query(rate("engine_steps_total"), "steps in a second"),
                Query(ratio("generation_tokens_total", "engine_steps_total"), "tokens of a step"),
            ],
        ),
        Panel(
            "Preemptions and failures",
            "In a second: requests that lost their slot, and requests that ended with a step that failed.",
            "none",
            [
                Query(rate("num_preemptions_total"), "preemptions"),
                Query(rate("engine_failures_total"), "failures"),
            ],
        ),
        Panel(
            "Process",
            "Resident memory of each server.",
            "bytes",
            [
                Query(
                    "process_resident_memory_bytes * on (instance) group by (instance) "
                    f"(nemo:build_info{{{_CHOSEN}}})",
                    "{{instance}}",
                )
            ],
        ),
    ),
    "Speculation": (
        Panel(
            "Acceptance length",
            "Tokens that a verification gives on average, the one without a draft included.",
            "none",
            [
                Query(
                    f"1 + {ratio('spec_decode_num_accepted_tokens_total', 'spec_decode_num_drafts_total')}",
                    "now",
                ),
                Query(
                    f"avg by (speculator) (nemo:spec_decode_acceptance_length{{{_CHOSEN}}})",
                    "{{speculator}}, ever",
                ),
            ],
            6,
        ),
        Panel(
            "Drafts accepted",
            "Of those that were judged.",
            "percentunit",
            [
                Query(
                    ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
                    "accepted",
                )
            ],
            6,
            top=1,
        ),
        Panel(
            "Accepted by place",
            "How often the drafts up to a place were accepted, of the verifications that had drafts.",
            "percentunit",
            [
                Query(
                    f"{rate('spec_decode_num_accepted_tokens_per_pos_total', 'position')} / ignoring (position) "
                    f"group_left () {rate('spec_decode_num_drafts_total')}",
                    "{{position}}",
                )
            ],
            6,
            top=1,
        ),
        Panel(
            "Drafts",
            "In a second: judged, and accepted.",
            "none",
            [
                Query(rate("spec_decode_num_draft_tokens_total"), "judged"),
                Query(rate("spec_decode_num_accepted_tokens_total"), "accepted"),
            ],
            6,
        ),
    ),
    "Prefix cache": (
        Panel(
            "Hits",
            "Tokens of prompts that came from it, and prompts of which it had a part, of those looked up.",
            "percentunit",
            [
                Query(ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), "tokens"),
                Query(ratio("prefix_cache_lookup_hits_total", "prefix_cache_lookups_total"), "prompts"),
            ],
            top=1,
        ),
        Panel(
            "What it holds",
            "Bytes of each server's cache.",
            "bytes",
            [Query(f"nemo:prefix_cache_bytes{{{_CHOSEN}}}", "{{instance}}")],
        ),
        Panel(
            "What it gives up",
            "In a second: blocks and snapshots for which others made it give up room, and times it had none.",
            "none",
            [
                Query(rate("prefix_cache_evicted_blocks_total"), "blocks"),
                Query(rate("prefix_cache_evicted_snapshots_total"), "snapshots"),
                Query(rate("prefix_cache_refusals_total"), "refused"),
            ],
        ),
    ),
}
"""Panels from left to right and top to bottom, by the row they are under."""
