"""README and the scripts' pages: what they quote, draw and report equals the files that it comes from."""

import json
import re

import draw_flow
import numpy as np
import pandas as pd
import pytest

from conftest import ROOT

README = (ROOT / "README.md").read_text()
SCRIPTS = {path.stem: path.read_text() for path in sorted(ROOT.glob("*.py"))}
PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in SCRIPTS}
RESULTS = ROOT / "benchmark/results"
pages = pytest.mark.parametrize("page", PAGES)


def seeds(folder: str) -> list:
    return sorted(RESULTS.glob(f"{folder}/seed*.csv"))


def recorded(run) -> dict:
    return json.loads(run.with_suffix(".json").read_text())


def last_tenth(run) -> float:
    """Mean return of the training episodes that ended in the last tenth of the steps."""
    rows = pd.read_csv(run).dropna(subset="episode/return")
    end = rows[rows["step"] > 0.9 * recorded(run)["steps"]]
    return np.average(end["episode/return"], weights=end["episode/count"])


def evaluation(run) -> float:
    return list(recorded(run)["eval"]["splits"].values())[-1]["mean"]


def minutes_to(run, score: float) -> float:
    """Until the mean of the last rows with at least 100 episodes reaches the score."""
    rows = pd.read_csv(run)
    rows["seconds"] = (rows["step"].diff().fillna(rows["step"]) / rows["time/sps"]).cumsum()
    rows = rows.dropna(subset="episode/return")
    seconds, counts, means = rows[["seconds", "episode/count", "episode/return"]].to_numpy().T
    before = np.append(0, counts.cumsum())
    for end in np.flatnonzero(before >= 100):
        last = slice(np.flatnonzero(before <= before[end] - 100)[-1], end)
        if np.average(means[last], weights=counts[last]) >= score:
            return seconds[end - 1] / 60
    raise AssertionError(f"{run} never reaches {score}")


