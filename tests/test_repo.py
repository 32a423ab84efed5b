"""The repository itself: sizes, shared text, pins."""

import ast
import re
import subprocess
import sys
import tomllib

import pytest

from conftest import PROCGEN, ROOT

SIZES = {  # lines and kilobytes: none may grow; "minimal" is the first word that describes this project
    "ppo_procgen": (851, 41.1),
    "impala_procgen": (885, 42.7),
    "ppo_atari_rnd": (894, 44.0),
    "ppo_atari_snd": (925, 45.2),
    "appo_atari": (925, 45.2),
}
PLUMBING_LINES, LEARN_LINES = 220, 30
SOURCES = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
PLUMBING = "# --- plumbing, the same text in all five scripts ---\n"
# Functions and classes whose text may differ between scripts that have one of this name, and why.
DIFFERENT = {
    "Args": "its flags",
    "Agent": "its network",
    "learn": "its algorithm",
    "train": "its algorithm",
    "play_rollout": "its columns",
    "main": "ppo_procgen.py has presets",
}
FAMILIES = {  # scripts whose text may differ from that of the scripts not listed, and why
    "evaluate": [("ppo_procgen", "impala_procgen")],  # two splits
    "gradient": [("ppo_procgen", "impala_procgen"), ("appo_atari",)],  # all rows count; none without a weight
    # PPO stores logits, for the exact KL; actors have their own noise, IMPALA's no values
    "act": [("ppo_procgen",), ("appo_atari",), ("impala_procgen",)],
    "gae": [("ppo_procgen",)],  # every end counts as a termination
    "ppo_loss": [("ppo_procgen",), ("appo_atari",)],  # the others have two value heads
    "make_envs": [("ppo_procgen", "impala_procgen"), ("appo_atari",)],  # two packages; episodic life
    "Group": [("appo_atari",)],  # masks the row after an end
    "ended_episodes": [("ppo_procgen", "impala_procgen")],  # same-step autoreset
    "standardize": [("ppo_procgen",)],  # APPO's is over valid rows
    "AtariEnvs": [("appo_atari",)],  # episodic life
}


def functions(source: str) -> dict:
    return {node.name: node for node in ast.parse(source).body if hasattr(node, "name")}


def test_size():
    assert SIZES.keys() == SOURCES.keys()
    for script, (lines, kilobytes) in SIZES.items():
        text = SOURCES[script]
        assert len(text.splitlines()) <= lines and len(text.encode()) <= 1000 * kilobytes, script
        assert max(map(len, text.splitlines())) <= 100, script
        assert len(text.split(PLUMBING)[1].splitlines()) <= PLUMBING_LINES, script
        for name, node in functions(text).items():
            assert not name.startswith("learn") or node.end_lineno - node.lineno < LEARN_LINES, (script, name)


def test_plumbing_is_one_text():
    """All of it but main, whose preset only ppo_procgen.py has; what stands above Args, and its flags of the run."""
    texts, kinds, groups = set(), set(), set()
    for script, text in SOURCES.items():
        text = re.sub("ROWS_ON_CPU = .*", "", text)
        plumbing = text.split(PLUMBING)[1]
        texts.add(re.sub(r"(?s)\ndef main.*?\n\n\n", "", plumbing))
        kinds.add(text.split("\nWORLD = ")[1].split("\n@dataclass")[0])
        run = text.split("    # run\n")[1].split("    # environment\n")[0]
        groups.add(re.sub(r"(?m)^ +(env_id|total_timesteps|micro_batch|seed):.*\n", "", run))
        assert ("OPENAI" in plumbing) == (script == "ppo_procgen")
    mains = {ast.dump(functions(text)["main"]) for name, text in SOURCES.items() if name != "ppo_procgen"}
    assert len(texts) == len(kinds) == len(groups) == len(mains) == 1


def test_blocks_of_one_name_are_one_text():
    """Functions and classes that several scripts have are copies of each other; all have a docstring."""
    first = {}
    for script, source in SOURCES.items():
        for name, node in functions(source).items():
            assert ast.get_docstring(node) or name in ("Args", "ResidualBlock", "as_schedule"), f"{script}.{name}"
            if name not in DIFFERENT:
                family = [scripts for scripts in FAMILIES.get(name, ()) if script in scripts]
                other, text = first.setdefault((name, *family), (script, ast.dump(node)))
                assert text == ast.dump(node), f"{name} differs between {other}.py and {script}.py"


def test_import_has_no_side_effects_and_needs_no_environment_package():
    code = f"""
import importlib, random, sys
sys.modules["envpool"] = sys.modules["gym"] = None
import numpy, torch
def state():
    return random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(), torch.get_num_threads()
before = state()
for name in {list(SOURCES)}:
    script = importlib.import_module(name)
    script.Args, script.Agent, script.train, script.evaluate, script.play, script.make_envs
    assert state() == before, name
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stdout, done.stderr


def pins() -> dict:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_metadata_are_the_requirements():
    """What `uv run` reads at the head of each script and `uv sync` in pyproject.toml is what pip installs."""
    assert pins().keys() == {"torch", "numpy", "gymnasium", "envpool", "tyro", "pydantic", "tensorboard", "tqdm"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    assert project["dependency-groups"]["dev"] == [line for line in lines if line and line[0] not in "#-"]
    metadata = [project["project"]]
    for source in SOURCES.values():
        (block,) = re.findall(r"(?m)^# /// script$\n((?:^#.*$\n)+?)^# ///$", source)
        metadata.append(tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True))))
    for each in metadata:
        assert each["requires-python"] == ">=3.11,<3.15"  # later Pythons have no wheels
        assert dict(pin.split("==") for pin in each["dependencies"]) == pins()


@pytest.mark.slow
def test_uv_runs_a_script_in_an_empty_folder(tmp_path):
    """uv makes an environment with the pins of the block and trains."""
    (tmp_path / "ppo_procgen.py").write_text(SOURCES["ppo_procgen"])
    flags = f"{PROCGEN} --total-timesteps 64 --run-name a".split()
    command = [sys.executable, *"-m uv run --python".split(), sys.executable, "ppo_procgen.py", *flags]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/checkpoint.pt").exists()
