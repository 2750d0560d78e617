"""What SGLang is started with, and how its parameters are read back: pure functions, no SGLang needed."""

import itertools
from dataclasses import replace

import pytest
import torch

from rljob_trainer.engines.contract import EngineSettings, FinishReason, GenerateRequest
from rljob_trainer.engines.sglang_arguments import (
    NO_NCCL,
    GPUMemory,
    build_arguments,
    check_positions,
    choose_graph_sizes,
    convert_memory_fraction,
    plan_environment,
)
from rljob_trainer.engines.sglang_samples import compute_sample_seed, judge_aborted, read_sample
from rljob_trainer.engines.sglang_weights import unfuse
from rljob_trainer.errors import ConfigurationError, EngineDied

CPU = EngineSettings("model", None, "Float32", "cpu", (2,), max_concurrent_samples=8, max_sequence_tokens=100)
CUDA = replace(CPU, device="cuda", dtype="BFloat16", memory_fraction=0.55)
KNOWN = {"disable_radix_cache", "log_level", "cuda_graph_max_bs_decode", "random_seed", "attention_backend", "tp_size"}
NEW, OLD = "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "SGL_DISABLE_TP_MEMORY_INBALANCE_CHECK"


@pytest.mark.parametrize("version", ["0.5.7", "0.5.16", "0.5.23", "0.5.16.post1"])
def test_the_dead_spelling_of_the_memory_check_is_stripped_with_a_warning(version):
    change = plan_environment(version, CUDA, {OLD: "True", "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK": "1"}, [0])
    assert change.assigned[NEW] == "0"
    assert set(change.removed) == {OLD, "SGLANG_DISABLE_TP_MEMORY_INBALANCE_CHECK"}
    assert any(f"{OLD}=True" in warning and f"{NEW}=0" in warning for warning in change.warnings)


def test_releases_before_0_5_7_know_the_old_spelling_only():
    change = plan_environment("0.5.6", CUDA, {NEW: "0"}, [0])
    assert (change.assigned[OLD], NEW in change.assigned, change.removed) == ("True", False, (NEW,))


