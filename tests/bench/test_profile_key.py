"""The key of a measured profile: what has changed is refused by name; what has not is taken."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt.analysis import Use, analyze_program, check_profile_key, read_deployment, read_profile
from flashrt.analysis.profile_key import PART_BYTES, WHOLE_BYTES, fingerprint, make_key
from flashrt.bench import resolve_system
from flashrt.bench.systems import check_system_times
from flashrt.errors import InputError
from flashrt.ir import build_file
from flashrt.mcp_server.deploy import DeployOptions, run_deploy
from flashrt.runtime.serve import plan_workers

SPLIT: dict[str, Any] = {"groups": {"a": [0], "b": [1]}, "place": {"drift": "a", "render": "b"}}


def keyed(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a profile of the toy application as if it had been measured just now; `changes` are made to its key."""
    key = make_key(
        build_file(folder / "program.yaml"), files=["toy_ops.py"], kind="cpu", devices=["cpu-0"], degrees=[1],
        config={"delay_s": 0.0}, inputs={"actions": "float32 [6, 3]"},
    )  # fmt: skip
    return {
        "schema": "flashrt/profile@1", "device": "cpu", "operations": {"drift": 4.0, "render": 6.0},
        "provenance": "measured", "key": {**json.loads(json.dumps(key)), **changes},
    }  # fmt: skip


