"""What the fork server imports once, so that workers start in a fraction of a second. Floor 3.

Named to `multiprocessing.set_forkserver_preload` by `controller.launch`. It only imports: no
threads, no device, no process group, since every worker is a fork of the process that ran it.
"""

import importlib

MODULES = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen3.modeling_qwen3",
    "shardloop.parallel.worker",
    "shardloop.trainer",
    "shardloop.engines.local",
    "shardloop.weight_sync",
)

for module in MODULES:
    importlib.import_module(module)
