"""Reading documents: JSON or YAML in, a validated frozen model and a content-hash id out; every finding at once."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from flashrt.errors import Finding, InputError, input_error, listed, nearest

Model = TypeVar("Model", bound=BaseModel)

MAX_BYTES = 4_000_000
MAX_NODES = 200_000
MAX_DEPTH = 200
KINDS = (
    "program", "profile", "deployment", "audit", "model", "workload", "serving-profile", "serving-operations",
    "serving-deployment", "elastic-profile", "elastic-workload", "demo",
)  # fmt: skip
"""Kinds of documents, as a schema names them: ``flashrt/KIND@1``."""

_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 3
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


class _StrictLoader(yaml.SafeLoader):
    """YAML without objects, and without silently dropping the first of two equal keys."""


def _mapping_without_repeats(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool) and key is not None:
            key = str(key)
        if key in seen:
            line = key_node.start_mark.line + 1
            raise yaml.constructor.ConstructorError(None, None, f"key '{key}' appears twice (line {line})", None)
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


_StrictLoader.add_constructor("tag:yaml.org,2002:map", _mapping_without_repeats)


def _refuse_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key '{key}' appears twice")
        seen[key] = value
    return seen


def read_document(path: Path, *, retry: str = "correct the file and call again") -> dict[str, Any]:
    """Read one JSON or YAML mapping.

    Raises
    ------
    InputError
        The file is absent, a folder, not text, too large, does not parse, repeats a key, or is not one mapping.
    """
    where = f"document '{path.name}'"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode()
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise input_error(
                where, f"an existing folder '{path.parent.name}'", "no such folder",
                f"correct the path or make the folder; {retry}", rule="no-such-folder",
            ) from None  # fmt: skip
        siblings = _documents_in(path.parent)
        raise input_error(
            where, "a readable file", "no such file", f"documents there: {listed(siblings)}; {retry}",
            rule="no-such-file", valid=siblings, name=path.name,
        ) from None  # fmt: skip
    except IsADirectoryError:
        raise input_error(
            where, "a file", "a folder", f"name one of the documents in it: {listed(_documents_in(path))}; {retry}",
            rule="is-a-folder",
        ) from None  # fmt: skip
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError) and len(content) > MAX_BYTES:
            raise _too_large(where, retry) from None
        raise input_error(where, "a readable UTF-8 file", str(error), retry, rule="unreadable") from None
    if len(content) > MAX_BYTES:
        raise _too_large(where, retry)
    try:
        value = _parse(text, where, retry, is_json=path.suffix == ".json")
    except (RecursionError, MemoryError):
        raise _too_deep(where, retry) from None
    except (ValueError, yaml.YAMLError) as error:
        detail = " ".join(str(error).split())
        raise input_error(where, "one JSON or YAML document", detail, retry, rule="does-not-parse") from None
    if not isinstance(value, dict):
        raise input_error(where, "a mapping at the top", type(value).__name__, retry, rule="not-a-mapping")
    return value


def _documents_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*") if p.suffix in {".yaml", ".yml", ".json"} and p.is_file())


def _parse(text: str, where: str, retry: str, *, is_json: bool) -> Any:
    """Return the document's value; YAML is measured before its aliases are followed."""
    if is_json:
        value = json.loads(text, object_pairs_hook=_refuse_repeats)
        _check_size(value, where, retry)
        return value
    loader = _StrictLoader(text)
    try:
        node = loader.get_single_node()
        _check_size(node, where, retry)
        return loader.construct_document(node) if node is not None else None
    finally:
        loader.dispose()


def _parts(value: Any) -> Iterable[Any]:
    """Return what a value, or a node of YAML, holds."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, yaml.MappingNode):
        return (part for pair in value.value for part in pair)
    if isinstance(value, yaml.SequenceNode):
        return list(value.value)
    return value if isinstance(value, list) else ()


def _check_size(value: Any, where: str, retry: str) -> None:
    """Refuse what nests too deep or, with every alias written out, holds too much; stops as soon as it is known."""
    pending = [iter((value,))]
    count = 0
    while pending:
        part = next(pending[-1], pending)
        if part is pending:
            pending.pop()
            continue
        count += 1
        if count > MAX_NODES:
            raise input_error(
                where, f"at most {MAX_NODES} values, aliases written out", "more",
                f"split the document or use fewer aliases; {retry}", rule="too-many-values",
            )  # fmt: skip
        if len(pending) > MAX_DEPTH:
            raise _too_deep(where, retry)
        pending.append(iter(_parts(part)))


def _too_large(where: str, retry: str) -> InputError:
    return input_error(where, f"at most {MAX_BYTES} bytes", "more", f"make it shorter; {retry}", rule="too-large")


def _too_deep(where: str, retry: str) -> InputError:
    return input_error(
        where, f"at most {MAX_DEPTH} levels of nesting", "more", f"nest less deep; {retry}", rule="too-deep"
    )


def shown(value: Any) -> str:
    """Return `value` as messages show it: on one line, of bounded length, whatever it holds."""
    try:
        text = _BRIEF.repr(value)
    except ValueError:
        # Python refuses to print integers of thousands of digits.
        text = f"a large {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "…"


def _place(location: Sequence[int | str], document: Mapping[str, Any], noun: str) -> str:
    """Turn a pydantic location into the reader's words: ``graph 'app', edge 'a -> b', key 'mode'``."""
    nouns = {"graphs": "graph", "nodes": "node", "states": "state", "inputs": "input", "outputs": "output"}
    parts: list[str] = []
    value: Any = document
    steps = [step for step in location if step != "[key]"]
    index = 0
    while index < len(steps):
        step = steps[index]
        following = steps[index + 1] if index + 1 < len(steps) else None
        if step in nouns and isinstance(following, str):
            parts.append(f"{nouns[str(step)]} '{following}'")
            value = _child(_child(value, step), following)
            index += 2
            continue
        if step == "edges" and isinstance(following, int):
            value = _child(_child(value, step), following)
            ends = (value.get("from", "?"), value.get("to", "?")) if isinstance(value, Mapping) else ("?", "?")
            parts.append(f"edge {following} '{ends[0]} -> {ends[1]}'")
            index += 2
            continue
        parts.append(f"key '{step}'" if isinstance(step, str) else f"item {step}")
        value = _child(value, step)
        index += 1
    return ", ".join([noun, *parts])


