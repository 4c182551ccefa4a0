# SPDX-License-Identifier: Apache-2.0
"""Sections of docs/benchmarks.md: the server, and the masks of grammars."""

from __future__ import annotations

from typing import Any


def server_section(record: dict[str, Any]) -> str:
    """What the OpenAI-compatible server adds to a token, and how it bears clients that leave."""
    rows = [
        f"| {o['speculator']} | {o['streams']} | {o['engine_us_per_token']:.0f} | {o['server_us_per_token']:.0f} "
        f"| {o['server_cpu_us_per_token']:.0f} |"
        for o in record["overhead"]
    ]
    load = record["load"]
    before, after = load["before"], load["after"]
    return (
        "## The OpenAI-compatible server\n\n"
        f"{record['date']}, `{record['command']}` on {record['cores']} cores of an {record['cpu']}, over loopback, "
        "demo engine. Microseconds a token of streams at a time: the engine alone, and what the server adds.\n\n"
        "| drafts | streams | engine | server, time | server, processor |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
        + f"\n\n{load['clients']} clients of {load['slots']} slots for {load['seconds']:.0f} s, "
        f"{load['leaving']:.0%} of the answers left in the middle: {load['complete']} complete, {load['left']} left, "
        f"{load['error_count']} failed. Between arrivals of a stream {load['gap_ms']['p50']:.1f} ms (p50) and "
        f"{load['gap_ms']['p99']:.1f} ms (p99); first token after {load['first_ms']['p50']:.0f} ms (p50), as four "
        f"clients share a slot. Afterwards {after['slots_used']:.0f} slots were taken; memory {before['rss_mb']:.0f} "
        f"MB before and {after['rss_mb']:.0f} MB after, threads {before['threads']} and {after['threads']}, open files "
        f"{before['files']} and {after['files']}.\n"
    )


def masks_section(record: dict[str, Any]) -> str:
    """What masks of grammars cost, by library."""
    libraries = record["libraries"]
    names = list(libraries)
    rows = []
    for case in libraries[names[0]]["cases"]:
        found = [libraries[name]["cases"][case] for name in names]
        masks = [f"{f['mask_us']['median']:.0f} / {f['mask_us']['p99']:.0f}" for f in found]
        compiled = [f"{f['compile_ms']:.0f}" for f in found]
        rows.append(f"| {case} | {' | '.join(masks)} | {' | '.join(compiled)} |")
    about = "; ".join(
        f"{name} {x['version']} reads the vocabulary in {x['vocabulary_seconds']:.1f} s and takes "
        f"{x['library_and_vocabulary_bytes'] / 1e6:.0f} MB with it"
        for name, x in libraries.items()
    )
    heads = [*(f"mask, {name}" for name in names), *(f"compile, {name}" for name in names)]
    return (
        f"## Masks of grammars\n\n{record['date']}, `{record['command']}` on {record['cores']} cores of an "
        f"{record['cpu']}, a vocabulary of {record['vocabulary']:,} tokens: processor time of a mask in microseconds "
        f"(median / p99), and of compiling in milliseconds. {about}. nemo-build uses llguidance: it needs no PyTorch, "
        "and each mask is computed once for a place, whether drafts or the target ask.\n\n"
        f"| grammar | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}\n" + "\n".join(rows) + "\n"
    )
