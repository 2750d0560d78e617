"""Packed log-probabilities against transformers' own padded forward, and the chunked head."""

import math

import pytest
import torch
from tr_tiny import assert_same_gradient, save_tiny_model

from rljob_trainer.errors import ConfigurationError
from rljob_trainer.models.log_probs import HeadOptions, compute_entropy, compute_log_probs
from rljob_trainer.models.packed_batch import PackLayout, pack_sequences
from rljob_trainer.models.policy import PolicyModel, find_stop_token_ids, load_causal_lm, load_config
from rljob_trainer.models.sharding import compile_model

CPU = torch.device("cpu")
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [13, 14]]
RESPONSES = [[15, 16, 2], [17, 18, 19, 20, 21], [22], [23, 24, 25, 2]]


def padded_log_probs(model, prompts, responses, temperature):
    """Left-padded batch through transformers' SDPA path, positions from 0 at the first real token."""
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits.float() / temperature
    log_probs = torch.log_softmax(logits, -1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    return torch.cat([log_probs[index, longest - 1 - len(row) :] for index, row in enumerate(responses)])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("sliding", [False, True])
def test_packed_equals_padded_in_value_and_gradient(tmp_path, temperature, sliding):
    extra = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1} if sliding else {}
    source = str(save_tiny_model(tmp_path, **extra))
    policy = PolicyModel(load_causal_lm(source))
    reference = load_causal_lm(source, attention="eager")
    packed, _ = policy(pack_sequences(PROMPTS, RESPONSES, CPU), temperature=temperature)
    padded = padded_log_probs(reference, PROMPTS, RESPONSES, temperature)
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(packed))
    (packed * weights).sum().backward()
    (padded * weights).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_same_gradient({name: parameter.grad for name, parameter in policy.causal_lm.named_parameters()}, expected)


def test_log_probs_do_not_depend_on_the_pack(tiny_model):
    """One row alone, rows together, rows in another order: the same to 1e-5 (fp32)."""
    policy = PolicyModel(load_causal_lm(tiny_model))
    with torch.no_grad():
        together, _ = policy(pack_sequences(PROMPTS, RESPONSES, CPU), temperature=1.0)
        alone = torch.cat(
            [
                policy(pack_sequences([prompt], [response], CPU), temperature=1.0)[0]
                for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
            ]
        )
        reverse, _ = policy(pack_sequences(PROMPTS[::-1], RESPONSES[::-1], CPU), temperature=1.0)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    pieces = list(reverse.split([len(response) for response in RESPONSES[::-1]]))
    torch.testing.assert_close(together, torch.cat(pieces[::-1]), rtol=1e-5, atol=1e-5)


def test_tempered_log_probs():
    """log-softmax([2, 1, 0] / 0.6), the numbers of TRL 4159."""
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    log_probs, _ = compute_log_probs(logits, torch.tensor([0, 1, 2]), lambda hidden: hidden, temperature=0.6)
    torch.testing.assert_close(log_probs, torch.tensor([-0.202573100, -1.869239768, -3.535906433]))


