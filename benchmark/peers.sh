#!/bin/bash
# The implementations that benchmark/speed.py measures ours against, each in its own virtual environment.
#
#     bash benchmark/peers.sh FOLDER            # makes FOLDER/sb3
#     python benchmark/speed.py appo_atari --against sb3 --peer-python FOLDER/sb3/bin/python
#
# CleanRL needs none: `speed.py --against cleanrl` runs the files of a clone with the packages of requirements.txt.
set -e
folder=${1:?folder for the virtual environments}
torch="torch==${TORCH:-2.13.0}"

make() {
    python -m venv "$folder/$1"
    "$folder/$1/bin/pip" install -q "$torch" "${@:2}"
    "$folder/$1/bin/pip" check
}

make sb3 stable-baselines3==2.9.2 ale-py==0.11.2 opencv-python-headless
