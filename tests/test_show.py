"""Text as it becomes complete: no half characters, nothing lost, stop strings across tokens; and the drawn tree."""
import random

import pytest
import torch

from ddtree import build_tree, chain
from show import DRAFTED, RESET, TextStream, draw_tree, node_probabilities
from tokens import byte_tokenizer, letters

TOKENIZER = byte_tokenizer()
TEXT = "def f(x):\n    return 'é ü 漢字 🙂👍🏽' + \"z\"  # naïve\n"


def ids(text) -> list:
    """One token per byte, so that every character of more than one byte is split."""
    return [TOKENIZER.token_to_id(c) for c in letters(text.encode() if isinstance(text, str) else text)]


def pieces(tokens: list, stop: tuple = ()) -> tuple:
    """What each token shows, the flush last; tokens after a stop are not pushed, as in the loop."""
    stream, shown = TextStream(TOKENIZER, stop), []
    for token in tokens:
        shown.append(stream.push(token))
        if stream.stopped:
            break
    return [*shown, stream.flush()], stream


def decode(tokens: list) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=False)


def test_pieces_are_the_text():
    shown, stream = pieces(ids(TEXT))
    assert "".join(shown) == TEXT == stream.text and not stream.stopped


def test_a_character_is_shown_whole_with_its_last_byte():
    shown, _ = pieces(ids("a漢b🙂"))
    assert shown == ["a", "", "", "漢", "b", "", "", "", "🙂", ""]


def test_tokens_of_several_characters_and_halves():
    """A token that ends one character, holds another, and begins a third."""
    both = TOKENIZER.encode(TEXT).ids
    assert len(both) < len(TEXT.encode())
    shown, _ = pieces(both)
    assert "".join(shown) == TEXT


def test_random_bytes_come_out_as_decode_gives_them():
    """Invalid bytes too, and characters cut off at the end: pieces joined == decode of all tokens, and no piece is taken back."""
    for seed in range(200):
        tokens = random.Random(seed).choices(range(TOKENIZER.get_vocab_size()), k=40)
        shown, stream = pieces(tokens)
        assert "".join(shown) == decode(tokens) == stream.text


@pytest.mark.parametrize("tail", [b"\xe6", b"\xe6\xbc", b"\xf0\x9f\x99", b"\xff", b"ok\xc3"])
def test_what_is_incomplete_at_the_end_is_flushed(tail):
    shown, _ = pieces(ids(b"abc" + tail))
    assert "".join(shown) == (b"abc" + tail).decode(errors="replace")
    assert "\ufffd" not in "".join(shown[:-1]) and "\ufffd" in shown[-1]


def test_a_replacement_character_in_the_text_is_text():
    shown, _ = pieces(ids("a\ufffdb\ufffd"))
    assert "".join(shown) == "a\ufffdb\ufffd"


def test_special_tokens_are_shown():
    end = TOKENIZER.token_to_id("<|end|>")
    assert "".join(pieces([*ids("a"), end, *ids("b")])[0]) == "a<|end|>b"


@pytest.mark.parametrize("stop, want", [
    (("return",), "def f(x):\n    "), (("é ü",), "def f(x):\n    return '"), (("字",), "def f(x):\n    return 'é ü 漢"),
    (("def",), ""), (("\n",), "def f(x):"), (("naïve\n",), TEXT[:-len("naïve\n")]), (("nothing", "x", "f("), "def ")])
@pytest.mark.parametrize("cut", [ids, lambda text: TOKENIZER.encode(text).ids], ids=["bytes", "tokens"])
def test_stop_strings_across_tokens(stop, want, cut):
    """Nothing of the stop string or past it is ever shown, even where only its last byte comes late."""
    shown, stream = pieces(cut(TEXT), stop)
    assert "".join(shown) == want == stream.text and stream.stopped


def test_what_may_become_a_stop_string_is_held_back_and_no_more():
    shown, stream = pieces(ids("xababc!"), ("abac", "ababab"))
    assert shown == ["x", "", "", "", "", "ababc", "!", ""] and not stream.stopped
    shown, _ = pieces(ids("xaba"), ("abac",))
    assert shown == ["x", "", "", "", "aba"]