def refusal(folder: Path, profile: Mapping[str, Any], deployment: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the findings with which ``analyze`` refuses; none where it does not."""
    try:
        analyze_program(build_file(folder / "program.yaml"), profile, deployment)
    except InputError as error:
        return list(error.findings)
    return []


def deployed(folder: Path, profile: Mapping[str, Any], **document: Any) -> Path:
    """Write the profile and a deployment that names it."""
    (folder / "measured.json").write_text(json.dumps(dict(profile)))
    whole = {"schema": "flashrt/deployment@1", "program": "program.yaml", "profile": "measured.json", **SPLIT}
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump({**whole, "config": {"delay_s": 0.0}, **document}))
    return path


def test_what_was_measured_just_now_is_taken(toy: Path) -> None:
    profile = keyed(toy)
    assert refusal(toy, profile) == []
    config = {"config": {"delay_s": 0.0}}
    assert refusal(toy, profile, {**SPLIT, **config}) == []
    assert refusal(toy, profile, {**SPLIT, **config, "devices": "cpu"}) == []
    deployed(toy, profile, devices="cpu")
    assert check_system_times(resolve_system("deployment.yaml", toy)) == []


def test_changed_operations_are_named_with_what_they_were_and_are(toy: Path) -> None:
    profile = keyed(toy)
    before = profile["key"]["files"]["toy_ops.py"]
    with (toy / "toy_ops.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    (finding,) = refusal(toy, profile)
    assert finding.rule == "stale-profile"
    assert "file 'toy_ops.py'" in finding.where
    assert before in finding.expected
    assert json.dumps(fingerprint(toy / "toy_ops.py")) == finding.got
    assert "profile_measure" in finding.fix
    (toy / "toy_ops.py").rename(toy / "other_ops.py")
    document = yaml.safe_load((toy / "program.yaml").read_text())
    document["ops"] = "other_ops.py:load"
    (toy / "program.yaml").write_text(yaml.safe_dump(document))
    places = [finding.where for finding in refusal(toy, profile)]
    assert any("key 'ops'" in place for place in places)
    assert any("file 'toy_ops.py'" in place for place in places)


def test_a_changed_program_is_named_node_by_node_and_its_name_decides_nothing(toy: Path) -> None:
    profile = keyed(toy)
    document = yaml.safe_load((toy / "program.yaml").read_text())
    (toy / "program.yaml").write_text(yaml.safe_dump({**document, "name": "renamed"}))
    assert refusal(toy, profile) == []
    document["graphs"]["app"]["nodes"]["drift"]["degrees"] = [1, 2]
    document["graphs"]["app"]["edges"][1]["chunks"] = 6
    (toy / "program.yaml").write_text(yaml.safe_dump(document))
    places = [finding.where for finding in refusal(toy, profile)]
    assert ["node 'drift'" in place for place in places].count(True) == 1
    assert ["ports and edges" in place for place in places].count(True) == 1
    assert len(places) == 2


def test_other_options_and_versions_are_refused_all_at_once(toy: Path) -> None:
    profile = keyed(toy)
    profile["key"]["packages"]["numpy"] = "0.1"
    (version,) = refusal(toy, profile)
    assert "version of 'numpy'" in version.where
    findings = refusal(toy, profile, {**SPLIT, "config": {"delay_s": 0.5, "size": 2}})
    assert [finding.rule for finding in findings] == ["stale-profile"] * 3
    text = "\n".join(map(str, findings))
    assert "option 'delay_s': expected 0.0, as when it was measured, got 0.5" in text
    assert "option 'size': expected none, as when it was measured, got 2" in text


def test_weights_that_an_option_names_count(toy: Path) -> None:
    weights = toy / "weights.bin"
    weights.write_bytes(b"1" * 100)
    built = build_file(toy / "program.yaml")
    config = {"weights": {"path": str(weights)}}
    key = make_key(built, files=[], kind="cpu", devices=["cpu-0"], config=config, inputs={}, degrees=[1])
    profile = read_profile({**keyed(toy), "key": key}, built)
    assert check_profile_key(profile, built, Use(config=config)) == []
    weights.write_bytes(b"2" * 100)
    (finding,) = check_profile_key(profile, built, Use(config=config))
    assert "weights.bin" in finding.where


def test_a_large_file_s_hash_sees_its_size_beginning_middle_and_end(tmp_path: Path) -> None:
    path = tmp_path / "large"
    size = WHOLE_BYTES + 2 * PART_BYTES
    path.write_bytes(bytes(size))
    found = {fingerprint(path)}
    for place in (0, size // 2, size - 1):
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        found.add(fingerprint(path))
    path.write_bytes(bytes(size + 1))
    found.add(fingerprint(path))
    assert len(found) == 5
    assert fingerprint(tmp_path / "absent") is None


@pytest.mark.parametrize("other", [{"kind": "cuda", "name": "H200"}, {"kind": "cpu", "name": "another processor"}])
def test_another_device_is_refused_for_a_real_deployment_and_taken_for_an_emulated_one(
    toy: Path, other: dict[str, str]
) -> None:
    profile = keyed(toy, device=other)
    profile["key"]["packages"]["numpy"] = "0.1"
    # Analysed without a place to run, a profile of another machine is what it is.
    assert refusal(toy, profile) == []
    built = build_file(toy / "program.yaml")
    path = deployed(toy, profile, devices="cpu")
    (finding,) = check_system_times(resolve_system("deployment.yaml", toy))
    assert finding.rule == "foreign-profile"
    assert other["name"] in finding.got
    with pytest.raises(InputError, match=other["name"]):
        plan_workers(built, read_deployment(path, built), ["cpu-0", "cpu-1"], toy / "measured.json")
    assert [f.rule for f in refusal(toy, profile, yaml.safe_load(path.read_text()))] == ["foreign-profile"]
    path = deployed(toy, profile, devices="emulated")
    assert check_system_times(resolve_system("deployment.yaml", toy)) == []
    layout = plan_workers(built, read_deployment(path, built), [], toy / "measured.json")
    assert layout.period_s == pytest.approx(0.006)
    # Other code is another program on any device.
    with (toy / "toy_ops.py").open("a") as file:
        file.write("\nCHANGED = True\n")
    with pytest.raises(InputError, match=r"toy_ops\.py"):
        plan_workers(built, read_deployment(path, built), [], toy / "measured.json")


def test_a_deployment_run_with_other_options_is_refused(toy: Path) -> None:
    path = deployed(toy, keyed(toy), devices="cpu")
    built = build_file(toy / "program.yaml")
    placement = read_deployment(path, built)
    plan_workers(built, placement, ["cpu-0", "cpu-1"], toy / "measured.json", {})
    with pytest.raises(InputError, match="option 'delay_s'"):
        plan_workers(built, placement, ["cpu-0", "cpu-1"], toy / "measured.json", {"delay_s": 0.1})


def test_nothing_is_leased_for_a_service_whose_profile_is_out_of_date(
    toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHRT_LEASE_DIR", str(tmp_path / "leases"))
    profile = keyed(toy)
    profile["key"]["files"]["toy_ops.py"] = "0" * 16
    deployed(toy, profile, devices="cpu")
    with pytest.raises(InputError, match=r"toy_ops\.py.*profile_measure"):
        run_deploy(DeployOptions("deployment.yaml", toy))
    assert not (tmp_path / "leases").exists()


def test_profiles_without_a_key_are_taken_and_older_keys_by_what_they_have(toy: Path) -> None:
    profile = keyed(toy)
    del profile["key"]
    assert refusal(toy, profile, {**SPLIT, "devices": "cuda", "config": {"x": 1}}) == []
    built = build_file(toy / "program.yaml")
    now = make_key(built, files=[], kind="cpu", devices=[], config={}, inputs={}, degrees=[1])
    old = {
        "program": built.id, "processor": now["device"]["name"], "devices": ["cpu-0"], "config": {},
        "packages": now["packages"],
    }  # fmt: skip
    assert refusal(toy, {**profile, "key": old}, SPLIT) == []
    assert refusal(toy, {**profile, "key": {**old, "config": {"delay_s": 1}}}, SPLIT)[0].rule == "stale-profile"
    (finding,) = refusal(toy, {**profile, "key": {**old, "program": "prog-000000000000"}})
    assert (finding.rule, finding.got) == ("stale-profile", built.id)
    other = {**old, "processor": "another processor"}
    assert refusal(toy, {**profile, "key": other}, {**SPLIT, "devices": "cpu"})[0].rule == "foreign-profile"
