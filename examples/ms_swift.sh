#!/bin/sh
# ms-swift with Muon in place of its own optimizers:
#
#   sh examples/ms_swift.sh sft path/to/model path/to/data.jsonl --learning_rate 3e-4 --num_train_epochs 1
#   NPROC_PER_NODE=8 sh examples/ms_swift.sh pt path/to/model path/to/data.jsonl --deepspeed zero3
#
# The first is `sft` or `pt`; what follows the data are options of ms-swift. PLUGINS names further plugins.
set -eu
task=$1 model=$2 data=$3
shift 3
# The plugin beside this script adds the optimizer "muonmesh".
plugin=$(dirname "$0")/ms_swift_plugin/muonmesh_plugin.py
# shellcheck disable=SC2086  # several plugins are several words
exec swift "$task" --model "$model" --dataset "$data" --tuner_type full \
    --external_plugins "$plugin" ${PLUGINS:-} --optimizer muonmesh --weight_decay 0.1 "$@"