def test_the_earliest_of_two_stops_in_one_token_ends():
    token = next(t for t in range(TOKENIZER.get_vocab_size()) if decode([t]) == "return")
    assert "".join(pieces([*ids("a "), token], ("turn", "et"))[0]) == "a r"


def test_random_stops_against_the_plain_rule():
    """The text up to the first place where a stop string is complete."""
    for seed in range(300):
        r = random.Random(seed)
        text = "".join(r.choices("abé", k=30))
        stops = tuple("".join(r.choices("abé", k=r.randint(1, 4))) for _ in range(r.randint(1, 3)))
        ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
        end = min(ends)[0] if ends else None
        want = text[:min(at for e, at in ends if e == end)] if ends else text
        shown, stream = pieces(ids(text), stops)
        assert "".join(shown) == want and stream.stopped == bool(ends)


def test_empty_stops_are_ignored():
    assert "".join(pieces(ids("abc"), ("",))[0]) == "abc"


# The drawn tree

def test_node_probabilities():
    """Each node's is the drafter's softmax at its depth."""
    marginals = torch.randn(2, 3, 9, generator=torch.Generator().manual_seed(0))
    tree = build_tree(marginals, torch.tensor([1, 2]), 12)
    p, softmax = node_probabilities(tree, marginals), marginals.softmax(-1)
    for b in range(2):
        assert p[b, 0] == 1
        for i in range(1, 13):
            assert p[b, i].item() == pytest.approx(softmax[b, tree.depth[b, i] - 1, tree.tokens[b, i]].item(), rel=1e-5)


def test_node_probabilities_with_conditionals():
    """And there: the softmax of the marginal and what the parent's token adds."""
    g = torch.Generator().manual_seed(0)
    marginals, table = torch.randn(2, 3, 9, generator=g), torch.randn(3, 9, 9, generator=g)
    def conditional(depth, before, ids=None):
        added = table[depth][before]
        return added if ids is None else added.gather(-1, ids.unsqueeze(1).expand(-1, before.shape[1], -1))
    tree = build_tree(marginals, torch.tensor([1, 2]), 12, conditional=conditional)
    p = node_probabilities(tree, marginals, conditional)
    for b in range(2):
        for i in range(1, 13):
            d, token, before = tree.depth[b, i] - 1, tree.tokens[b, i], tree.tokens[b, tree.parents[b, i]]
            assert p[b, i].item() == pytest.approx((marginals[b, d] + table[d, before]).softmax(-1)[token].item(), rel=1e-5)


def test_draw_tree():
    """Two branches and a leaf: one line each, probabilities of the step and of the path, ticks where accepted."""
    marginals = torch.tensor([[[.6, .3, .1], [.1, .1, .8]]]).log()
    tree = build_tree(marginals, torch.tensor([2]), 4)
    drawn = draw_tree(tree, node_probabilities(tree, marginals), [0, 1, 2], [0, 2, 1], lambda t: "abc"[t])
    assert drawn.splitlines() == [
        "'c'  root",
        "├─ 'a'  0.60  path 0.600  ✓",
        "│  └─ 'c'  0.80  path 0.480  ✓",
        "└─ 'b'  0.30  path 0.300",
        "   └─ 'c'  0.80  path 0.240",
        "4 nodes drafted, 2 accepted, then the target's own 'b': 3 tokens in this round"]
    colored = draw_tree(tree, node_probabilities(tree, marginals), [0, 1, 2], [0, 2, 1], lambda t: "abc"[t], color=True)
    assert colored.count(DRAFTED) == 2 and colored.count(RESET) == 3


def test_draw_a_chain():
    marginals = torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(0))
    tree = chain(torch.cat((torch.tensor([[4]]), marginals.argmax(-1)), 1))
    assert len(draw_tree(tree, node_probabilities(tree, marginals), [0], [3], str).splitlines()) == 5


def test_every_node_is_drawn_once():
    marginals = torch.randn(1, 5, 30, generator=torch.Generator().manual_seed(1))
    tree = build_tree(marginals, torch.tensor([0]), 64)
    drawn = draw_tree(tree, node_probabilities(tree, marginals), [0], [7], lambda t: f"<{t}>").splitlines()
    assert sorted(line.split("'")[1] for line in drawn[:-1]) == sorted(f"<{t}>" for t in tree.tokens[0].tolist())
