"""The application that the official conformance suite asks for, on the product's own server.

    python -m tests.conformance.fixture --http 127.0.0.1:8765 --workspace DIR

Names, arguments and texts are the suite's. What serves them is `FlashrtServer` with its table of tools, as
`flashrt serve --http` starts it; nothing of this is installed.
"""

from __future__ import annotations

import argparse
import base64
import struct
import sys
import zlib
from pathlib import Path
from typing import Annotated, Any, cast

import anyio
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.prompts import Prompt
from mcp.server.mcpserver.prompts.base import UserMessage
from mcp.server.mcpserver.resources import FunctionResource
from mcp.shared.exceptions import MCPError
from mcp_types import (
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    AudioContent,
    CallToolResult,
    ClientCapabilities,
    EmbeddedResource,
    EmptyResult,
    ImageContent,
    MissingRequiredClientCapabilityErrorData,
    SamplingCapability,
    SamplingMessage,
    SetLevelRequestParams,
    SubscribeRequestParams,
    TextContent,
    TextResourceContents,
    UnsubscribeRequestParams,
)
from pydantic import Field

from flashrt.mcp_server.http import http_options
from flashrt.mcp_server.server import FlashrtServer, run_server
from flashrt.mcp_server.workspace import Workspace
from tests.conformance.asking import offer_asking

PAUSE_S = 0.05
LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
# Keywords that a server must hand on as they are.
SCHEMA_2020_12: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef", "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}  # fmt: skip


