"""The repository itself: sizes, shared text, and that what the README tells people to type works."""

import ast
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tyro

from conftest import ROOT
from test_plumbing import KINDS

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
SIZES = {  # lines and kilobytes: what a file has; the aims are 680, 740, 760, 860, 780 and 32, 36, 38, 43, 38
    "ppo_procgen": (780, 36.8),
    "impala_procgen": (864, 41.3),
    "ppo_atari_rnd": (907, 44.6),
    "ppo_atari_snd": (987, 48.5),
    "appo_atari": (978, 47.7),
}
PLUMBING = "# --- plumbing, the same text in all five files ---\n"
# Functions and classes whose text may differ between scripts that have one of this name, and why.
DIFFERENT = {
    "Args": "its flags",
    "check": "its flags",
    "Agent": "its network",
    "train": "its algorithm",
    "ppo_terms": "its loss",
    "evaluate": "Procgen has two splits",
    "make_envs": "Procgen or Atari",
    "gae": "Procgen has no truncation",
    "standardize": "Procgen masks no row",
    "play": "RND's policy may have a memory",
    "vtrace": "Procgen has no truncation; IMPALA's limits are 1",
}


def source(script):
    return (ROOT / f"{script}.py").read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_size(script):
    lines, kilobytes = SIZES[script]
    text = source(script)
    assert len(text.splitlines()) <= lines and len(text.encode()) <= 1000 * kilobytes
    assert max(map(len, text.splitlines())) <= 100


def test_plumbing_is_one_text():
    texts = {source(script).split(PLUMBING)[1] for script in SCRIPTS}
    assert len(texts) == 1


def test_blocks_of_one_name_are_one_text():
    """Functions and classes that several scripts have are copies of each other, docstrings included."""
    first = {}
    for script in SCRIPTS:
        for node in ast.parse(source(script)).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in DIFFERENT:
                other, text = first.setdefault(node.name, (script, ast.dump(node)))
                assert text == ast.dump(node), f"{node.name} differs between {other}.py and {script}.py"


def test_flags_of_one_name_are_one_text():
    """The group `# run` of Args, but for the game and the length of a run."""
    groups = []
    for script in SCRIPTS:
        run = source(script).split("    # run\n")[1].split("    # environment\n")[0].splitlines()
        groups.append([line for line in run if not re.match(r" +(env_id|total_timesteps|micro_batch|seed):", line)])
    assert all(group == groups[0] for group in groups)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_function_is_documented(script):
    for node in ast.parse(source(script)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in ("Args", "ResidualBlock"):
            assert ast.get_docstring(node), node.name


@pytest.mark.parametrize("script", SCRIPTS)
def test_import_has_no_side_effects_and_needs_no_environment_package(script):
    code = f"""
import sys
sys.modules["procgen"] = sys.modules["envpool"] = sys.modules["gym"] = None
import random, numpy, torch
before = random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads()
from {script} import Args, Agent, train, evaluate, play, make_envs
assert before == (random.getstate(), torch.get_rng_state().tolist(), torch.get_num_threads())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and not done.stdout, done.stderr


def commands(text: str) -> list[list[str]]:
    """The words of each `python SCRIPT.py ...` line in the README's shell blocks."""
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    found = [shlex.split(line.split("#")[0]) for line in lines if line.startswith("python ")]
    return [words for words in found if Path(words[1]).stem in SCRIPTS]


README = commands((ROOT / "README.md").read_text())
TRAINING = [words for words in README if "--resume" not in words]
SMALL = {  # appended to a command, to run one iteration of its algorithm in seconds
    "ppo_procgen": "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
    "impala_procgen": "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
    "ppo_atari_rnd": "--num-envs 4 --num-steps 16 --minibatch-size 32 --rnd-features 8 --warmup-steps 3",
    "ppo_atari_snd": "--num-envs 4 --num-steps 16 --minibatch-size 32 --snd-features 8 --warmup-steps 3",
    "appo_atari": "--num-envs 4 --num-steps 16 --minibatch-size 32 --num-minibatches 2",
}


def test_readme_commands_parse():
    for words in README:
        tyro.cli(importlib.import_module(Path(words[1]).stem).Args, args=words[2:])
    assert {Path(words[1]).stem for words in README} == set(SCRIPTS)


@pytest.mark.parametrize("words", TRAINING, ids=" ".join)
def test_readme_command_runs(words, tmp_path, monkeypatch):
    """Every training command, shrunk, goes through two iterations: what its flags switch on works together."""
    name = Path(words[1]).stem
    monkeypatch.chdir(tmp_path)
    small = f"{SMALL[name]} --total-timesteps 128 --eval-episodes 0 --quiet --torch-threads 1 --run-name x".split()
    assert importlib.import_module(name).main([*words[2:], *small]) == 0
    table = (tmp_path / "runs" / "x" / "metrics.csv").read_text().splitlines()
    assert len(table) > 1 and int(table[-1].split(",")[0]) == 128


@pytest.mark.parametrize("script", KINDS)
def test_readme_smoke_command_runs(script, tmp_path):
    """The command that the README offers for people's CI ends well, and in less than a minute."""
    (words,) = [words for words in README if "smoke" in words and words[1] == f"{script}.py"]
    command = [sys.executable, ROOT / words[1], *words[2:]]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    environment = os.environ | dict(PYTHONFAULTHANDLER="1")
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it prints where its threads are
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (tmp_path / "runs" / "smoke" / "eval.json").exists(), output


def test_pins():
    """Exact pins, of the seven packages and tqdm only."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    expected = dict(torch="2.13.0", numpy="1.26.4", gymnasium="1.4.0", envpool="1.0.1")
    assert (expected | {"procgen-mirror": "0.10.7"}).items() <= pins.items()
    assert pins.keys() - expected.keys() == {"procgen-mirror", "tyro", "tensorboard", "tqdm"}
