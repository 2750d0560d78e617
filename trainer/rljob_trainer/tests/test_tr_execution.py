"""What is compiled, and that packs of one size are compiled once (shapes as in `models.packed_attention`)."""

import pytest
import torch
from test_tr_memory_plan import request
from torch import nn

from rljob_trainer.memory_plan import plan_memory
from rljob_trainer.models.execution import decide_execution
from rljob_trainer.models.packed_attention import build_packing, packed_attention
from rljob_trainer.models.packed_batch import PackLayout, pack_sequences
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.models.sharding import compile_model

CPU = torch.device("cpu")
GPU_PLAN = plan_memory(request())


@pytest.mark.parametrize(
    ("plan", "dtype", "compile", "sequence_parallel_size", "is_compiled", "is_padded"),
    [
        (GPU_PLAN, "BFloat16", "Auto", 1, True, False),
        (GPU_PLAN, "BFloat16", "Never", 1, False, False),
        (GPU_PLAN, "BFloat16", "Auto", 2, False, False),
        # The variable-length kernel takes half precision only: Float32 is attended to in the padded layout.
        (GPU_PLAN, "Float32", "Auto", 1, False, True),
        (GPU_PLAN, "Float32", "Always", 1, True, True),
        (None, "BFloat16", "Auto", 1, False, True),
        (None, "Float32", "Always", 1, True, True),
    ],
)
def test_what_is_compiled(make_job, plan, dtype, compile, sequence_parallel_size, is_compiled, is_padded):
    job = make_job(
        run_directory="x", dtype=dtype, compile=compile, training={"sequence_parallel_size": sequence_parallel_size}
    )
    execution = decide_execution(job, plan)
    assert execution.is_compiled is is_compiled
    assert execution.layout.with_padded_layout is is_padded
    assert (execution.layout.budget_tokens is not None) is is_compiled, "packs are filled up for compiled code only"


def test_packs_of_one_size_are_compiled_once(tiny_model):
    """Also where attention goes through the padded layout, which has another shape in each of them."""
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    policy = PolicyModel(load_causal_lm(tiny_model))
    compile_model(policy, backend=count)
    layout = PackLayout(budget_tokens=64, max_length=16)
    num_graphs, shapes = [], set()
    for lengths in ([10, 10, 10, 10], [15, 12, 13], [8, 8, 8, 8, 8]):
        pack = pack_sequences([[3] * (n - 1) for n in lengths], [[4, 5]] * len(lengths), CPU, layout)
        shapes.add(tuple(pack.packing.padded_index_SL.shape))
        assert pack.input_ids_1N.shape == (1, 64)
        policy(pack, temperature=1.0)
        num_graphs.append(len(graphs))
    assert len(shapes) == 3
    assert num_graphs[0] > 0
    assert num_graphs == [num_graphs[0]] * 3


@pytest.mark.parametrize("sliding_window", [4, 8, None])
def test_the_longest_sequence_of_the_job_does_not_change_attention(sliding_window):
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 8, 6), torch.randn(1, 2, 8, 6), torch.randn(1, 2, 8, 6)
    outputs = [
        packed_attention(
            nn.Identity(),
            query,
            key,
            value,
            None,
            packing=build_packing([5, 3], CPU, max_length=max_length),
            sliding_window=sliding_window,
        )[0]
        for max_length in (None, 16)
    ]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-6)
