"""The export is a model that transformers loads: same logits, tokenizer and stop tokens, complete or not there."""

import pytest
import torch
from tr_families import FAMILIES
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rljob_trainer.checkpoint.export import export_policy
from rljob_trainer.errors import CheckpointError
from rljob_trainer.models.policy import PolicyModel, load_causal_lm
from rljob_trainer.quickstart.model import build_tokenizer

IDS = torch.tensor([[3, 4, 5, 6, 7, 8]])


def train_a_little(model):
    """Weights other than those of the source; tied ones stay one tensor."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_an_export_has_the_logits_of_the_policy(tmp_path, family, tied):
    torch.manual_seed(0)
    source, target = tmp_path / "source", tmp_path / "export" / "step-3"
    model = FAMILIES[family](tied)
    model.generation_config = GenerationConfig(eos_token_id=[1, 2], pad_token_id=0)
    model.save_pretrained(source)
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(source)
    policy = PolicyModel(load_causal_lm(str(source), attention="sdpa"))
    train_a_little(policy)
    export_policy(target, policy.state_dict(), source=str(source), revision=None, dtype=torch.float32)

    exported = AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        logits = exported(IDS).logits
        assert torch.equal(logits, policy.causal_lm(IDS).logits)
        assert not torch.allclose(logits, model.eval()(IDS).logits, atol=1e-3)
    assert (exported.lm_head.weight is exported.model.embed_tokens.weight) == tied
    assert exported.generation_config.eos_token_id == [1, 2]
    assert AutoTokenizer.from_pretrained(target).encode("1 + 2 =") == tokenizer.encode("1 + 2 =")
    assert not target.with_name("step-3.tmp").exists()


def test_an_export_replaces_remains_and_refuses_other_weights(tmp_path):
    source, target = tmp_path / "source", tmp_path / "step-3"
    model = FAMILIES["qwen2"](True)
    model.save_pretrained(source)
    build_tokenizer().save_pretrained(source)
    target.with_name("step-3.tmp").mkdir()
    (target.with_name("step-3.tmp") / "half").write_text("")
    weights = PolicyModel(load_causal_lm(str(source))).state_dict()
    export_policy(target, weights, source=str(source), revision=None, dtype=torch.bfloat16)
    assert not (target / "half").exists()
    assert {tensor.dtype for tensor in AutoModelForCausalLM.from_pretrained(target).state_dict().values()} == {
        torch.bfloat16
    }
    weights.pop("causal_lm.model.norm.weight")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        export_policy(tmp_path / "step-4", weights, source=str(source), revision=None, dtype=torch.float32)
    assert not (tmp_path / "step-4").exists()