def _child(value: Any, step: int | str) -> Any:
    try:
        return value[step]
    except (KeyError, IndexError, TypeError):
        return None


def _fields(model: type[BaseModel], location: Sequence[int | str]) -> dict[str, Any]:
    """Return the keys allowed at the parent of `location`, each with its schema."""
    current: Any = model.model_json_schema(by_alias=True)
    definitions = current.get("$defs", {})
    for step in location[:-1]:
        current = _resolve(current, definitions)
        if isinstance(step, int):
            current = current.get("items", {})
        elif step in current.get("properties", {}):
            current = current["properties"][step]
        else:
            extra = current.get("additionalProperties", {})
            current = extra if isinstance(extra, dict) else {}
    properties: dict[str, Any] = _resolve(current, definitions).get("properties", {})
    return properties


def _resolve(schema: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(schema, dict):
        return {}
    for option in schema.get("anyOf", []):
        if "$ref" in option or "properties" in option or "additionalProperties" in option:
            return _resolve(option, definitions)
    if "$ref" in schema:
        return _resolve(definitions[schema["$ref"].rsplit("/", 1)[-1]], definitions)
    return schema


def expectation(item: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what one of pydantic's errors expected, in FlashRT's words, and the nearest of the names it lists."""
    if item["type"] == "literal_error":
        names = re.findall(r"'([^']*)'", item["ctx"]["expected"])
        if names:
            return f"one of {listed(names, 30)}", nearest(shown(item.get("input")).strip("'"), names)
    message = str(item["msg"]).removeprefix("Input should be ").removeprefix("Value error, ")
    # Pydantic says "a valid integer", and then how it failed to read one.
    found = re.fullmatch(r"a valid (\w+)(?: or instance of \w+|, .*)?", message)
    if found:
        message = "a mapping" if found[1] == "dictionary" else _article(found[1])
    return message, None


def check_kind(schema: str, document: Mapping[str, Any], *, noun: str, retry: str) -> None:
    """Refuse a document whose own `schema` says that it is of another kind than `schema`.

    All that it holds would be unknown then, and none of it wrong.

    Raises
    ------
    InputError
        With one finding, which names both kinds.
    """
    said = document.get("schema")
    wanted, got = _kind(schema), _kind(said)
    if wanted is not None and got is not None and got != wanted:
        raise input_error(
            f"{noun}, key 'schema'", f"{_article(wanted)} ('{schema}')", f"{_article(got)} ({shown(said)})",
            f"name {_article(wanted)} in its place, and this {got} where one is asked for; {retry}",
            rule="wrong-schema",
        )  # fmt: skip


def _kind(schema: Any) -> str | None:
    """Return the kind of document that a schema names: ``serving profile`` of ``flashrt/serving-profile@1``."""
    found = re.fullmatch(r"flashrt/([a-z-]+)@\d+", schema) if isinstance(schema, str) else None
    return found[1].replace("-", " ") if found and found[1] in KINDS else None


def _article(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def validate(model: type[Model], document: Mapping[str, Any], *, noun: str, retry: str) -> Model:
    """Validate `document` against `model`.

    Parameters
    ----------
    noun
        How messages call the document: ``program 'worldplay'``.
    retry
        The call to make once it is corrected: ``correct it and call ir_build again``.

    Raises
    ------
    InputError
        With one finding for each thing that is wrong; with one alone where the document is of another kind.
    """
    field = model.model_fields.get("schema_")
    if field is not None:
        check_kind(str(field.default), document, noun=noun, retry=retry)
    try:
        return model.model_validate(document)
    except ValidationError as error:
        findings = []
        for item in error.errors(include_url=False):
            where = _place(item["loc"], document, noun)
            got = shown(item.get("input"))
            if item["type"] == "missing":
                key = item["loc"][-1]
                expected, got, rule = f"key '{key}'", "nothing", f"missing-{key}"
                names = _fields(model, item["loc"]).get(str(key), {}).get("enum")
                if names:
                    expected += f": one of {listed(names, 30)} (there is no default)"
                findings.append(Finding(where, expected, got, f"say '{key}'; {retry}", rule=rule))
            elif item["type"] == "extra_forbidden":
                key = str(item["loc"][-1])
                valid = list(_fields(model, item["loc"]))
                findings.append(
                    Finding(where, f"one of {listed(valid)}", f"unknown key '{key}'", f"rename or remove it; {retry}",
                            rule="unknown-key", nearest=nearest(key, valid))
                )  # fmt: skip
            else:
                expected, near = expectation(item)
                findings.append(Finding(where, expected, got, f"change it; {retry}", rule=item["type"], nearest=near))
        raise InputError(_once(findings)) from None


def _once(findings: Sequence[Finding]) -> list[Finding]:
    return list(dict.fromkeys(findings))


def dump(model: BaseModel) -> dict[str, Any]:
    """Return the document of a model, as it would be written: aliases kept, defaults left out."""
    document = model.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    schema = getattr(model, "schema_", None)
    return {"schema": schema, **document} if schema else document
