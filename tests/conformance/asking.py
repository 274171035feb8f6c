"""Tools and a prompt that answer with a question first, as of the revision 2026-07-28 (SEP-2322)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from mcp.server.mcpserver import Context
from mcp.server.mcpserver.prompts import Prompt
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp_types import (
    CallToolResult,
    CreateMessageRequest,
    CreateMessageRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    ListRootsRequest,
    ListRootsResult,
    SamplingMessage,
    TextContent,
)

from flashrt.mcp_server.server import FlashrtServer

Answers = dict[str, Any]
Question = ElicitRequest | CreateMessageRequest | ListRootsRequest


def form(message: str, name: str, kind: str = "string") -> ElicitRequest:
    """Return a question to the user with one field."""
    schema = {"type": "object", "properties": {name: {"type": kind}}, "required": [name]}
    return ElicitRequest(params=ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(text: str, max_tokens: int = 100) -> CreateMessageRequest:
    """Return a question to the client's model."""
    message = SamplingMessage(role="user", content=TextContent(type="text", text=text))
    return CreateMessageRequest(params=CreateMessageRequestParams(messages=[message], max_tokens=max_tokens))


NAME = form("What is your name?", "name")
ROUNDS = (
    ("step1", form("Step 1: What is your name?", "name")),
    ("step2", form("Step 2: What is your favorite color?", "color")),
)


def _result(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _answers(context: Context, questions: dict[str, Question]) -> Answers | None:
    """Return the answers to the questions, others left out; None where one is missing or not of its kind."""
    kinds = {"elicitation/create": ElicitResult, "roots/list": ListRootsResult}
    given = context.input_responses or {}
    found = {}
    for key, question in questions.items():
        answer = given.get(key)
        kind = kinds.get(question.method)
        if answer is None or (kind is not None and not isinstance(answer, kind)):
            return None
        if isinstance(answer, ElicitResult) and (answer.action != "accept" or not answer.content):
            return None
        found[key] = answer
    return found


def _field(answer: Any, name: str) -> Any:
    return (answer.content or {}).get(name)


def offer_asking(server: FlashrtServer) -> None:
    """Add what asks before it answers."""

    def asks(name: str, questions: dict[str, Question], answer: Callable[[Answers], str], state: str | None) -> None:
        async def tool(context: Context) -> CallToolResult | InputRequiredResult:
            found = _answers(context, questions)
            if found is None or context.request_state != state:
                return InputRequiredResult(input_requests=questions, request_state=state)
            return _result(answer(found))

        server.add_tool(tool, name=name, description="Asks, then answers", structured_output=False)

    asks(
        "test_input_required_result_elicitation", {"user_name": NAME},
        lambda found: f"Hello, {_field(found['user_name'], 'name')}!", None,
    )  # fmt: skip
    asks(
        "test_input_required_result_sampling", {"capital_question": sample("What is the capital of France?")},
        lambda found: getattr(found["capital_question"].content, "text", ""), None,
    )  # fmt: skip
    asks(
        "test_input_required_result_list_roots", {"client_roots": ListRootsRequest()},
        lambda found: ", ".join(str(root.uri) for root in found["client_roots"].roots), None,
    )  # fmt: skip
    confirm = {"confirm": form("Please confirm", "ok", "boolean")}
    asks("test_input_required_result_request_state", confirm, lambda found: "state-ok", "round 1")
    # The SDK seals the state, so one that was changed never comes here.
    asks("test_input_required_result_tampered_state", confirm, lambda found: "state-ok", "sealed")
    three: dict[str, Question] = {
        "user_name": NAME, "greeting": sample("Generate a greeting", 50), "client_roots": ListRootsRequest(),
    }  # fmt: skip
    asks("test_input_required_result_multiple_inputs", three, lambda found: f"{len(found)} answers", "three")
    asks("test_streaming_elicitation", {"user_name": NAME}, lambda found: "answered", None)

    @server.tool(name="test_input_required_result_multi_round", description="Asks twice", structured_output=False)
    async def multi_round(context: Context) -> CallToolResult | InputRequiredResult:
        state = json.loads(context.request_state) if context.request_state else {"round": 0}
        done = state["round"]
        if done:
            key, question = ROUNDS[done - 1]
            found = _answers(context, {key: question})
            if found is None:
                done -= 1
            elif done == len(ROUNDS):
                return _result(f"{state['name']}: {_field(found[key], 'color')}")
            else:
                state["name"] = _field(found[key], "name")
        key, question = ROUNDS[done]
        return InputRequiredResult(
            input_requests={key: question}, request_state=json.dumps({**state, "round": done + 1})
        )

    @server.tool(
        name="test_input_required_result_capabilities", description="Asks what the client can answer",
        structured_output=False,
    )  # fmt: skip
    async def capabilities(context: Context) -> CallToolResult | InputRequiredResult:
        declared = context.client_capabilities
        questions: dict[str, Question] = {}
        if declared is not None and declared.sampling is not None:
            questions["greeting"] = sample("Generate a greeting")
        if declared is not None and declared.elicitation is not None:
            questions["user_name"] = NAME
        found = _answers(context, questions)
        if questions and found is None:
            return InputRequiredResult(input_requests=questions)
        return _result(f"{len(questions)} answers")

    async def test_input_required_result_prompt(context: Context) -> list[UserMessage] | InputRequiredResult:
        """Asks, then returns a text."""
        questions: dict[str, Question] = {"user_context": form("What context should the prompt use?", "context")}
        found = _answers(context, questions)
        if found is None:
            return InputRequiredResult(input_requests=questions)
        return [UserMessage(f"Use this: {_field(found['user_context'], 'context')}")]

    server.add_prompt(Prompt.from_function(test_input_required_result_prompt))
