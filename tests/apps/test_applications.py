"""What holds for every application: one meaning however it is cut and placed, real state, live weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashrt.errors import InputError
from tests.apps import applications
from tests.apps.applications import APPS, NUM_BATCHES, context, items, load_file, play, played, program
from tests.runtime import running

DEPLOYMENTS = {
    "background_editor": "split.yaml", "conversation": "split.yaml", "longlive": "beside.yaml", "omni": "three.yaml",
}  # fmt: skip

INPUTS = [(app, name) for app in APPS for name in program(app)["graphs"]["app"]["inputs"]]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def same(got: Sequence[Mapping[str, Any]], want: Sequence[Mapping[str, torch.Tensor]]) -> bool:
    """Whether outputs are the same, batch by batch and bit for bit."""
    return len(got) == len(want) and all(
        have.keys() == expected.keys()
        and all(torch.equal(torch.as_tensor(have[name]), value) for name, value in expected.items())
        for have, expected in zip(got, want, strict=True)
    )


@pytest.mark.parametrize("app", APPS)
def test_the_program_means_the_reference(app: str) -> None:
    assert len(played(app)) == NUM_BATCHES
    assert same(applications.interpret_apart(app)[0], played(app))


@pytest.mark.parametrize("app", APPS)
def test_whole_values_give_what_chunks_give(app: str) -> None:
    assert same(applications.interpret_apart(app)[1], played(app)[: applications.NUM_BLOCKING])


@pytest.mark.slow
@pytest.mark.parametrize("app", APPS)
def test_processes_of_their_own_give_the_bits_of_the_reference(app: str, tmp_path: Path) -> None:
    folder = tmp_path / app
    applications.copy(app, folder, DEPLOYMENTS[app])
    recorder = running.run(folder, f"deployments/{DEPLOYMENTS[app]}", items(app), timeout_s=600)
    chunks: dict[tuple[int | None, str], list[torch.Tensor]] = {}
    for write in recorder.written:
        chunks.setdefault((write.batch, write.output), []).append(torch.as_tensor(write.value.data))
    got: list[dict[str, torch.Tensor]] = [{} for _ in range(NUM_BATCHES)]
    for (batch, output), parts in chunks.items():
        assert batch is not None
        assert len(parts) > 1, "it streams"
        got[batch][output] = torch.cat(parts)
    assert same(got, played(app))


@pytest.mark.parametrize(("app", "name"), INPUTS)
def test_each_input_changes_what_follows_and_nothing_before(app: str, name: str) -> None:
    changed = [dict(batch) for batch in items(app)[:5]]
    # A prompt takes effect some batches after it was spoken, so all of them change.
    for number in range(1, 5):
        changed[number][name] = items(app)[number + 6][name]
    got = play(app, changed)
    assert same(got[:1], played(app)[:1])
    last = [output for output in got[4] if not torch.equal(got[4][output], played(app)[4][output])]
    assert last == list(got[4])


@pytest.mark.parametrize("app", APPS)
def test_outputs_are_alive(app: str) -> None:
    for name in played(app)[0]:
        values = torch.stack([outputs[name].float() for outputs in played(app)])
        scale = 255.0 if played(app)[0][name].dtype == torch.uint8 else 1.0
        assert values.std() > 0.02 * scale, f"{name} is flat"
        assert (values[1:] - values[:-1]).abs().amax(dim=tuple(range(1, values.ndim))).min() > 0.02 * scale
        assert ((values <= -scale) | (values >= scale)).float().mean() < 0.05, f"{name} is saturated"


@pytest.mark.parametrize("app", APPS)
def test_only_what_is_asked_for_is_loaded_and_nothing_global_changes(app: str) -> None:
    nodes = [node for graph in program(app)["graphs"].values() for node in graph["nodes"].values()]
    names = {node["op"] for node in nodes if "op" in node}
    ops = load_file(app, "ops")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    for name in names:
        assert set(ops.load(context(app, operations=frozenset({name})))) == {name}
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("app", APPS)
def test_the_full_configuration_names_its_missing_checkpoint(app: str, tmp_path: Path) -> None:
    config = {"config": "full", "checkpoint_dir": str(tmp_path / "absent")}
    with pytest.raises(InputError, match=r"checkpoint_dir.*absent.*nothing is downloaded"):
        load_file(app, "ops").load(context(app, config=config))


@pytest.mark.parametrize("app", APPS)
def test_a_wrong_option_is_named(app: str) -> None:
    with pytest.raises(InputError, match=r"'sead' \(did you mean 'seed'\?\)"):
        load_file(app, "ops").load(context(app, config={"sead": 1}))


@pytest.mark.parametrize("app", APPS)
def test_inputs_are_a_function_of_the_seed(app: str) -> None:
    batches = load_file(app, "inputs").batches
    once, longer, other = list(batches(3, 4)), list(batches(3, 6)), list(batches(4, 4))
    for left, right in zip(once, longer, strict=False):
        assert all(np.array_equal(left[name], right[name]) for name in left)
    assert not all(np.array_equal(left[name], right[name]) for left, right in zip(once, other, strict=True)
                   for name in left)  # fmt: skip
    name = next(iter(once[0]))
    assert len({np.asarray(batch[name]).tobytes() for batch in longer}) == 6
