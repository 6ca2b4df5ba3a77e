"""A run on pods as a component of TorchX, for any of its schedulers.

    torchx run -s kubernetes examples/torchx/component.py:pods --conf /shared/conf.sh --nnodes 2

The image holds a checkout of this project, set up by ``prerequisite.sh``; ``conf`` is a file in it
or on a volume. The first replica is the master, the others are workers that wait for it.
"""

import torchx.specs as specs

# $$ stays a variable of the shell: TorchX replaces single ones by its own.
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
    """Trains as a configuration describes.

    Args:
        conf: the configuration, a path within the containers
        nnodes: number of nodes, in place of NNODES in the configuration
        image: container image with a checkout
        workspace: folder of the checkout in it
        gpu: GPUs of each node
        cpu: processors of each node
        memory_mib: memory of each node
        port: port of the first node on which all meet
        logs: LOG_DIR of the configuration, on a volume that all share: the run's secret is there
        retries: how often a run that failed begins again, from its last checkpoint
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
