"""The target against its goldens, absorbed against expanded, and a tree against its paths."""
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiny
from helpers import GOLDEN
from invariants import UNWRITTEN, close, nodes_score_like_their_paths
from model import Config, Experts, Rope, chain
from verify import commit

every_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)


@every_architecture
@pytest.mark.parametrize("expanded", [False, True])
def test_score_equals_golden(name, expanded):
    e = load_file(GOLDEN / "targets" / name / "expected.safetensors")
    logits, hidden = tiny.golden(name, torch.float32).score(e["input_ids"], expanded)
    close(logits, e["logits"], 1e-5)
    close(hidden, e["hidden"], 1e-5)


@every_architecture
def test_absorbed_equals_expanded(name):
    target = tiny.golden(name)
    ids = torch.tensor(tiny.prompts(256, 40, 40, 40))
    for absorbed, expanded in zip(target.score(ids), target.score(ids, expanded=True)):
        close(absorbed, expanded, 1e-11)


@every_architecture
@pytest.mark.parametrize("seed", range(3))
def test_node_scores_like_its_path(name, seed):
    tree = tiny.random_tree(3, 4 + 5 * seed, 256, seed)
    nodes_score_like_their_paths(tiny.golden(name), tree, [[0, 1, 9], [33, 2, 70], [5, 5, 0]][seed])


def test_node_scores_like_its_path_far_out_where_yarn_stretches():
    target = tiny.golden("deepseek_v3")
    assert target.config.rope.original == 64
    nodes_score_like_their_paths(target, tiny.random_tree(1, 6, 256), [500])


@every_architecture
def test_score_equals_prefill_in_any_chunks(name):
    """Committed latents carry all that a later chunk needs: chunks of 7, 1, 12 and 4 give what one pass gives."""
    target, ids = tiny.golden(name), torch.tensor(tiny.prompts(256, 24, 24))
    target.setup_cache(2, 24)
    target.cache.fill_(UNWRITTEN)
    done, logits = 0, []
    for n in (7, 1, 12, 4):
        length = torch.full((2,), done)
        out, _, latents = target(chain(ids[:, done:done + n]), length, done)
        commit(target, latents, chain(ids[:, done:done + n]).depth, length, torch.full((2,), n))
        logits.append(out)
        done += n
    close(torch.cat(logits, 1), target.score(ids)[0], 1e-11)


def test_forward_writes_nothing():
    target = tiny.golden("moonlight")
    target.setup_cache(2, 20)
    target.cache.fill_(UNWRITTEN)
    target(tiny.random_tree(2, 9, 256), torch.tensor([0, 0]), 20, (0, 1))
    assert (target.cache == UNWRITTEN).all()


def test_span_is_only_a_bound():
    """Any span that covers the committed slots gives the same logits."""
    target, tree = tiny.golden("glm4_moe_lite"), tiny.random_tree(2, 9, 256)
    target.setup_cache(2, 64)
    target.cache.normal_(generator=torch.Generator().manual_seed(0))
    length = torch.tensor([5, 11])
    base = target(tree, length, 11)[0]
    for span in (12, 32, 64):
        close(target(tree, length, span)[0], base, 1e-11)


def test_last_selects_one_node():
    target, ids = tiny.golden("deepseek_v3"), torch.tensor(tiny.prompts(256, 9, 9))
    target.setup_cache(2, 9)
    zero = torch.zeros(2, dtype=torch.long)
    every, last = target(chain(ids), zero, 0)[0], target(chain(ids), zero, 0, last=torch.tensor([8, 3]))[0]
    close(last, torch.stack((every[0, 8:9], every[1, 3:4])), 1e-11)


def test_taps_are_layer_outputs():
    """Tap i is hidden[i + 1]: the output of layer i, not its input."""
    target, ids = tiny.golden("kimi_k2"), torch.tensor(tiny.prompts(256, 9, 9))
    target.setup_cache(2, 0)
    _, taps, _ = target(chain(ids), torch.zeros(2, dtype=torch.long), 0, (2, 0))
    hidden = target.score(ids)[1]
    close(taps, torch.cat((hidden[3], hidden[1]), -1), 1e-11)


