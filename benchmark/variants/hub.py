"""Upload a finished run to the Hugging Face Hub: checkpoint and model card with the evaluation.

    python benchmark/variants/hub.py runs/NAME user/repository --dry-run  # writes runs/NAME-hub
    python benchmark/variants/hub.py runs/NAME user/repository            # writes and uploads it

Uploading needs `pip install huggingface_hub` and `hf auth login`. An .mp4 in the run's folder, or
--film, is included.
"""

import argparse
import importlib
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark" / "variants")]
NO_SETTING = "run_dir run_name device threads".split()
CARD = """---
{metadata}
---
# {script}.py on {game}

After {step:,} environment steps; actions are sampled and scores are not clipped:

| split | mean return ± standard error | episodes |
|---|---|---|
{table}
{film}
    {command}

{file} is a copy of the code that ran. Packages: {packages}.
The command leaves out flags that equal the present defaults.
With these files in FOLDER, `python benchmark/evaluate.py FOLDER` plays the agent.
"""


class UsageError(ValueError):
    """A mistake the user can fix: `main` prints it in one line and returns 2."""


def script_of(run: Path, command: list[str]) -> str:
    """The script or variant of a run: a run that was started from Python has only a copy of it."""
    names = [Path(command[0]).stem, *(path.stem for path in run.glob("*.py"))]
    for name in names:
        if any((folder / f"{name}.py").exists() for folder in (ROOT, ROOT / "benchmark/variants")):
            return name
    raise UsageError(f"made by {names[-1]}.py, which is not here")


def command_of(script: str, args: dict, ranks: int) -> str:
    """What a user would type: the flags that differ from the script's present defaults."""
    module = importlib.import_module(script)
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    words = [*start, str(Path(module.__file__).resolve().relative_to(ROOT))]
    module = getattr(module, "script", module)  # a variant without its own Args
    defaults = json.loads(json.dumps(asdict(module.Args())))  # tuples become lists
    for name, value in args.items():
        if name in NO_SETTING or value == defaults.get(name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def card(run: Path, config: dict, evaluation: dict, film: Path | None) -> str:
    """The text of README.md; config: of the run's last start."""
    script, game = script_of(run, config["command"]), config["args"]["env_id"]
    rows = []
    result = {"task": {"type": "reinforcement-learning"}, "dataset": {"type": game, "name": game}}
    result["metrics"] = []
    for split, scores in evaluation["splits"].items():
        score = f"{scores['mean']:.2f} ± {scores['stderr']:.2f}"
        metric = {"type": "mean_reward", "name": f"mean return, {split}", "value": score}
        result["metrics"].append(metric)
        rows.append(f"| {split} | {score} | {len(scores['returns'])} |")
    metadata = {"library_name": "pytorch", "tags": ["reinforcement-learning", script, game]}
    metadata["model-index"] = [{"name": script, "results": [result]}]
    return CARD.format(
        metadata=json.dumps(metadata, indent=1, ensure_ascii=False),  # JSON is YAML
        script=script,
        game=game,
        step=evaluation["step"],
        table="\n".join(rows),
        film="\n[A film](replay.mp4)\n" if film else "",
        command=command_of(script, config["args"], config["ranks"]),
        file=", ".join(path.name for path in run.glob("*.py")),
        packages=", ".join(f"{name} {version}" for name, version in config["versions"].items()),
    )


def write(run: Path, film: Path | None, folder: Path):
    """Write the folder that is uploaded; nothing is written if a file of the run is missing."""
    if film and not film.is_file():
        raise UsageError(f"--film {film}: no such file")
    try:
        evaluation = json.loads((run / "eval.json").read_text())
        configs = sorted(run.glob("config-*.json"), key=lambda path: int(path.stem[7:]))
        config = json.loads(configs[-1].read_text())
        checkpoint = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)
        evaluation["splits"], evaluation["step"], config["args"]["env_id"], config["command"][0]
        step = checkpoint["step"]
    except Exception as error:  # a damaged or foreign file can raise nearly anything
        wanted = "eval.json, config-<step>.json and checkpoint.pt"
        raise UsageError(f"{run}: no readable {wanted}, {error!r}") from None
    if step != evaluation["step"]:
        raise UsageError(f"eval.json is of step {evaluation['step']}, checkpoint.pt of {step}")
    film = film or next(run.glob("*.mp4"), None)
    text = card(run, config, evaluation, film)
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(text)
    for name in ("checkpoint.pt", "eval.json", "metrics.csv"):
        shutil.copy(run / name, folder)
    for path in (*configs, *run.glob("*.py")):
        shutil.copy(path, folder)
    if film:
        shutil.copy(film, folder / "replay.mp4")  # the name that the Hub shows
    else:
        (folder / "replay.mp4").unlink(missing_ok=True)  # an earlier film


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run, with eval.json")
    parser.add_argument("repository", help="user/name on the Hub; created, public, if missing")
    parser.add_argument("--film", type=Path, help="default: an .mp4 in the run's folder, if any")
    parser.add_argument("--dry-run", action="store_true", help="write the folder, do not upload")
    options = parser.parse_args(argv)
    folder = Path(f"{options.run.resolve()}-hub")
    try:
        hub = None
        if not options.dry_run:
            try:
                hub = importlib.import_module("huggingface_hub")
            except ImportError:
                raise UsageError("uploading needs `pip install huggingface_hub`") from None
        write(options.run, options.film, folder)
    except UsageError as error:
        print("hub.py:", *str(error).split(), file=sys.stderr)
        return 2
    print(folder)
    if hub:
        api = hub.HfApi()
        url = api.create_repo(options.repository, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder)
        print(url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
