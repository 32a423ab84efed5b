"""A finished run to the Hugging Face Hub: its checkpoint and a model card with its evaluation.

    python benchmark/variants/hub.py runs/NAME user/repository --dry-run  # writes runs/NAME-hub
    python benchmark/variants/hub.py runs/NAME user/repository            # writes and sends it

Sending needs `pip install huggingface_hub` and `hf auth login`. An .mp4 in the run folder,
or --film, goes along.
"""

import argparse
import importlib
import json
import shutil
import sys
from importlib.metadata import distributions
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
NO_SETTING = {"run_dir", "run_name", "resume", "quiet", "device", "torch_threads", "env_threads"}
PACKAGES = ("numpy", "gymnasium", "envpool", "procgen-mirror")
CARD = """---
{metadata}
---
# {script}.py on {args[env_id]}

After {step:,} agent steps, actions drawn, scores not clipped:

| split | mean return +/- standard error | games |
|---|---|---|
{table}
{film}
    {command}

Code: revision {git}; torch {torch}; when this was written, {versions}. Ran on {cpu}, GPU: {gpu}.
The command is for the revision that wrote this: flags equal to its defaults are left out.
With these files in FOLDER, `python benchmark/evaluate.py FOLDER` plays it.
"""


def command_of(script: str, args: dict, ranks: int) -> str:
    """What a newcomer types: the flags that differ from the script's defaults of today."""
    module = importlib.import_module(script)
    start = ["python"] if ranks == 1 else ["torchrun", "--nproc-per-node", str(ranks)]
    words = [*start, str(Path(module.__file__).resolve().relative_to(ROOT))]
    module = getattr(module, "script", module)  # a variant without Args of its own
    defaults = json.loads(json.dumps(vars(module.Args())))  # no tuples
    for name, value in args.items():
        if name in NO_SETTING or value == defaults.get(name):
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return " ".join(words)


def card(config: dict, evaluation: dict, film: Path | None) -> str:
    script = config["script"]
    game = config["args"]["env_id"]
    rows = []
    result = {"task": {"type": "reinforcement-learning"}, "dataset": {"type": game, "name": game}}
    result["metrics"] = []
    for split, scores in evaluation["splits"].items():
        score = f"{scores['mean']:.2f} +/- {scores['stderr']:.2f}"
        metric = {"type": "mean_reward", "name": f"mean return, {split}", "value": score}
        result["metrics"].append(metric)
        rows.append(f"| {split} | {score} | {len(scores['returns'])} |")
    metadata = {"library_name": "pytorch", "tags": ["reinforcement-learning", script, game]}
    metadata["model-index"] = [{"name": script, "results": [result]}]
    installed = {package.name: package.version for package in distributions()}
    versions = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
    return CARD.format(
        metadata=json.dumps(metadata, indent=1),  # JSON is YAML
        step=evaluation["step"],
        table="\n".join(rows),
        film="\n[A film](replay.mp4)\n" if film else "",
        command=command_of(script, config["args"], config.get("ranks", 1)),
        versions=", ".join(versions),
        **config,
    )


def write(run: Path, film: Path | None, folder: Path):
    evaluation = json.loads((run / "eval.json").read_text())
    config = json.loads((run / "config.json").read_text())
    step = torch.load(run / "checkpoint.pt", map_location="cpu", weights_only=True)["step"]
    if step != evaluation["step"]:
        raise ValueError(f"eval.json is of step {evaluation['step']}, checkpoint.pt of {step}")
    film = film or next(run.glob("*.mp4"), None)
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(card(config, evaluation, film))
    for name in ("checkpoint.pt", "config.json", "eval.json", "metrics.csv"):
        shutil.copy(run / name, folder)
    if film:
        shutil.copy(film, folder / "replay.mp4")  # the name that the Hub shows
    else:
        (folder / "replay.mp4").unlink(missing_ok=True)  # an earlier film


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="run folder, with eval.json")
    parser.add_argument("repository", help="user/name on the Hub; made, public, if there is none")
    parser.add_argument("--film", type=Path, help="else an .mp4 in the run folder, if any")
    parser.add_argument("--dry-run", action="store_true", help="write the folder, send nothing")
    options = parser.parse_args(argv)
    folder = Path(f"{options.run.resolve()}-hub")
    try:
        write(options.run, options.film, folder)
        print(folder)
        if not options.dry_run:
            api = importlib.import_module("huggingface_hub").HfApi()  # optional
            url = api.create_repo(options.repository, exist_ok=True)
            api.upload_folder(repo_id=url.repo_id, folder_path=folder)
            print(url)
    except Exception as error:  # a damaged file or the Hub's client raises nearly anything
        print("hub.py:", type(error).__name__, *str(error).split(), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