def cells(text: str, start: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {start}")]
    return [cell.strip() for cell in line.split("|")[1:-1]]


def test_sizes():
    assert len(README.splitlines()) <= 130 and len(README.encode()) <= 9_000
    assert {name: len(text.splitlines()) for name, text in PAGES.items() if len(text.splitlines()) > 170} == {}
    assert (ROOT / "docs/images/bigfish.webp").stat().st_size <= 1_500_000


def test_quoted_code_is_the_files():
    """The README's lines stand in the file, in this order and without a gap."""
    ((file, code),) = re.findall(r"<!-- quoted from (\S+) -->\n```python\n(.*?)```", README, flags=re.S)
    assert code in (ROOT / file).read_text() and len(code.splitlines()) >= 10


def test_lengths_of_the_scripts():
    lengths = {name: len(text.splitlines()) for name, text in SCRIPTS.items()}
    assert f"at most {max(lengths.values())} lines each" in README
    assert cells(README, "lines of the PPO file")[1] == str(lengths["ppo_procgen"])


@pytest.mark.parametrize(
    ("start", "folder"),
    [
        ("`ppo_procgen.py --preset openai` | starpilot", "two_cores/ppo_procgen-openai/starpilot"),
        ("`ppo_procgen.py --preset openai` | fruitbot", "two_cores/ppo_procgen-openai/fruitbot"),
        ("`ppo_procgen.py --precision bf16`", "default_1m/ppo_procgen-default-1m-bf16/starpilot"),
        ("`ppo_procgen.py --channels 16 32 32`", "two_cores/ppo_procgen-narrow-8m/bigfish"),
        ("`impala_procgen.py --channels 16 32 32`", "two_cores/impala_procgen-narrow-sync/starpilot"),
        ("`ppo_atari_rnd.py` | Montezuma", "rnd_control/ppo_atari_rnd-published/MontezumaRevenge"),
        ("`ppo_atari_rnd.py` | Breakout", "two_cores/ppo_atari_rnd-no-reward/Breakout"),
        ("`ppo_atari_snd.py`", "two_cores/ppo_atari_snd-no-reward-bf16/Breakout"),
        ("`appo_atari.py`", "two_cores/appo_atari-two-cores/Breakout"),
    ],
)
def test_results(start, folder):
    shown = [float(x) for x in cells(README, start)[3].split(", ")]
    assert shown == pytest.approx([last_tenth(run) for run in seeds(folder)], abs=0.5 if shown[0] > 99 else 0.051)


@pytest.mark.parametrize(
    ("start", "score", "folder"),
    [
        ("starpilot, one level", 4, "cpu/ppo_procgen/starpilot"),
        ("Pong", 15, "two_cores/appo_atari-two-cores-0.5m/Pong"),
        ("Breakout, 415", 414.66, "two_cores/appo_atari-two-cores/Breakout"),
        ("coinrun", 6.79, "procgen16_1m/ppo_procgen-openai/coinrun"),
        ("fruitbot", 10.38, "fruitbot_parts/ppo_procgen-norm-reward/fruitbot"),
    ],
)
def test_minutes(start, score, folder):
    """Of the seeds on CPU cores and of those on a GPU: the smallest and the largest."""
    name, _, *columns = cells(README, start)
    assert re.search(r"\d[\d.]*", name.removeprefix("starpilot, one level"))[0] in (str(score), f"{score:.1f}", "415")
    for column, on_gpu in zip(columns, (False, True), strict=True):
        runs = [run for run in seeds(folder) if bool(recorded(run)["gpu"]) == on_gpu]
        minutes = [minutes_to(run, score) for run in runs]
        shown = [float(x) for x in re.findall(r"\d[\d.]*", column)]
        assert bool(shown) == bool(minutes), (name, column)
        if minutes:
            ends = [min(minutes), max(minutes)][: len(shown)]
            assert shown == pytest.approx(ends, abs=0.51 if min(shown) > 9 else 0.051)


def test_linked_cells_equal_their_runs():
    """[training (evaluation)](folder): one value per seed, of the runs in that folder."""
    number = r"-?\d+\.\d\d"
    found = re.findall(
        rf"\[({number}(?:, {number})*) \(({number}(?:, {number})*)\)\]\(\.\./benchmark/results/(\S+?)\)",
        "".join(PAGES.values()),
    )
    assert len(found) >= 10
    for training, evaluated, folder in found:
        for shown, compute in ((training, last_tenth), (evaluated, evaluation)):
            assert shown == ", ".join(f"{compute(run):.2f}" for run in seeds(folder)), (folder, shown)


@pages
def test_pictures_are_drawn_by_the_committed_program(page):
    assert (ROOT / f"docs/images/flow_{page}.svg").read_text() == draw_flow.svg(page)
    assert f"](images/flow_{page}.svg)" in PAGES[page]


@pages
def test_names_in_pseudocode_and_picture(page):
    """What looks like a call in a page's pseudocode, and every box of its picture, is a name of the script."""
    text = PAGES[page].split("## Pseudocode")[1].split("```")[1]
    assert 10 <= len(text.splitlines()) - 1 <= 15
    words = {word for call in re.findall(r"([\w.]+)\(", text) for word in call.split(".")}
    words |= {word for box in draw_flow.FLOWS[page][0].values() for word in box.title.split(".")}
    missing = {word for word in words if not re.search(rf"\b{word}\b", SCRIPTS[page])}
    assert missing <= {"mean", "shuffled"}, missing


def test_published_scores():
    """The README's published scores and their errors are those of the reference files."""
    rows = pd.read_csv(ROOT / "benchmark/reference/procgen.csv").query("split == 'all_levels_PPO'")
    for start, game, step in (
        ("`ppo_procgen.py --preset openai` | starpilot", "starpilot", 999_424),
        ("`ppo_procgen.py --preset openai` | fruitbot", "fruitbot", 999_424),
        ("`ppo_procgen.py --precision bf16`", "starpilot", 999_424),
        ("`ppo_procgen.py --channels 16 32 32`", "bigfish", 7_995_392),
        ("`impala_procgen.py --channels 16 32 32`", "starpilot", 1_998_848),
    ):
        near = rows[(rows["env"] == game) & (abs(rows["step"] - step) < 0.01 * step)].iloc[0]
        shown = [float(x) for x in re.findall(r"[\d.]+", cells(README, start)[4])[:2]]
        assert shown == pytest.approx([near["last_tenth"], near["stderr"]], abs=0.051)


def test_mean_of_sixteen_games():
    """The README's row equals the page's generated table; three runs have sqrt(3) times the error as std."""
    (line,) = [line for line in PAGES["ppo_procgen"].splitlines() if "of 16 games, last tenth" in line]
    ours, theirs, deviation = re.findall(r"\d\.\d{3}", line)
    row = cells(README, "`ppo_procgen.py --preset openai` | 16 games")
    assert row[3].startswith(ours) and row[4].startswith(theirs)
    assert float(re.findall(r"[\d.]+", row[4])[1]) == pytest.approx(float(deviation) / 3**0.5, abs=6e-4)
    assert f"{100 * (1 - float(ours) / float(theirs)):.0f} % lower" in README
