"""The repository itself: shared blocks, lengths, what the README prints."""

import ast
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from test_plumbing import KINDS

SCRIPTS = sorted(path.stem for path in ROOT.glob("*.py"))
# The longest a file may be, in lines of code: blank lines, comments and docstrings are free, so nobody saves on them.
# The aims were 550, 650, 700, 700 and 600: where a figure is larger, it is what the file has, and must not grow.
CEILINGS = dict(ppo_procgen=692, ppo_atari_rnd=801, ppo_atari_snd=828, appo_atari=849, impala_procgen=822)
# Top-level names whose text may differ between scripts: what the algorithm or the environment is, not how it is run.
ALGORITHM = {"Args", "Agent", "train", "make_envs", "splits", "normalized", "score", "ppo_terms"}
ALGORITHM |= {"ppo_atari_rnd.evaluate"}  # its policy may have a memory
ALGORITHM |= {"Published", "Group"}  # appo_atari's keep values, in units of reward; impala_procgen's shape rewards


def code_lines(source: str) -> int:
    lines, tree = source.splitlines(), ast.parse(source)
    documentation = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            documentation |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    kept = (line for i, line in enumerate(lines, 1) if i not in documentation)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in kept)


@pytest.mark.parametrize("script", SCRIPTS)
def test_length(script):
    assert code_lines((ROOT / f"{script}.py").read_text()) <= CEILINGS[script]


def test_blocks_of_one_name_are_one_text():
    """Functions and classes that several scripts have are copies of each other, docstrings included."""
    first = {}
    for script in SCRIPTS:
        for node in ast.parse((ROOT / f"{script}.py").read_text()).body:
            if (
                isinstance(node, ast.FunctionDef | ast.ClassDef)
                and not {node.name, f"{script}.{node.name}"} & ALGORITHM
            ):
                other, text = first.setdefault(node.name, (script, ast.dump(node)))
                assert text == ast.dump(node), f"{node.name} differs between {other}.py and {script}.py"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_public_name_is_documented(script):
    for node in ast.walk(ast.parse((ROOT / f"{script}.py").read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and getattr(node, "col_offset", 1) == 0:
            trivial = isinstance(node, ast.ClassDef) and node.name == "ResidualBlock" or node.name.endswith("rng_state")
            assert ast.get_docstring(node) or node.name == "Args" or trivial, node.name


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```(?:sh|bash)\n(.*?)```", text, re.S)
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    return [line for line in lines if line.startswith("python ")]


def test_readme_commands_parse():
    """Every `python SCRIPT.py ...` line of the README parses with the script's own parser."""
    import importlib
    import shlex

    import tyro

    found = 0
    for command in commands((ROOT / "README.md").read_text()):
        words = shlex.split(command.split("#")[0])
        name = Path(words[1]).stem
        if words[1].endswith(".py") and name in SCRIPTS:
            tyro.cli(
                importlib.import_module(name).Args,
                args=[w for w in words[2:] if "NAME" not in w or w.startswith("runs")],
            )
            found += 1
    assert found >= 3


SMALL = {  # appended to a command, to run one iteration of its algorithm in seconds
    "ppo_procgen": "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
    "impala_procgen": "--num-envs 4 --num-steps 16 --minibatch-size 32 --channels 4 4 4",
    "ppo_atari_rnd": "--num-envs 4 --num-steps 16 --minibatch-size 32 --rnd-features 8 --warmup-steps 3",
    "ppo_atari_snd": "--num-envs 4 --num-steps 16 --minibatch-size 32 --snd-features 8 --warmup-steps 3",
    "appo_atari": "--num-envs 4 --num-steps 16 --minibatch-size 32 --num-minibatches 2",
}


def training_commands():
    lines = [line.split("#")[0].strip() for line in commands((ROOT / "README.md").read_text())]
    names = [Path(line.split()[1]).stem for line in lines]
    own = zip(lines, names, strict=True)
    return [line for line, name in own if name in SMALL and "NAME" not in line and "smoke" not in line]


@pytest.mark.parametrize("line", training_commands())
def test_readme_command_runs(line, tmp_path, monkeypatch):
    """Every training command, shrunk, goes through one iteration: what its flags switch on works together."""
    import importlib

    words, name = line.split(), Path(line.split()[1]).stem
    monkeypatch.chdir(tmp_path)
    rows = 128 if name.startswith("impala") and "--replay" in line else 64  # a second batch, so that one is replayed
    small = f"{SMALL[name]} --total-timesteps {rows} --eval-episodes 0 --quiet --torch-threads 1 --run-name x".split()
    assert importlib.import_module(name).main([*words[2:], *small]) == 0
    table = (tmp_path / "runs" / "x" / "metrics.csv").read_text().splitlines()
    assert len(table) > 1 and int(table[-1].split(",")[0]) == rows


def smoke_commands():
    return [line for line in commands((ROOT / "README.md").read_text()) if "--run-name smoke" in line]


def test_every_script_has_a_smoke_command():
    assert [Path(line.split()[1]).stem for line in smoke_commands()] == [s for s in KINDS if s in SCRIPTS]


@pytest.mark.parametrize("line", smoke_commands(), ids=lambda line: line.split()[1])
def test_readme_smoke_command_runs(line, tmp_path):
    """The command the README offers for CI ends well, and in less than a minute."""
    words = line.split("#")[0].split()[1:]
    environment = os.environ | dict(PYTHONFAULTHANDLER="1")
    command = [sys.executable, ROOT / words[0], *words[1:]]
    streams = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, **streams)
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # it prints where its threads are
        output, _ = process.communicate()
    assert process.returncode == 0, output
    assert (tmp_path / "runs" / words[-1] / "eval.json").exists(), output


def test_pins():
    """Exact pins, and what the README says of them."""
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    expected = {
        "torch": "2.13.0",
        "numpy": "1.26.4",
        "gymnasium": "1.4.0",
        "envpool": "1.0.1",
        "procgen-mirror": "0.10.7",
    }
    assert expected.items() <= pins.items() and {"tyro", "tensorboard", "tqdm"} <= pins.keys()
