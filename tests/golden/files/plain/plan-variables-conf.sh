# shellcheck shell=bash disable=SC2034,SC1091
MODEL=flags.txt
DATA=mock
DEVICE=cpu
TRAIN_ITERS=3
. "$(dirname "${BASH_SOURCE[0]}")/plan.sh"