@pytest.mark.parametrize("with_entropy_gradient", [False, True])
def test_chunks_change_neither_value_nor_gradient(with_entropy_gradient):
    torch.manual_seed(1)
    results = []
    for options in (
        HeadOptions(1000),
        HeadOptions(7),
        HeadOptions(1),
        HeadOptions(7, pad_chunks=True),
        HeadOptions(7, keep_logits=True),
        HeadOptions(1000, pad_chunks=True),
    ):
        torch.manual_seed(1)
        hidden = torch.randn(23, 8, requires_grad=True)
        head = torch.nn.Linear(8, 11)
        log_probs, entropy = compute_log_probs(
            hidden,
            torch.arange(23) % 11,
            head,
            temperature=0.7,
            with_entropy_gradient=with_entropy_gradient,
            options=options,
        )
        (log_probs.sum() + (entropy.sum() if with_entropy_gradient else 0)).backward()
        results.append((log_probs.detach(), entropy.detach(), hidden.grad, head.weight.grad))
    for result in results[1:]:
        for value, expected in zip(result, results[0], strict=True):
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([0.0, -math.inf], 0.0),
        ([0.0, 0.0, -math.inf], 0.6931471805599453),
        ([65504.0, -65504.0], 0.0),
        ([10.0, 0.0], 0.000499377586),
        ([0.0] * 8, 2.0794415416798357),
    ],
)
def test_entropy_is_finite_in_value_and_gradient(logits, expected):
    values = torch.tensor([logits], requires_grad=True)
    entropy = compute_entropy(values)
    assert entropy.item() == pytest.approx(expected, abs=1e-6)
    entropy.sum().backward()
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("max_length", [0, 5, 16])
def test_padding_changes_neither_value_nor_gradient(tiny_model, max_length):
    """Pads form sequences of their own, so the same tokens get the same numbers in a pack of constant size."""
    results = []
    for layout in (PackLayout(), PackLayout(budget_tokens=64, max_length=max_length)):
        policy = PolicyModel(load_causal_lm(tiny_model))
        batch = pack_sequences(PROMPTS, RESPONSES, CPU, layout)
        log_probs, entropy = policy(batch, temperature=0.7)
        log_probs.sum().backward()
        gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
        results.append((log_probs.detach(), entropy.detach(), gradients))
    assert batch.input_ids_1N.shape[1] in (8, 16, 32, 64)
    (log_probs, entropy, gradients), (padded_log_probs, padded_entropy, padded_gradients) = results
    torch.testing.assert_close(padded_log_probs, log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(padded_entropy, entropy, rtol=1e-5, atol=1e-5)
    assert_same_gradient(padded_gradients, gradients)


def test_compiled_blocks_give_the_same_gradient(tiny_model):
    """`eager` traces and guards like the real backend, and needs no compiler."""
    results = []
    for is_compiled in (False, True):
        policy = PolicyModel(load_causal_lm(tiny_model))
        layout = PackLayout(budget_tokens=64, max_length=16)
        if is_compiled:
            compile_model(policy, backend="eager")
        for prompts, responses in ((PROMPTS, RESPONSES), (PROMPTS[:2], RESPONSES[:2])):
            log_probs, entropy = policy(pack_sequences(prompts, responses, CPU, layout), temperature=0.7)
            (log_probs.sum() + 0 * entropy.sum()).backward()
        results.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    assert_same_gradient(results[1], results[0])


def test_packs_have_few_shapes():
    layout = PackLayout(budget_tokens=8192, max_length=512)
    sizes = {layout.pad_tokens(num_tokens) for num_tokens in range(1, 8193)}
    assert sizes == {1024, 2048, 4096, 8192}
    assert layout.pad_tokens(8193) == 9216  # a row longer than the budget
    assert layout.pad_sequences(3, 8192) == 128
    assert layout.pad_sequences(129, 8192) == 256


def test_an_empty_pack_keeps_every_parameter_in_the_graph(tiny_model):
    policy = PolicyModel(load_causal_lm(tiny_model))
    log_probs, _ = policy(pack_sequences([], [], CPU), temperature=1.0)
    (log_probs.sum() * 0).backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_an_empty_prompt_is_an_error():
    with pytest.raises(ValueError, match="empty prompt"):
        pack_sequences([[]], [[1]], CPU)


def test_blocks_are_found(tiny_model):
    assert len(PolicyModel(load_causal_lm(tiny_model)).blocks) == 2


def test_all_stop_ids_are_found(tiny_model):
    class Tokenizer:
        eos_token_id = 7

    assert find_stop_token_ids(tiny_model, None, Tokenizer()) == (1, 2, 7)


def test_a_missing_directory_names_its_neighbours(tmp_path):
    (tmp_path / "right").mkdir()
    with pytest.raises(
        ConfigurationError, match=r"spec\.model\.source: directory '.*/wrong' does not exist; beside it are right"
    ):
        load_config(str(tmp_path / "wrong"))


def test_a_relative_path_is_never_taken_for_a_hub_id():
    with pytest.raises(ConfigurationError, match="does not exist"):
        load_config("runs/no/model")


def test_weights_that_do_not_fit_the_config_are_refused(tmp_path):
    import json

    source = save_tiny_model(tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"], config["layer_types"] = 3, ["full_attention"] * 3
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=r"lack \d+ tensors"):
        load_causal_lm(str(source))


def test_layers_with_recurrent_state_are_refused(tmp_path):
    import json

    source = save_tiny_model(tmp_path)
    config = json.loads((source / "config.json").read_text())
    config["layer_types"] = ["full_attention", "chunked_attention"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match="chunked_attention"):
        load_config(str(source))
