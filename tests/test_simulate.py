"""The cost model: what it counts, what it was fitted to, what it prints."""
import math
import random

import pytest
import torch

import bench
import simulate
import tiny
from auto import WIDTHS
from simulate import (MACHINES, Engine, Pair, busiest, choice, collectives, distinct, fit, measured_skew, odds_of, read_config, round_parts,
                      sureness)
from verify import Plan

ENGINE = Engine(40e-6)


@pytest.fixture(scope="module")
def eight() -> Pair:
    return Pair("kimi_k26", read_config("kimi_k26"), read_config("kimi_k25_dflash"), 8)


def test_weights_read_by_a_verification_of_kimi_k26():
    """GB that one device would read for T tokens, counted by hand elsewhere: 33, 67, 110, 184 for 1, 4, 8, 16."""
    pair = Pair("kimi_k26", read_config("kimi_k26"), read_config("kimi_k25_dflash"), 1)
    slow = MACHINES["h200"]._replace(flops=1e30)
    for tokens, gb in ((1, 33), (4, 67), (8, 110), (16, 184)):
        parts = round_parts(pair, slow, Engine(0), "tp", tokens, Plan("ar", 0), 0)
        assert sum(parts.values()) * slow.bytes_s * simulate.READ / 1e9 == pytest.approx(gb, abs=1)
        assert "collectives" not in parts and "drafter" not in parts


def test_distinct_experts():
    for T in (1, 3, 64):
        assert distinct(384, 8, T) == pytest.approx(384 * (1 - (1 - 8 / 384) ** T))
        assert 8 - 1e-9 <= distinct(384, 8, 1) and distinct(384, 8, T, 0.5) < distinct(384, 8, T) + 1e-9
    assert distinct(8, 2, 10 ** 5, 1.0) == pytest.approx(8)


def test_the_busiest_device():
    r = random.Random(0)
    for odds in (8 / 384, 0.2, 0.9):
        seen = [max(sum(r.random() < odds for _ in range(48)) for _ in range(8)) for _ in range(300)]
        assert busiest(384, 8, odds) == pytest.approx(sum(seen) / 300, rel=0.06)
        assert busiest(384, 1, odds) == pytest.approx(384 * odds)


def test_more_work_is_never_cheaper(eight):
    def seconds(layout="tp", batch=4, plan=Plan("ddtree", 8), context=4096, skew=0.0):
        return sum(round_parts(eight, MACHINES["h200"], ENGINE, layout, batch, plan, context, skew).values())
    assert seconds(plan=Plan("ar", 0)) < seconds(plan=Plan("ddtree", 1)) < seconds() < seconds(plan=Plan("ddtree", 64))
    assert seconds(batch=1) < seconds() < seconds(batch=64) and seconds(context=1024) < seconds() < seconds(context=65536)
    assert seconds(layout="ep") > seconds() > seconds(skew=1.0)


def test_collectives_are_those_that_a_round_counts(eight):
    """Nothing but waiting: two all-reduces per layer and the embedding's, the gathers of both heads, and the graft's."""
    machine = MACHINES["h200"]._replace(link=math.inf, collective=1.0)
    assert collectives(eight, machine, Plan("ar", 0), 1) == 2 * 61 + 2
    assert collectives(eight, machine, Plan("dflash", 7), 1) == 2 * 61 + 2 + 2 * 6 + 3


def test_odds_of_a_drafter(eight):
    q = sureness(3.0, 7)
    odds = odds_of(q, 7)
    tokens = [1 + sum(row) for row in odds]
    assert tokens[-1] == pytest.approx(3.0, abs=1e-3)
    assert tokens[0] == pytest.approx(1 + q, abs=1e-3) and tokens[:-1] == sorted(tokens[:-1])
    assert tokens[WIDTHS.index(8)] >= tokens[-1] - 1e-6         # the best 8 prefixes are worth no less than the chain of 7
    measured = {2.07: (2.53, 2.72, 2.93, 3.13), 3.72: (4.13, 4.39, 4.67, 4.84)}  # README, bundled pair with draft-dflash: chain, then 8 16 32 64
    for chain, widths in measured.items():
        for got, want in zip(odds_of(sureness(chain, 7), 7)[WIDTHS.index(8):], widths):
            assert 1 + sum(got) == pytest.approx(want, rel=0.12)


@pytest.mark.parametrize("layout, batch, context", [("tp", 1, 1024), ("ep", 16, 8192), ("tp", 256, 1024), ("ep", 4, 131072)])
def test_the_controller_picks_the_most_tokens_per_second(eight, layout, batch, context):
    best, found = choice(eight, MACHINES["rtx-pro-6000"], ENGINE, layout, batch, context, odds_of(0.6, 7))
    assert found[best][1] == max(tok_s for _, tok_s, _ in found)
    plan, tok_s, parts = found[0]
    assert plan.mode == "ar" and tok_s == pytest.approx(batch / sum(parts.values()))


def test_what_was_fitted_is_met_and_what_was_not_is_shown(eight):
    found, rows = fit(eight, MACHINES["rtx-pro-6000"], MACHINES["mi300x"])
    for point, model, residual, fitted in rows:
        assert residual == pytest.approx(model / point.tok_s - 1)
        assert abs(residual) < 0.01 if fitted else abs(residual) > 0.01
    assert [p.tok_s for p, *_ in rows] == [65, 98, 86, 1493, 1146, 90.4, 127.1, 125.1, 192.8] and sum(f for *_, f in rows) == 4
    assert found["eager"].layer > found["graph"].layer > 0 and 1 < found["accepts"] < 8


def test_skew_is_found_where_routing_is_uneven():
    target = tiny.target(torch.float32, seed=3, n_routed_experts=8)
    texts = tiny.prompts(13, 64, 64)
    even = measured_skew(target, texts)
    uneven = tiny.shorter(target, 512)
    for layer in uneven.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:2] += 10.0  # these two, always
    assert 0 <= even < measured_skew(uneven, texts) == 3.0


def test_the_table(capsys):
    assert bench.main(["--simulate", "--concurrency", "1", "64", "--contexts", "1024", "--widths", "4", "8", "--machine", "h200"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "a model, not a measurement" in lines[0] and lines[1].split()[:3] == ["layout", "context", "batch"]
    assert len(lines) == 2 + 2 * 2 and all("%" in line for line in lines[2:])
    assert bench.main(["--simulate", "--fit"]) == 0
    assert "not fitted" in capsys.readouterr().out


@pytest.mark.parametrize("flags, words", [(["--config", "nothing"], "no config"), (["--devices", "7"], "7"), (["--chain", "9"], "chain of 7"),
                                          (["--contexts", "999999"], "longer than the model's"), (["--skew", "much"], "--skew"), (["--widths", "0"], "--widths")])
def test_bad_flags_end_in_one_line(flags, words, capsys):
    assert bench.main(["--simulate", *flags]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and words in err


def test_flags_are_one_line_and_none_is_ignored(capsys):
    for argv, says in ((["--fit", "--chain", "2"], "leave the other flags out"), (["--nonsense"], "--help lists the flags")):
        assert bench.main(["--simulate", *argv]) == 2
        err = capsys.readouterr().err
        assert says in err and err.startswith("error: ") and err.count("\n") == 1
