"""`osprey pretrain` with FSDP2 over gloo, for test_pretrain_processes: accelerate turns FSDP on for cards only."""

import sys

from accelerate import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from osprey.cli.main import main
from osprey.train import pretrain as stage

make_trainer = stage.make_trainer


def sharded(*args):
    trainer = make_trainer(*args)
    state = trainer.accelerator.state
    for shared in (state._shared_state, PartialState._shared_state):  # the former is refreshed from the latter
        shared["distributed_type"] = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", state_dict_type="FULL_STATE_DICT"
    )
    trainer.is_fsdp_enabled = True
    return trainer


stage.make_trainer = sharded
sys.exit(main(sys.argv[1:]))
