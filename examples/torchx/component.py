"""Defines a TorchX component that trains on pods, for any scheduler of TorchX.

    torchx run -s kubernetes examples/torchx/component.py:pods --conf /shared/conf.sh --nnodes 2

The image contains a checkout of this project that was set up by ``prerequisite.sh``. ``conf`` is a
file in the image or on a volume. The first replica is the master. The other replicas are workers
that wait for the master.
"""

import torchx.specs as specs

# Variables of the shell start with $$, because TorchX replaces variables that start with a single
# $.
START = """
if ((%replica% == 0)); then exec bash run_master.sh "$$CONF" --nnodes "$$NNODES"; fi
exec bash run_worker.sh --master-addr "$${%host%:=localhost}" \\
  --node-rank %replica% --log-dir "$$LOGS"
"""


def pods(
    conf: str,
    nnodes: int = 2,
    image: str = "registry.example.com/megatron-adaptive:latest",
    workspace: str = "/workspace",
    gpu: int = 2,
    cpu: int = 8,
    memory_mib: int = 65536,
    port: int = 29500,
    logs: str = "/shared/logs",
    retries: int = 0,
) -> specs.AppDef:
    """Starts a training job that is described by a configuration file.

    Args:
        conf: path of the configuration file in the containers
        nnodes: number of nodes, overrides NNODES of the configuration
        image: container image with a checkout
        workspace: folder of the checkout in the image
        gpu: GPUs per node
        cpu: processors per node
        memory_mib: memory per node, in MiB
        port: port on the first node to which all nodes connect
        logs: LOG_DIR of the configuration, on a shared volume; also contains the job's secret
        retries: number of times that a failed run restarts from its last checkpoint
    """
    start = START.replace("%replica%", specs.macros.replica_id)
    start = start.replace("%host%", specs.macros.rank0_env)
    return specs.AppDef(
        name="pods",
        roles=[
            specs.Role(
                name="node",
                image=image,
                entrypoint="bash",
                args=["-euc", 'cd -- "$$WORKSPACE"\n' + start],
                env={
                    "CONF": conf,
                    "NNODES": str(nnodes),
                    "WORKSPACE": workspace,
                    "MASTER_PORT": str(port),
                    "LOGS": logs,
                },
                num_replicas=nnodes,
                max_retries=retries,
                retry_policy=specs.RetryPolicy.APPLICATION,
                resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memory_mib),
                port_map={"meeting": port},
            )
        ],
    )
