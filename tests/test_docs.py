"""README and docs: every link, test, metric and command they name exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import report

from conftest import ROOT

SCRIPTS = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmark/**/README.md")])
names = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
FENCE = r"(?s)```(\w*)\n(.*?)```"
METRIC = r"(?:episode|eval|ext|loss|train|time|int|async|replay)/\w+"


@names
def test_links(page):
    """Files, headings and lines that a page links to exist; a line contains the code quoted next to it."""
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?://)([^)\s]+)\)", re.sub(FENCE, "", text)):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        if path.suffix == ".md" and anchor:
            headings = re.findall(r"(?m)^#+ (.*)", path.read_text())
            assert anchor in [re.sub(r"[^\w -]", "", x).strip().lower().replace(" ", "-") for x in headings], target
    for code, _, file, number in report.LINK.findall(text):
        assert code in (ROOT / file).read_text().splitlines()[int(number) - 1], (file, number, code)


@names
def test_named_tests_and_metrics_exist(page):
    text = page.read_text()
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    sources = "".join(SCRIPTS.values()).replace("return_{split}", 'return_train" "eval/return_test')
    assert not [name for name in re.findall(r"`(test_\w+)`", text) if f"def {name}(" not in tests]
    assert not [name for name in re.findall(rf"`({METRIC})`", text) if f'"{name}"' not in sources]


def test_every_metric_is_explained():
    text = (ROOT / "docs/metrics.md").read_text()
    named = re.findall(rf'"({METRIC})"', "".join(SCRIPTS.values()))
    assert not [name for name in named if f"`{name}`" not in text]


def commands(text: str) -> list[list[str]]:
    """The words of each `python SCRIPT.py ...` line in the shell blocks of a page."""
    text = re.sub(r"<!-- results -->.*?<!-- end of results -->", "", text, flags=re.S)
    blocks = [body for kind, body in re.findall(FENCE, text) if kind in ("sh", "bash", "")]
    lines = (line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines())
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("python ")]
    return [words for words in found if words[1].removesuffix(".py") in SCRIPTS]


COMMANDS = [words for page in PAGES for words in commands(page.read_text())]
SAME = r"--(env-id|seed|threads|num-levels|total-timesteps|run-name) \S+ ?"  # flags that switch nothing on
TRAINING = {re.sub(SAME, "", " ".join(words)): words for words in COMMANDS if "--resume" not in words}
SMALL = {  # appended to a command, to run two iterations of its algorithm in seconds
    "ppo_procgen": "--channels 4 4 4",
    "impala_procgen": "--channels 4 4 4 --num-groups 4",
    "ppo_atari_rnd": "--rnd-features 8 --warmup-steps 3",
    "ppo_atari_snd": "--snd-features 8 --warmup-steps 3 --update-epochs 1",
    "appo_atari": "--num-minibatches 2",
}
ALL = "--num-envs 4 --num-steps 16 --minibatch-size 32 --total-timesteps 128 --eval-episodes 0 --threads 1 --run-name x"


@pytest.mark.parametrize("command", TRAINING)
def test_command_runs(command, tmp_path, monkeypatch):
    """Training commands, shrunk, run for two iterations: what their flags switch on works together."""
    words = TRAINING[command]
    name = Path(words[1]).stem
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module(name).main([*words[2:], *SMALL[name].split(), *ALL.split()]) == 0
    assert (tmp_path / "runs/x/metrics.csv").read_text().splitlines()[-1].startswith("128,")