def png() -> bytes:
    """Return an image of one red pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0)
    pixel = zlib.compress(b"\x00\xff\x00\x00")
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")


def wav() -> bytes:
    """Return ten samples of silence, 8 kHz, 8 bits."""
    samples = b"\x80" * 10
    head = b"WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, 8000, 8000, 1, 8) + b"data"
    body = head + struct.pack("<I", len(samples)) + samples
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _text(text: str) -> CallToolResult:
    return CallToolResult(content=[TextContent(type="text", text=text)])


def _image() -> ImageContent:
    return ImageContent(type="image", data=base64.b64encode(png()).decode(), mime_type="image/png")


def _embedded(uri: str, mime_type: str, text: str) -> EmbeddedResource:
    return EmbeddedResource(type="resource", resource=TextResourceContents(uri=uri, mime_type=mime_type, text=text))


def offer_contents(server: FlashrtServer) -> None:
    """Add the tools that return something of each kind."""

    @server.tool(description="Returns one text")
    def test_simple_text() -> CallToolResult:
        return _text("This is a simple text response for testing.")

    @server.tool(description="Returns one image")
    def test_image_content() -> CallToolResult:
        return CallToolResult(content=[_image()])

    @server.tool(description="Returns one sound")
    def test_audio_content() -> CallToolResult:
        sound = AudioContent(type="audio", data=base64.b64encode(wav()).decode(), mime_type="audio/wav")
        return CallToolResult(content=[sound])

    @server.tool(description="Returns a resource in the result")
    def test_embedded_resource() -> CallToolResult:
        found = _embedded("test://embedded-resource", "text/plain", "This is an embedded resource content.")
        return CallToolResult(content=[found])

    @server.tool(description="Returns a text, an image and a resource")
    def test_multiple_content_types() -> CallToolResult:
        data = _embedded("test://mixed-content-resource", "application/json", '{"test":"data","value":123}')
        words = TextContent(type="text", text="Multiple content types test:")
        return CallToolResult(content=[words, _image(), data])

    @server.tool(description="Fails")
    def test_error_handling() -> CallToolResult:
        raise ToolError("This tool intentionally returns an error for testing")

    @server.tool(description="Has a schema with the keywords of JSON Schema 2020-12")
    def json_schema_2020_12_tool(name: str = "") -> CallToolResult:
        return _text(f"hello {name}")

    tool = server._tool_manager.get_tool("json_schema_2020_12_tool")
    assert tool is not None
    tool.parameters = SCHEMA_2020_12

    @server.tool(description="Has an argument that HTTP clients repeat in a header")
    def test_custom_header(
        region: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Region"})],
    ) -> CallToolResult:
        return _text(f"region {region}")


def offer_notifying(server: FlashrtServer) -> None:
    """Add the tools that speak while they work: progress, log messages, changed lists, and a client asked directly."""
    level = {"least": "debug"}

    async def set_level(_: Any, params: SetLevelRequestParams) -> EmptyResult:
        level["least"] = params.level
        return EmptyResult()

    async def subscribed(_: Any, params: SubscribeRequestParams | UnsubscribeRequestParams) -> EmptyResult:
        return EmptyResult()

    # FlashRT itself sends no log messages and has no resources that change, so the product does not offer these.
    low = server._lowlevel_server
    low.add_request_handler("logging/setLevel", SetLevelRequestParams, set_level)
    low.add_request_handler("resources/subscribe", SubscribeRequestParams, subscribed)
    low.add_request_handler("resources/unsubscribe", UnsubscribeRequestParams, subscribed)

    async def say(context: Context, text: str) -> None:
        if LEVELS.index("info") >= LEVELS.index(level["least"]):
            await context.info(text)

    async def logging(context: Context) -> CallToolResult:
        for text in ("Tool execution started", "Tool processing data", "Tool execution completed"):
            await say(context, text)
            await anyio.sleep(PAUSE_S)
        return _text("logged")

    server.add_tool(logging, name="test_tool_with_logging", description="Sends three log messages")
    server.add_tool(logging, name="test_logging_tool", description="Sends three log messages")

    @server.tool(description="Reports progress")
    async def test_tool_with_progress(context: Context) -> CallToolResult:
        for done in (0, 50, 100):
            await context.report_progress(done, 100)
            await anyio.sleep(PAUSE_S)
        return _text("done")

    @server.tool(description="Ends the stream of its answer before it answers, where the server can resume one")
    async def test_reconnection(context: Context) -> CallToolResult:
        await context.close_sse_stream()
        await anyio.sleep(PAUSE_S)
        return _text("reconnected")

    @server.tool(description="Asks the client's model")
    async def test_sampling(prompt: str, context: Context) -> CallToolResult:
        asked = SamplingMessage(role="user", content=TextContent(type="text", text=prompt))
        found = await context.session.create_message([asked], max_tokens=100)
        return _text(f"LLM response: {getattr(found.content, 'text', '')}")

    async def ask(context: Context, message: str, schema: dict[str, Any], words: str) -> CallToolResult:
        found = await context.session.elicit_form(message, schema, cast(Any, context.request_context.request_id))
        return _text(f"{words}: action={found.action}, content={found.content}")

    @server.tool(description="Asks the user")
    async def test_elicitation(message: str, context: Context) -> CallToolResult:
        properties = {
            "username": {"type": "string", "description": "User's response"},
            "email": {"type": "string", "description": "User's email address"},
        }
        schema = {"type": "object", "properties": properties, "required": ["username", "email"]}
        return await ask(context, message, schema, "User response")

    @server.tool(description="Asks the user, with defaults")
    async def test_elicitation_sep1034_defaults(context: Context) -> CallToolResult:
        properties = {
            "name": {"type": "string", "default": "John Doe"},
            "age": {"type": "integer", "default": 30},
            "score": {"type": "number", "default": 95.5},
            "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
            "verified": {"type": "boolean", "default": True},
        }
        return await ask(context, "Who?", {"type": "object", "properties": properties}, "Elicitation completed")

    @server.tool(description="Asks the user to choose")
    async def test_elicitation_sep1330_enums(context: Context) -> CallToolResult:
        options = ["option1", "option2", "option3"]
        titled = [
            {"const": f"value{number}", "title": f"{word} Option"}
            for number, word in enumerate(("First", "Second", "Third"), 1)
        ]
        choices = [{**one, "title": one["title"].replace("Option", "Choice")} for one in titled]
        properties = {
            "untitledSingle": {"type": "string", "enum": options},
            "titledSingle": {"type": "string", "oneOf": titled},
            "legacyEnum": {
                "type": "string", "enum": ["opt1", "opt2", "opt3"],
                "enumNames": ["Option One", "Option Two", "Option Three"],
            },
            "untitledMulti": {"type": "array", "items": {"type": "string", "enum": options}},
            "titledMulti": {"type": "array", "items": {"anyOf": choices}},
        }  # fmt: skip
        return await ask(context, "Which?", {"type": "object", "properties": properties}, "Elicitation completed")

    @server.tool(description="Needs a client with a model to ask")
    async def test_missing_capability(context: Context) -> CallToolResult:
        declared = context.client_capabilities
        if declared is None or declared.sampling is None:
            needed = MissingRequiredClientCapabilityErrorData(
                required_capabilities=ClientCapabilities(sampling=SamplingCapability())
            )
            raise MCPError(
                code=MISSING_REQUIRED_CLIENT_CAPABILITY, message="the client did not declare 'sampling'",
                data=needed.model_dump(by_alias=True, mode="json", exclude_none=True),
            )  # fmt: skip
        return _text("declared")

    @server.tool(description="Changes the list of tools")
    async def test_trigger_tool_change(context: Context) -> CallToolResult:
        await context.notify_tools_changed()
        return _text("changed")

    @server.tool(description="Changes the list of prompts")
    async def test_trigger_prompt_change(context: Context) -> CallToolResult:
        await context.notify_prompts_changed()
        return _text("changed")


def offer_resources(server: FlashrtServer) -> None:
    """Add a resource of text, one of bytes, one that is watched, and a template."""
    for uri, kind, content in (
        ("test://static-text", "text/plain", "This is the content of the static text resource."),
        ("test://static-binary", "image/png", png()),
        ("test://watched-resource", "text/plain", "watched"),
    ):
        server.add_resource(
            FunctionResource(uri=uri, name=uri.partition("://")[2], mime_type=kind, fn=lambda content=content: content)
        )

    @server.resource("test://template/{id}/data", mime_type="application/json")
    def template(id: str) -> str:
        return f'{{"id":"{id}","templateTest":true,"data":"Data for ID: {id}"}}'


def offer_prompts(server: FlashrtServer) -> None:
    """Add a prompt of each kind."""

    def test_simple_prompt() -> list[UserMessage]:
        """One text."""
        return [UserMessage("This is a simple prompt for testing.")]

    def test_prompt_with_arguments(arg1: str, arg2: str) -> list[UserMessage]:
        """One text with two arguments."""
        return [UserMessage(f"Prompt with arguments: arg1='{arg1}', arg2='{arg2}'")]

    def test_prompt_with_embedded_resource(resourceUri: str) -> list[UserMessage]:
        """A resource and a text."""
        found = _embedded(resourceUri, "text/plain", "Embedded resource content for testing.")
        return [UserMessage(found), UserMessage("Please process the embedded resource above.")]

    def test_prompt_with_image() -> list[UserMessage]:
        """An image and a text."""
        return [UserMessage(_image()), UserMessage("Please analyze the image above.")]

    for function in (
        test_simple_prompt, test_prompt_with_arguments, test_prompt_with_embedded_resource, test_prompt_with_image,
    ):  # fmt: skip
        server.add_prompt(Prompt.from_function(function))


def main() -> int:
    """Serve until a signal comes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http", required=True, metavar="HOST:PORT")
    parser.add_argument("--workspace", type=Path, required=True)
    options = parser.parse_args()
    server = FlashrtServer(Workspace(options.workspace))
    for offer in (offer_contents, offer_notifying, offer_asking, offer_resources, offer_prompts):
        offer(server)
    return run_server(server, http_options(options.http))


if __name__ == "__main__":
    sys.exit(main())