def test_one_token_takes_the_same_experts():
    """The short way for a single token equals the sorted way."""
    experts = tiny.golden("deepseek_v3").layers[-1].mlp.experts
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 64, generator=g, dtype=torch.float64), torch.rand(5, 3, generator=g, dtype=torch.float64)
    ids = torch.rand(5, experts.down.shape[0], generator=g).topk(3, -1).indices
    every = experts(x, weights, ids)
    for i in range(5):
        close(experts(x[i:i + 1], weights[i:i + 1], ids[i:i + 1]), every[i:i + 1], 1e-12)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_rank_computes_its_own_experts(dtype, tolerance):
    """The parts that hold three and five of the experts add up to the whole; other experts' rows add nothing, not even NaN."""
    whole = tiny.golden("deepseek_v3", dtype).layers[-1].mlp.experts
    g = torch.Generator().manual_seed(0)
    x, weights = torch.randn(9, 64, generator=g).to(dtype), torch.rand(9, 3, generator=g).to(dtype)
    ids = torch.rand(9, 8, generator=g).topk(3, -1).indices
    ids[0], ids[1] = torch.tensor([0, 1, 2]), torch.tensor([5, 6, 7])  # tokens that one part has nothing of
    parts = []
    for first, last in ((0, 3), (3, 8)):
        part = Experts(tiny.golden("deepseek_v3").config)
        part.gate_up, part.down = (nn.Parameter(p[first:last], requires_grad=False) for p in (whole.gate_up, whole.down))
        part.first = first
        parts.append(part)
    close(parts[0](x, weights, ids) + parts[1](x, weights, ids), whole(x, weights, ids), tolerance)
    assert not parts[0](x, weights, ids)[1].any() and not parts[1](x, weights, ids)[0].any()


def test_router_in_bf16_keeps_fp32():
    """Scores and their bias decide near ties: the router of a bf16 model is fp32."""
    gate = tiny.golden("deepseek_v3", torch.bfloat16).layers[-1].mlp.gate
    assert gate.weight.dtype == gate.e_score_correction_bias.dtype == torch.float32
    assert gate(torch.ones(1, 64, dtype=torch.bfloat16))[0].dtype == torch.float32


@pytest.mark.parametrize("name, scale", [
    ("v3", .1352338), ("k2", .1308608), ("k2.5", .1446796), ("v2-lite", .1147214), ("moonlight", .0721688), ("glm", .0625)])
def test_softmax_scales_of_the_real_models(name, scale):
    head, factor, m = {"v3": (192, 40, 1), "k2": (192, 32, 1), "k2.5": (192, 64, 1), "v2-lite": (192, 40, .707), "moonlight": (192, 1, 0), "glm": (256, 1, 0)}[name]
    rope = Rope(64, 1e4, factor, mscale=m, mscale_all_dim=m)
    assert head ** -0.5 * rope.softmax_factor == pytest.approx(scale, rel=1e-5)
    assert rope.amplitude == pytest.approx(1.0)


def test_both_rope_spellings_are_one():
    old = {**tiny.TARGET, "rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64,
                                                             "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}}
    new = {**tiny.TARGET, "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **{k: v for k, v in old["rope_scaling"].items() if k != "type"}}}
    del new["rope_theta"]
    assert Config.from_dict(old).rope == Config.from_dict(new).rope


def test_cost_accounting_counts_the_parameters():
    target = tiny.target()
    routed = 2 * 4 * 3 * 16 * 32  # layers × experts × matrices × width × hidden
    assert target.routed_params() == routed
    assert target.num_params() == sum(p.numel() for p in target.parameters())
    assert target.active_params() == target.num_params() - routed // 2 - 13 * 32
    assert target.weight_bytes() == sum(p.numel() * p.element_size() for p in target.parameters())
    assert target.latent_bytes_per_token() == 3 * (16 + 8) * 8


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("groups, kept", [(1, 1), (4, 2)])
def test_router_token_by_token(scoring, groups, kept):
    """The router's rules written out for one token at a time."""
    changes = dict(n_routed_experts=8, num_experts_per_tok=3, n_group=groups, topk_group=kept, scoring_func=scoring, norm_topk_prob=scoring == "sigmoid")
    gate = tiny.target(seed=5, **changes).layers[-1].mlp.gate
    # so negative that a group masked with 0 would win against the open ones
    bias = torch.randn(8, generator=torch.Generator().manual_seed(1)).double() * 0.3 - 1.5 if scoring == "sigmoid" else torch.zeros(8)
    if scoring == "sigmoid":
        gate.e_score_correction_bias.copy_(bias)
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(2)).double() * 0.3
    weights, ids = gate(x)
    for t in range(40):
        logits = gate.weight @ x[t]
        s = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)
        choice, size = (s + bias).tolist(), 8 // groups
        members = [range(g * size, g * size + size) for g in range(groups)]
        def worth(g):
            best = sorted((choice[e] for e in members[g]), reverse=True)
            return sum(best[:2]) if scoring == "sigmoid" else best[0]
        open_to = [e for g in sorted(range(groups), key=worth, reverse=True)[:kept] for e in members[g]] if groups > 1 else range(8)
        best = sorted(open_to, key=lambda e: choice[e], reverse=True)[:3]
        total = sum(s[e] for e in best) if scoring == "sigmoid" else 1
        assert sorted(ids[t].tolist()) == sorted(best)
        for e, w in zip(ids[t].tolist(), weights[t].tolist()):
            assert w == pytest.approx(float(s[e] / total * 2.0), rel=1e-9)
