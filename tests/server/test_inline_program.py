"""A program that was never a file: what is planned and seeded for it runs all the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.connection import connected

pytestmark = pytest.mark.anyio


async def test_a_variant_of_an_inline_program_runs_as_it_was_seeded(workspace: Path) -> None:
    async with connected(workspace) as session:
        document = (await session.call("ir_show", program="program.yaml", view="json"))["document"]
        program = (await session.call("ir_build", program={**document, "name": "other"}))["program"]
        await session.call("analyze", program=program, profile="profile.yaml", seed_queue=True)
        found = await session.call("variant_next")
        checked = await session.finish(
            "equivalence_check", baseline="reference.py:serve", candidate=f"{found['folder']}/deployment.yaml",
            inputs="inputs.py:batches", count=3,
        )  # fmt: skip
        assert checked["equivalent"] is True