def test_a_clean_environment_loses_nothing_and_warns_of_nothing():
    change = plan_environment("0.5.23", CUDA, {"PATH": "/bin", "PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, [0])
    assert (change.removed, change.warnings) == ((), ())
    assert change.assigned["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"
    assert change.assigned["SGLANG_BLOCK_NONZERO_RANK_CHILDREN"] == "0"


@pytest.mark.parametrize(
    ("value", "left"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments: True ,backend:native", "backend:native"),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_never_reach_the_memory_saver(name, value, left):
    change = plan_environment("0.5.16", CUDA, {name: value}, [0])
    assert change.assigned.get(name) == left
    assert (name in change.removed) is (left is None)
    assert any(name in warning for warning in change.warnings)


def test_ranks_on_cpus_are_told_where_to_run():
    change = plan_environment("0.5.23", replace(CPU, tensor_parallel_size=2, num_threads=1), {}, {3, 0, 1})
    assert change.assigned["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1,3|0,1,3"
    assert change.assigned["SGLANG_USE_CPU_ENGINE"] == "1"
    assert change.assigned["OMP_NUM_THREADS"] == "1"


def test_ranks_on_cpus_do_without_nccl_and_compiler_and_ranks_on_gpus_keep_them():
    assigned = plan_environment("0.5.23", CPU, {}, [0]).assigned
    assert (assigned["SGLANG_NCCL_SO_PATH"], assigned["TORCHDYNAMO_DISABLE"]) == (NO_NCCL, "1")
    names = {"SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH", "SGLANG_CPU_OMP_THREADS_BIND", "TORCHDYNAMO_DISABLE"}
    assert not names & set(plan_environment("0.5.23", CUDA, {}, [0]).assigned)


def test_arguments_on_gpus():
    arguments = build_arguments(replace(CUDA, tensor_parallel_size=2, model_revision="main"), KNOWN, nccl_port=7)
    expected = {
        "model_path": "model",
        "revision": "main",
        "dtype": "bfloat16",
        "device": "cuda",
        "tp_size": 2,
        "nnodes": 1,
        "context_length": 106,
        "max_running_requests": 9,
        "enable_memory_saver": True,
        "mem_fraction_static": 0.55,
        "cuda_graph_bs_decode": [1, 2, 3, 4, 6, 8],
        "nccl_port": 7,
        "host": "127.0.0.1",
        "skip_tokenizer_init": True,
    }
    assert {name: arguments.get(name) for name in expected} == expected
    assert "dist_init_addr" not in arguments
    # Nobody takes turns with an engine that has its GPUs to itself.
    assert build_arguments(replace(CUDA, may_sleep=False), KNOWN, nccl_port=7)["enable_memory_saver"] is False


def test_sequences_beyond_the_models_positions_are_refused():
    check_positions(100, 100)
    with pytest.raises(ConfigurationError, match=r"maxPromptTokens \+ .*maxResponseTokens: 101 .* use at most 100"):
        check_positions(101, 100)


GIB = 2**30


def test_the_memory_fraction_is_of_the_card_and_sglangs_of_what_is_free():
    cards = [GPUMemory(free_bytes=140 * GIB, total_bytes=140 * GIB), GPUMemory(70 * GIB, 140 * GIB)]
    assert convert_memory_fraction(0.4, cards[:1]) == 0.4
    assert convert_memory_fraction(0.4, cards) == 0.8
    assert build_arguments(CUDA, KNOWN, nccl_port=7, cards=cards[:1])["mem_fraction_static"] == 0.55
    with pytest.raises(ConfigurationError, match=r"spec\.rollout\.memoryFraction: 0\.6 .* 70\.0 GiB .* at most 0\.47"):
        convert_memory_fraction(0.6, cards)


def test_graph_arguments_of_the_user_replace_ours():
    arguments = build_arguments(replace(CUDA, engine_args={"cuda_graph_max_bs_decode": 4}), KNOWN, nccl_port=7)
    assert arguments["cuda_graph_max_bs_decode"] == 4
    assert "cuda_graph_bs_decode" not in arguments


def test_the_users_arguments_win_over_defaults():
    settings = replace(CPU, engine_args={"log_level": "info", "disable_radix_cache": True})
    arguments = build_arguments(settings, KNOWN, nccl_port=7)
    assert (arguments["log_level"], arguments["disable_radix_cache"]) == ("info", True)
    assert (arguments["attention_backend"], arguments["max_total_tokens"]) == ("torch_native", 8 * 106)
    assert "enable_memory_saver" not in arguments


def test_schedulers_sleep_between_turns_on_cpus_only():
    assert build_arguments(CPU, KNOWN, nccl_port=7)["sleep_on_idle"] is True
    assert "sleep_on_idle" not in build_arguments(CUDA, KNOWN, nccl_port=7)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tp_size", r"engineArgs\.tp_size: decided by other fields"),
        ("no_such", r"engineArgs\.no_such: .*no such argument"),
    ],
)
def test_arguments_nobody_may_set_or_knows_are_refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        build_arguments(replace(CPU, engine_args={name: 1}), KNOWN, nccl_port=7)


def test_addresses_of_both_families():
    """`dist_init_addr` carries brackets, `host` none (sglang #2892)."""
    one_node = build_arguments(replace(CPU, host="fd00::7"), KNOWN, nccl_port=7)
    assert (one_node["host"], one_node["nccl_port"]) == ("::1", 7)
    settings = replace(CPU, host="fd00::7", num_nodes=2, node_rank=1, rendezvous="[fd00::6]:5000")
    two_nodes = build_arguments(settings, KNOWN, nccl_port=7)
    assert (two_nodes["dist_init_addr"], two_nodes["nnodes"], two_nodes["node_rank"]) == ("[fd00::6]:5000", 2, 1)
    assert "nccl_port" not in two_nodes
    assert plan_environment("0.5.23", settings, {}, [0]).assigned["SGLANG_HOST_IP"] == "fd00::7"


def test_without_ipv4_loopback_ranks_use_no_queue_that_needs_it():
    settings = replace(CPU, host="fd00::7", tensor_parallel_size=2)
    name = "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER"
    assert plan_environment("0.5.23", settings, {}, [0], has_ipv4_loopback=False).assigned[name] == "0"
    assert name not in plan_environment("0.5.23", settings, {}, [0]).assigned


@pytest.mark.parametrize("limit", [1, 2, 7, 64, 500, 512])
def test_graphs_reach_exactly_the_concurrency(limit):
    sizes = choose_graph_sizes(limit)
    assert sizes[-1] == limit
    assert sizes == sorted(set(sizes))
    assert all(larger <= 2 * smaller for smaller, larger in itertools.pairwise(sizes))
    assert len(sizes) <= 18


def test_a_samples_seed_depends_on_what_identifies_it():
    def make(seed=1, step=1, uid="a"):
        return GenerateRequest(uid, [1], 2, seed, step)

    requests = [make(), make(seed=2), make(step=2), make(uid="b")]
    seeds = [compute_sample_seed(request, index) for request in requests for index in range(2)]
    assert len(set(seeds)) == len(seeds)
    assert seeds[:2] == [compute_sample_seed(make(), index) for index in range(2)]
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.parametrize(
    ("token_ids", "want"),
    [
        ([], (FinishReason.ABORT, 0)),
        ([5, 6], (FinishReason.ABORT, 2)),
        ([5, 2], (FinishReason.STOP, 2)),
        ([5, 2, 7], (FinishReason.STOP, 2)),
        ([5, 6, 7, 8], (FinishReason.LENGTH, 4)),
        ([5, 6, 7, 1], (FinishReason.STOP, 4)),
    ],
)
def test_an_abort_that_meets_the_end_of_a_response_does_not_spoil_it(token_ids, want):
    assert judge_aborted(token_ids, (1, 2), 4) == want


def make_output(token_ids, reason, log_prob=-1.0):
    return {
        "output_ids": token_ids,
        "meta_info": {
            "finish_reason": {"type": reason},
            "output_token_logprobs": [(log_prob, token, None) for token in token_ids],
            "weight_version": "3",
        },
    }


def test_a_response_that_was_cut_short_is_not_taken_for_a_long_one():
    request = GenerateRequest("a", [1], 1, 0, 0)
    sample = read_sample(make_output([5, 6, 7], "length"), request, (2,), 3)
    assert (sample.token_ids, sample.finish_reason, sample.weight_version) == ([5, 6, 7], FinishReason.LENGTH, 3)
    with pytest.raises(EngineDied, match=r"cut a sample of a after 3 of 4 tokens"):
        read_sample(make_output([5, 6, 7], "length"), request, (2,), 4)
    with pytest.raises(EngineDied, match="not finite"):
        read_sample(make_output([5, 2], "stop", float("nan")), request, (2,), 4)


HIDDEN, HEAD, VOCABULARY, INTERMEDIATE = 12, 4, 10, 8


def make_model(num_heads, num_kv_heads):
    """Parameters of one layer by Hugging Face name, every element different."""
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.layers.0.self_attn.q_proj.weight": (num_heads * HEAD, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (num_kv_heads * HEAD, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (num_kv_heads * HEAD, HIDDEN),
        "model.layers.0.self_attn.q_proj.bias": (num_heads * HEAD,),
        "model.layers.0.self_attn.k_proj.bias": (num_kv_heads * HEAD,),
        "model.layers.0.self_attn.v_proj.bias": (num_kv_heads * HEAD,),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, num_heads * HEAD),
        "model.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        "model.norm.weight": (HIDDEN,),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def fuse(model, size, num_kv_heads, padded_vocabulary):
    """As SGLang lays them out: stacked, cut over ranks, KV heads repeated, the vocabulary padded."""
    shards = []
    for rank in range(size):

        def cut(name, dim=0, rank=rank):
            return model[name].chunk(size, dim)[rank]

        def cut_kv(name, rank=rank):
            pieces = model[name].chunk(min(size, num_kv_heads))
            return pieces[rank * len(pieces) // size]

        layer = "model.layers.0"
        embedding = torch.nn.functional.pad(
            model["model.embed_tokens.weight"], (0, 0, 0, padded_vocabulary - VOCABULARY)
        )
        shard = {
            "model.embed_tokens.weight": embedding.chunk(size)[rank],
            f"{layer}.self_attn.o_proj.weight": cut(f"{layer}.self_attn.o_proj.weight", 1),
            f"{layer}.mlp.down_proj.weight": cut(f"{layer}.mlp.down_proj.weight", 1),
            "model.norm.weight": model["model.norm.weight"],
            f"{layer}.mlp.gate_up_proj.weight": torch.cat(
                [cut(f"{layer}.mlp.gate_proj.weight"), cut(f"{layer}.mlp.up_proj.weight")]
            ),
        }
        for kind in ("weight", "bias"):
            shard[f"{layer}.self_attn.qkv_proj.{kind}"] = torch.cat(
                [
                    cut(f"{layer}.self_attn.q_proj.{kind}"),
                    cut_kv(f"{layer}.self_attn.k_proj.{kind}"),
                    cut_kv(f"{layer}.self_attn.v_proj.{kind}"),
                ]
            )
        shards.append(shard)
    return shards


@pytest.mark.parametrize(("size", "num_heads", "num_kv_heads"), [(1, 3, 1), (2, 4, 2), (2, 2, 1), (4, 4, 2)])
def test_fused_and_cut_parameters_come_back_under_the_trainers_names(size, num_heads, num_kv_heads):
    model = make_model(num_heads, num_kv_heads)
    shards = fuse(model, size, num_kv_heads, padded_vocabulary=16)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.items()}
    found = dict(unfuse(shards, shapes, num_kv_heads=num_kv_heads))
    assert set(found) == set(model)
    for name, tensor in model.items():
        assert torch.equal(found[name], tensor), name
