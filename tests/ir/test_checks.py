"""Every rule of the table is broken once and reported with its place, and all findings come at once."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from flashrt.errors import InputError
from flashrt.ir import build, build_file, parse_program, read_document
from flashrt.ir.hashing import content_hash

from .documents import WORLD_OPS, edge, flat_graph, world


def findings_of(document: dict[str, Any], folder: Path | None = None) -> list[Any]:
    try:
        _, found = parse_program(document, folder)
    except InputError as error:
        return list(error.findings)
    return found


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """Return the world program with one value replaced (or removed, for Ellipsis)."""
    document = world()
    place: Any = document
    for step in path[:-1]:
        place = place[step]
    if to is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return document


APP = ("graphs", "app")
DENOISE = ("graphs", "denoise")

BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("missing-mode", changed(*APP, "edges", 0, "mode", to=...), "edge 0 'actions -> dit.actions'"),
    ("unknown-key", changed(*APP, "nodes", "vae", "opp", to="x"), "node 'vae'"),
    ("unknown-port", changed(*APP, "edges", 1, "to", to="vae.latent"), "vae.latent"),
    ("unknown-node", changed(*APP, "edges", 1, "to", to="vea.latents"), "edge 1"),
    ("unknown-graph", changed("entry", to="ap"), "entry"),
    ("unknown-graph", changed(*APP, "nodes", "dit", to={"graph": "denoize"}), "node 'dit'"),
    ("node-kind", changed(*APP, "nodes", "vae", "graph", to="denoise"), "node 'vae'"),
    ("graph-node-annotation", changed(*APP, "nodes", "dit", to={"graph": "denoise", "reads": ["rng"]}), "node 'dit'"),
    ("opaque-devices", changed(*APP, "nodes", "vae", to={"opaque": "decode"}), "node 'vae'"),
    ("op-devices", changed(*APP, "nodes", "vae", "devices", to=2), "node 'vae'"),
    ("bad-degree", changed(*APP, "nodes", "vae", "degrees", to=[0]), "node 'vae'"),
    ("recursive-graph", changed(*DENOISE, "nodes", "step", to={"graph": "denoise"}), "graph 'denoise'"),
    ("missing-chunks", changed(*APP, "edges", 1, "chunks", to=...), "edge 1"),
    ("blocking-chunks", changed(*APP, "edges", 0, "chunks", to=2), "edge 0"),
    ("lookahead", changed(*APP, "edges", 1, "lookahead", to=3), "edge 1"),
    ("unfed-port", changed(*APP, "edges", to=world()["graphs"]["app"]["edges"][1:]), "port 'actions'"),
    ("port-fed-twice", changed(*APP, "edges", to=[*world()["graphs"]["app"]["edges"], edge("actions", "dit.actions")]),
     "dit.actions"),
    ("initial-not-carried", changed(*DENOISE, "repeat", "carry", to={}), "input 'latents'"),
    ("two-first-values",
     changed(*APP, "edges", to=[*world()["graphs"]["app"]["edges"], edge("actions", "dit.latents")]), "'latents'"),
    ("unknown-port", changed(*DENOISE, "repeat", "carry", to={"latent": "latents"}), "carry"),
    ("carried-twice", changed(*DENOISE, "repeat", "carry", to={"latents": "latents", "other": "latents"}), "carry"),
    ("unknown-state", changed(*APP, "nodes", "vae", "reads", to=["vae.cach"]), "'reads'"),
    ("per-iteration-outside", changed(*APP, "nodes", "vae", "reads", to=["dit.kv"]), "dit.kv"),
    ("unused-state", changed("states", "spare", to={}), "state 'spare'"),
    ("bad-name", changed(*APP, "nodes", "a/b", to={"op": "x"}), "'a/b'"),
    ("dtype-mismatch", changed(*DENOISE, "inputs", "actions", to={"dtype": "int64"}), "edge 0"),
    ("shape-mismatch", changed(*DENOISE, "inputs", "actions", to={"shape": ["frames", 9]}), "edge 0"),
    ("no-outputs", changed(*APP, "outputs", to={}), "graph 'app'"),
    ("too-many-operations", changed(*DENOISE, "repeat", "times", to=10_000), "500 operations"),
    ("rate-not-played", changed(*DENOISE, "outputs", "latents", to={"rate_hz": 16}), "output 'latents'"),
    ("rate-not-played", changed(*APP, "inputs", "actions", "rate_hz", to=16), "input 'actions'"),
    ("unknown-dtype", changed(*APP, "inputs", "actions", "dtype", to="float31"), "graph 'app', input 'actions'"),
    ("unknown-dtype", changed(*APP, "nodes", "vae", "outputs", "frames", to={"dtype": "x"}), "node 'vae', output"),
    ("bad-axis", changed(*APP, "inputs", "actions", "shape", to=["frames", "a b"]), "axis 1"),
    ("bad-axis", changed(*DENOISE, "outputs", "latents", to={"shape": [-1]}), "output 'latents', key 'shape', axis 0"),
    ("wrong-schema", changed("schema", to="flashrt/program@2"), "schema"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "document", "where"), BROKEN, ids=[f"{n}-{row[0]}" for n, row in enumerate(BROKEN)])
def test_a_broken_rule_is_reported_with_its_place(rule: str, document: dict[str, Any], where: str) -> None:
    found = [finding for finding in findings_of(document) if finding.rule == rule]
    assert found, [str(finding) for finding in findings_of(document)]
    assert any(where in str(finding) for finding in found)
    assert all("call" in finding.fix for finding in found)


def test_the_world_program_has_no_findings() -> None:
    assert findings_of(world()) == []


def test_all_findings_come_at_once_even_beside_a_missing_mode() -> None:
    document = changed(*APP, "edges", 0, "mode", to=...)
    document["graphs"]["app"]["edges"][1]["to"] = "vae.latent"
    document["states"]["spare"] = {}
    rules = {finding.rule for finding in findings_of(document)}
    assert {"missing-mode", "unknown-port", "unused-state"} <= rules


def test_the_nearest_name_is_offered() -> None:
    found = next(f for f in findings_of(changed(*APP, "edges", 1, "to", to="vae.latent")) if f.rule == "unknown-port")
    assert found.nearest == "latents"


@pytest.mark.parametrize(
    ("dtype", "near"), [("float31", "float"), ("Float32", "float32"), ("torch.int64", "int64"), ("long", "int64")]
)
def test_an_element_type_that_no_value_has_gets_the_nearest_name(dtype: str, near: str) -> None:
    (found,) = [
        f for f in findings_of(changed(*APP, "outputs", "frames", to={"dtype": dtype})) if f.severity == "error"
    ]
    assert found.nearest is not None
    assert found.nearest.startswith(near)


def test_every_element_type_of_numpy_and_torch_is_one() -> None:
    import numpy as np
    import torch

    names = {str(np.dtype(kind)) for kind in np.sctypeDict.values()} | {"<U5", "|S3", ">i4", "datetime64[ns]"}
    names |= {str(np.dtype([("a", "f4")]))}
    names |= {str(kind).removeprefix("torch.") for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    names |= {"str", "bytes", "int", "float", "list", "dict"}
    for name in sorted(names):
        assert findings_of(changed(*APP, "outputs", "frames", to={"dtype": name})) == [], name


def test_a_cycle_is_named_node_by_node() -> None:
    document = flat_graph(
        {"a": {"op": "f"}, "b": {"op": "g"}},
        [edge("x", "a.x"), edge("a.y", "b.x"), edge("b.y", "a.z"), edge("b.w", "y")],
    )
    found = next(f for f in findings_of(document) if f.rule == "cycle")
    assert "a -> b -> a" in str(found)


def test_two_unordered_writers_are_a_race_that_names_both_repairs() -> None:
    document = flat_graph(
        {"a": {"op": "f", "writes": ["s"]}, "b": {"op": "g", "writes": ["s"]}, "join": {"op": "h"}},
        [edge("x", "a.x"), edge("x", "b.x"), edge("a.y", "join.p"), edge("b.y", "join.q"), edge("join.y", "y")],
        states={"s": {}},
    )
    found = next(f for f in findings_of(document) if f.rule == "race")
    text = str(found)
    assert "'s'" in text
    assert "'a'" in text
    assert "'b'" in text
    assert "add an edge" in text
    assert "per: iteration" in text


def test_ordered_writers_are_no_race() -> None:
    document = flat_graph(
        {"a": {"op": "f", "writes": ["s"]}, "b": {"op": "g", "writes": ["s"]}},
        [edge("x", "a.x"), edge("a.y", "b.x"), edge("b.y", "y")],
        states={"s": {}},
    )
    assert [f for f in findings_of(document) if f.rule == "race"] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2\n", "twice"),
        ("- 1\n", "mapping"),
        ("{", "parse"),
        ("a: !!python/object/apply:os.system ['true']\n", "parse"),
    ],
)
def test_files_that_are_no_document_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "program.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        build_file(path)
    assert expected in str(caught.value) or expected in caught.value.findings[0].rule.replace("-", " ")


def test_an_absent_file_names_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "program.yaml").write_text("{}")
    with pytest.raises(InputError, match=r"did you mean 'program.yaml'"):
        build_file(tmp_path / "progam.yaml")


def test_a_folder_and_an_absent_folder_are_not_called_absent_documents(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "program.yaml").write_text("{}")
    with pytest.raises(InputError, match=r"document 'app': expected a file, got a folder.*in it: 'program.yaml'"):
        read_document(tmp_path / "app")
    with pytest.raises(InputError, match=r"expected an existing folder 'apq', got no such folder"):
        read_document(tmp_path / "apq" / "program.yaml")


def test_a_document_of_another_kind_is_one_finding_that_names_both() -> None:
    (found,) = findings_of({"schema": "flashrt/deployment@1", "groups": {}, "place": {}})
    assert found.rule == "wrong-schema"
    assert found.message == "expected a program ('flashrt/program@1'), got a deployment ('flashrt/deployment@1')"
    assert "name a program in its place, and this deployment where one is asked for" in found.fix


@pytest.mark.parametrize(
    ("ops", "rule"),
    [
        ("opps.py:load", "no-such-file"),
        ("ops.py:lod", "no-such-function"),
        ("ops.py", "ops-reference"),
        ("../ops.py:load", "ops-outside"),
        ("broken.py:load", "syntax"),
    ],
)
def test_the_ops_file_is_checked(tmp_path: Path, ops: str, rule: str) -> None:
    (tmp_path / "ops.py").write_text(WORLD_OPS)
    (tmp_path / "broken.py").write_text("def load(:\n")
    assert rule in {finding.rule for finding in findings_of(world(ops=ops), tmp_path)}


def test_findings_of_every_phase_name_the_document_and_its_ops_file(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("def load(:\n")
    document = world()
    document["graphs"]["app"]["edges"][1]["to"] = "vae.latent"
    for phases in (1, 2):
        if phases == 2:
            del document["graphs"]["app"]["edges"][1]["mode"]
        with pytest.raises(InputError) as caught:
            build(document, tmp_path, "program 'app.yaml'")
        lines = str(caught.value).splitlines()
        assert len(lines) > 1
        assert all(line.startswith("program 'app.yaml', ") for line in lines), lines
        assert phases == 2 or "invalid syntax (ops.py, line 1)" in str(caught.value)


def test_the_id_changes_with_the_document_and_with_the_ops(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text(WORLD_OPS)
    first = build(world(), tmp_path).id
    assert build(copy.deepcopy(world()), tmp_path).id == first
    assert build(world(name="other"), tmp_path).id != first
    (tmp_path / "ops.py").write_text(WORLD_OPS + "\n# changed\n")
    assert build(world(), tmp_path).id != first


def read_rules(path: Path, text: str | bytes) -> list[str]:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(InputError) as caught:
        read_document(path)
    return [finding.rule for finding in caught.value.findings]


def test_documents_that_grow_without_end_are_refused_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
    merges = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}" for n in range(1, 40))]
    assert read_rules(tmp_path / "bomb.yaml", "\n".join(lines)) == ["too-many-values"]
    assert read_rules(tmp_path / "merges.yaml", "\n".join(merges)) == ["too-many-values"]
    assert read_rules(tmp_path / "loop.yaml", "a: &a [*a]") == ["too-deep"]
    assert read_rules(tmp_path / "deep.yaml", "a: " + "[" * 250 + "]" * 250) == ["too-deep"]
    assert read_rules(tmp_path / "deeper.json", "[" * 100_000) == ["too-deep"]
    assert read_rules(tmp_path / "large.yaml", b"#" * 4_000_001) == ["too-large"]
    (tmp_path / "fine.yaml").write_text("a: " + "[" * 150 + "]" * 150)
    assert read_document(tmp_path / "fine.yaml")


def test_values_of_any_size_are_shown_briefly() -> None:
    bomb: list[Any] = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    loop: list[Any] = []
    loop.append(loop)
    for value in (bomb, loop, 10**5000, "x" * 10**6):
        for found in findings_of(changed(*APP, "edges", 0, "mode", to=value)):
            assert len(found.got) <= 80
    assert content_hash({"name": "\ud800"}) != content_hash({"name": "\ud801"})


@pytest.mark.parametrize("reference", ["a\0.py:f", "x" * 5000 + ".py:f"])
def test_an_ops_file_whose_name_no_system_takes_is_a_finding(tmp_path: Path, reference: str) -> None:
    assert "ops-reference" in {found.rule for found in findings_of(world(ops=reference), tmp_path)}


def test_an_ops_file_that_is_too_deep_to_parse_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "ops.py").write_text("x = " + "-" * 200_000 + "1")
    assert "syntax" in {found.rule for found in findings_of(world(), tmp_path)}


@pytest.mark.parametrize(
    "document",
    [
        changed(*APP, "edges", 1, "chunks", to=1025),
        changed(*APP, "edges", 1, "lookahead", to=1025),
        changed(*DENOISE, "repeat", "times", to=10_001),
    ],
)
def test_counts_have_limits(document: dict[str, Any]) -> None:
    assert "less_than_equal" in {found.rule for found in findings_of(document)}
