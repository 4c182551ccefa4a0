# SPDX-License-Identifier: Apache-2.0
"""``nemo-build doctor``."""

from __future__ import annotations

import click

from nemo_build.cli._console import json_option, key_values, print_json, size


@click.command()
@json_option
def command(as_json: bool) -> None:
    """Show versions, CPU, GPUs, and what each backend can do here."""
    from nemo_build.engines.doctor import diagnose

    found = diagnose()
    if as_json:
        print_json(found.to_json())
        return
    key_values({name: version or "not installed" for name, version in found.versions.items()})
    click.echo()
    key_values(
        {
            "cpu": f"{found.cpu} ({', '.join(found.cpu_features) or 'features unknown'})",
            "threads": found.threads,
            "memory": size(found.memory),
            "gpus": "; ".join(found.gpus) or "none found",
            "build cache": found.cache,
            "weight packers": found.packers,
            "cpu kernels": found.kernels,
        }
    )
    click.echo()
    key_values({b.name: f"{'works' if b.works else 'no'}: {b.detail}" for b in found.backends})
