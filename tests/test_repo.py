"""The repository itself: sizes, shared text, and that what the README tells people to type works."""

import ast
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tyro

from conftest import ROOT

SIZES = {  # lines and kilobytes: what a file has now; none may grow without being noticed
    "ppo_procgen": (960, 45.0),
    "impala_procgen": (1041, 49.3),
    "ppo_atari_rnd": (1071, 52.1),
    "ppo_atari_snd": (1059, 50.6),
    "appo_atari": (1164, 56.3),
}
SOURCES = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
PLUMBING = "# --- plumbing, the same text in all five scripts ---\n"
# Functions and classes whose text may differ between scripts that have one of this name, and why.
DIFFERENT = {
    "Args": "its flags",
    "check": "its flags",
    "Agent": "its network",
    "learn": "its algorithm",
    "train": "its algorithm",
    "ppo_terms": "its loss",
    "standardize": "Procgen masks no row",
    "play": "RND's policy may have a memory",
}
FAMILY = {  # what may differ between these groups of scripts
    "evaluate": "Procgen has two splits",
    "make_envs": "two packages; APPO has episodic life",
    "AtariEnvs": "APPO has episodic life, the scripts with a bonus count rooms",
}
FAMILIES = {"ppo_procgen": 0, "impala_procgen": 0, "ppo_atari_rnd": 1, "ppo_atari_snd": 1, "appo_atari": 2}


def test_size():
    assert SIZES.keys() == SOURCES.keys()
    for script, (lines, kilobytes) in SIZES.items():
        text = SOURCES[script]
        assert len(text.splitlines()) <= lines and len(text.encode()) <= 1000 * kilobytes, script
        assert max(map(len, text.splitlines())) <= 100, script


def test_plumbing_is_one_text():
    texts = {text.split(PLUMBING)[1] for text in SOURCES.values()}
    ranks = {re.search(r"\nRANK = .*\nWORLD = .*\nSIGNALS = .*\n", text)[0] for text in SOURCES.values()}
    assert len(texts) == len(ranks) == 1


def test_blocks_of_one_name_are_one_text():
    """Functions and classes that several scripts have are copies of each other; all have a docstring."""
    first = {}
    for script, source in SOURCES.items():
        for node in ast.parse(source).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            assert ast.get_docstring(node) or node.name in ("Args", "ResidualBlock"), f"{script}.{node.name}"
            if node.name not in DIFFERENT:
                key = (node.name, FAMILIES[script]) if node.name in FAMILY else node.name
                other, text = first.setdefault(key, (script, ast.dump(node)))
                assert text == ast.dump(node), f"{node.name} differs between {other}.py and {script}.py"


def test_flags_of_one_name_are_one_text():
    """The group `# run` of Args, but for what depends on the algorithm."""
    groups = []
    for source in SOURCES.values():
        run = source.split("    # run\n")[1].split("    # environment\n")[0].splitlines()
        groups.append([line for line in run if not re.match(r" +(env_id|total_timesteps|micro_batch|seed):", line)])
    assert all(group == groups[0] for group in groups)


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


def commands(text: str) -> list[list[str]]:
    """The words of each `python SCRIPT.py ...` line in the README's shell blocks."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    found = [shlex.split(line.split("#")[0]) for line in lines if line.startswith("python ")]
    return [words for words in found if Path(words[1]).stem in SOURCES]


README = commands((ROOT / "README.md").read_text())
SMOKE = [words for words in README if words[-1].startswith("smoke")]
LONG = [words for words in README if words not in SMOKE and "--resume" not in words]
SMALL = {  # appended to a command, to run one iteration of its algorithm in seconds
    "ppo_procgen": "--channels 4 4 4",
    "impala_procgen": "--channels 4 4 4",
    "ppo_atari_rnd": "--rnd-features 8 --warmup-steps 3",
    "ppo_atari_snd": "--snd-features 8 --warmup-steps 3 --update-epochs 1",
    "appo_atari": "--num-minibatches 2",
}
ALL = """--num-envs 4 --num-steps 16 --minibatch-size 32 --total-timesteps 128 --eval-episodes 0 --quiet
--threads 1 --run-name x"""


def test_readme_commands_parse():
    for words in README:
        tyro.cli(importlib.import_module(Path(words[1]).stem).Args, args=words[2:])
    assert len({words[-1] for words in SMOKE}) == len(SMOKE)  # one after the other, in one folder
    assert {Path(words[1]).stem for words in LONG} == {Path(words[1]).stem for words in SMOKE} == set(SOURCES)


@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_readme_command_runs(words, tmp_path, monkeypatch):
    """Every training command, shrunk, goes through two iterations: what its flags switch on works together."""
    name = Path(words[1]).stem
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(name).main([*words[2:], *SMALL[name].split(), *ALL.split()]) == 0
    table = (tmp_path / "runs" / "x" / "metrics.csv").read_text().splitlines()
    assert len(table) > 1 and int(table[-1].split(",")[0]) == 128


@pytest.mark.parametrize("words", SMOKE, ids=lambda words: words[1])
def test_readme_smoke_command_runs(words, tmp_path):
    """It ends well; if it hangs (a slow, shared core takes a minute and more), it prints where its threads are."""
    limit = ["timeout", "-s", "ABRT", "180", sys.executable, "-X", "faulthandler"]
    done = subprocess.run([*limit, ROOT / words[1], *words[2:]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs" / words[-1] / "eval.json").exists(), done.stderr


def pins() -> dict:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_pins():
    """Exact pins, of these packages only."""
    assert pins().keys() == {"torch", "numpy", "gymnasium", "envpool", "tyro", "tensorboard", "tqdm"}


@pytest.mark.parametrize("script", SOURCES)
def test_script_metadata_is_requirements(script):
    """The PEP 723 block, from which `uv run` installs Python and the packages."""
    (block,) = re.findall(r"(?m)^# /// script$\n((?:^#.*$\n)+?)^# ///$", SOURCES[script])
    metadata = tomllib.loads("".join(line[2:] for line in block.splitlines(keepends=True)))
    assert metadata["requires-python"] == ">=3.11"
    assert dict(pin.split("==") for pin in metadata["dependencies"]) == pins()


@pytest.mark.slow
def test_uv_runs_a_script_in_an_empty_folder(tmp_path):
    """uv makes an environment with the pins of the block and trains."""
    (tmp_path / "ppo_procgen.py").write_text(SOURCES["ppo_procgen"])
    flags = "--env-id leaper --num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4 --total-timesteps 64"
    command = ["uv", "run", "--python", sys.executable, "ppo_procgen.py", *flags.split(), "--eval-episodes", "0"]
    done = subprocess.run([*command, "--run-name", "a"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/checkpoint.pt").exists()
