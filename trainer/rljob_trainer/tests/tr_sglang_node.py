"""One node of a two-node SGLang replica, inside an outer gloo group as a trainer rank has one.

Usage: tr_sglang_node.py NODE_RANK OUTER_PORT RENDEZVOUS MODEL. Node 0 prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

TIMEOUT = timedelta(seconds=600)


def main() -> None:
    node_rank, outer_port, rendezvous, model = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    import pytest
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"tcp://[::1]:{outer_port}", rank=node_rank, world_size=2, timeout=TIMEOUT
    )
    from rljob_trainer.engines.contract import EngineSettings, GenerateRequest, SamplingParams
    from rljob_trainer.engines.sglang import SGLangEngine
    from rljob_trainer.errors import EngineDied
    from rljob_trainer.models.policy import load_causal_lm
    from rljob_trainer.sync.buckets import build_bucket

    engine = SGLangEngine()
    engine.start(
        EngineSettings(
            model_source=model,
            model_revision=None,
            dtype="Float32",
            device="cpu",
            stop_token_ids=(1, 2),
            max_concurrent_samples=8,
            max_sequence_tokens=64,
            tensor_parallel_size=2,
            num_nodes=2,
            node_rank=node_rank,
            rendezvous=rendezvous,
            host="::1",
            num_threads=1,
        )
    )
    engine.health()
    report = {}
    if node_rank == 0:
        requests = [GenerateRequest(f"p{index}", [3 + index, 4, 5], 2, 42, 1) for index in range(3)]

        def run(key: str) -> None:
            groups = engine.generate(requests, SamplingParams(8, 1.0))
            report[key] = [
                [[sample.token_ids, sample.log_probs.tolist(), sample.weight_version] for sample in group.samples]
                for group in sorted(groups, key=lambda group: group.uid)
            ]

        run("before")
        policy = load_causal_lm(model)
        engine.begin_update(1)
        engine.update([build_bucket((name, value.detach() * 1.5) for name, value in policy.named_parameters())])
        report["version"] = engine.end_update()
        run("after")
    else:
        with pytest.raises(EngineDied, match="node 1 of this replica only lends its GPUs"):
            engine.begin_update(1)
    dist.barrier()  # node 1 serves until node 0 is done, and the outer group still works
    engine.stop()
    if node_rank == 0:
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
