"""The tools of the planners for many users; `flashrt.mcp_server.tools` has all others."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictInt

from flashrt.mcp_server.workspace import Workspace


class PlannerTools:
    """Their functions, bound to the workspace of the class that inherits them."""

    workspace: Workspace

    def plan_elastic(
        self,
        profile: Annotated[str, Field(description="Elastic profile document, or shipped:public, shipped:video")],
        workload: Annotated[str, Field(description="Elastic workload document, or shipped:workload-half, -bursts")],
        devices: Annotated[StrictInt | str | list[str], Field(description="How many, or a lease id or names")],
        policy: Annotated[str | None, Field(description="Only this one, such as elastic, ddit, static_2")] = None,
        island_size: Annotated[
            int | None, Field(ge=1, description="Devices that fast links join; default: the lease's, else all")
        ] = None,
    ) -> dict[str, Any]:
        """Refuse wrong arguments before a job is started."""
        from flashrt.mcp_server.elastic import read_elastic_question

        read_elastic_question(self.workspace, {
            "profile": profile, "workload": workload, "devices": devices, "policy": policy, "island_size": island_size,
        })  # fmt: skip
        return {}
