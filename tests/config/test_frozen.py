"""The frozen config: read and written by section, with the same result as OmegaConf for the whole."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config.composition import Composer
from runner.config.frozen import holds, load_plain, plain_values, schema, to_yaml
from runner.config.plain_yaml import Loader, escaped, read_plain
from runner.errors import RunDirError, UserError

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=["Cs", "Cc"]))
)
LOOKS_LIKE = st.sampled_from(
    "1e-3 1e3 1.e5 .5 -.5e+3 1_000 0x1f 0o17 017 1:30 1:30.5 2001-12-14 2001-12-14t21:59:43 yes no on Off ~ null Null "
    ".inf -.Inf .nan .NaN = << 1. +1 + - . e5 1e 1e5.0 ${seed} \\${seed} a:b ? !x %y".split()
)
PLAIN = st.recursive(
    SCALARS | LOOKS_LIKE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc_1", min_size=1), inner, max_size=3),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def composed() -> dict[str, Any]:
    return Composer().compose(["data=mixture", "phases.late={start_step:5}"], Path("/nowhere")).plain


@given(text=LOOKS_LIKE | st.from_regex(r"[-+.:_0-9eE]{1,8}", fullmatch=True))
def test_a_value_is_read_as_omegaconf_reads_it(text: str) -> None:
    """Otherwise a config edited by hand would be mistaken for another, or for the same."""
    try:
        expected = repr(plain_values(OmegaConf.create(f"a: {text}\n"), resolve=False))
    except (yaml.YAMLError, OmegaConfBaseException):
        return
    assert repr(yaml.load(f"a: {text}\n", Loader=Loader)) == expected


def test_a_key_that_is_there_twice_is_an_error_in_all_readers(tmp_path: Path, composed: dict[str, Any]) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(composed).replace("  steps:", "  steps: 7\n  steps:", 1))
    assert not holds(tmp_path, composed)
    with pytest.raises(ValueError, match="duplicate"):
        read_plain(tmp_path / "config.yaml")
    with pytest.raises(RunDirError, match="edited by hand"):
        load_plain(tmp_path)


@settings(deadline=None)
@given(values=st.dictionaries(st.text("abc_1", min_size=1), PLAIN, max_size=3))
@pytest.mark.slow
def test_written_yaml_equals_omegaconfs_and_reads_back(
    tmp_path_factory: pytest.TempPathFactory, composed: dict[str, Any], values: dict[str, Any]
) -> None:
    plain = {**composed, "callbacks": values, "model": {"_target_": "a.B", **values}}
    text = to_yaml(plain)
    assert text == OmegaConf.to_yaml(OmegaConf.create(escaped(plain)))
    folder = tmp_path_factory.mktemp("run")
    (folder / "config.yaml").write_text(text)
    whole = repr(plain_values(OmegaConf.merge(schema(), OmegaConf.create(text))))
    assert repr(load_plain(folder)) == repr(read_plain(folder / "config.yaml")) == whole
    assert holds(folder, load_plain(folder))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("seed: 0\n", "seed: 1\n"),
        ("seed: 0\n", ""),
        ("seed: 0\n", "seed: 0.0\n"),
        ("seed: 0\n", "seed: false\n"),
        ("  clip_norm: 1.0\n", ""),
        ("  clip_norm: 1.0\n", "  clip_norm: 1\n"),
        ("  batches: 8\n", "  batches: ${seed}\n"),
        ("seed: 0\n", "---\nseed: 0\n"),
        ("seed: 0\n", "seeds: 0\n"),
        ("strategy: ddp\n", "strategy: dp\n"),
        ("strategy: ddp\n", "# a comment\nstrategy: ddp\n"),
    ],
)
def test_an_edited_config_is_read_as_omegaconf_reads_the_whole(
    tmp_path: Path, composed: dict[str, Any], old: str, new: str
) -> None:
    text = to_yaml(composed)
    assert old in text
    (tmp_path / "config.yaml").write_text(text.replace(old, new, 1))
    try:
        read = OmegaConf.create(text.replace(old, new, 1))
        expected = repr(plain_values(OmegaConf.merge(schema(), read))) if new else None
    except OmegaConfBaseException:
        expected = None
    if new in ("", "seeds: 0\n") or expected is None:
        if "clip_norm" in old:
            assert load_plain(tmp_path)["train"]["clip_norm"] == 1.0  # the default
        else:
            with pytest.raises(RunDirError):
                load_plain(tmp_path)
    else:
        assert repr(load_plain(tmp_path)) == expected


def test_values_of_another_type_differ_from_the_frozen_ones(tmp_path: Path, composed: dict[str, Any]) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(composed))
    assert holds(tmp_path, composed)
    for other in (False, 0.0, 1, "0"):
        assert not holds(tmp_path, {**composed, "seed": other})
    assert not holds(tmp_path / "missing", composed)


@pytest.mark.slow
def test_compositions_over_a_run_leave_no_growing_store(tmp_path: Path) -> None:
    """Hydra copies its store at each composition: after a thousand runs one would take seconds."""
    composer = Composer()
    made = composer.compose(["run.dir=run"], tmp_path)
    made.run_dir.mkdir()
    (made.run_dir / "config.yaml").write_text(made.text)

    def left() -> int:
        composer.recompose(made.run_dir, ["seed=1"])
        with pytest.raises(UserError, match="did you mean 'seed'"):
            composer.recompose(made.run_dir, ["sed=1"])
        return len(pickle.dumps(ConfigStore.instance()))

    assert left() == left()
