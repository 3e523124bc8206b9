"""Routes are a value that a forward pass gives and takes: replayed, they give the recorded bits although the routers' own choice is noisy;
recomputation takes the routes of its own forward pass; no bad row is replayed and no row is left out in silence."""

import gc
import threading
import weakref

import pytest
import torch

from tests.helpers.tiny_model import TINY, packed_batch, strong_tensors

LAYERS, E, K = 3, 8, 2
MODEL = TINY.model_copy(update={"num_hidden_layers": LAYERS, "num_local_experts": E, "num_experts_per_tok": K})
LENGTHS = [9, 5]
T = sum(LENGTHS)
NOISE = 2.0  # of the logits: most tokens change experts
RECOMPUTE = ("none", "full", "selective")


@pytest.fixture(scope="module")
def weights():
    return dict(strong_tensors(MODEL, 1))


@pytest.fixture
def tiny(one_rank, weights):
    """Maker of tiny models, all with the same weights."""
    from megatron_gptoss.checkpoint.weight_map import load_hf
    from megatron_gptoss.model.build import build_model
    from megatron_gptoss.model.router import inject_choice_noise

    def make(recompute="none", noise_seed=None):
        model = build_model(MODEL, one_rank, recompute=recompute)
        load_hf(model, MODEL, weights.items())
        if noise_seed is not None:
            inject_choice_noise(model, NOISE, noise_seed)
        return model.train()

    return make


def loss_of(model, which=0):
    """Summed next-token loss of one of several packs of the same size."""
    from megatron_gptoss.logprob.reference import selected_logprob
    from megatron_gptoss.model.gpt_oss import packed_params

    tokens, positions, cu_seqlens = packed_batch(LENGTHS, MODEL.vocab_size, seed=which)

    def head(hidden_TC, weight_VC):
        return selected_logprob(hidden_TC[:-1], weight_VC, tokens[0, 1:])[0]

    return -model(input_ids=tokens, position_ids=positions, packed_seq_params=packed_params(cu_seqlens, max(LENGTHS)), head=head).sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def random_routes(seed, num_tokens=T, layers=range(LAYERS)):
    from megatron_gptoss.model.replay import Routes

    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(len(layers), num_tokens, E, generator=g).argsort(-1)[..., :K]
    return Routes(rows.to(torch.uint8), tuple(layers), E)


# --- Record and replay ------------------------------------------------------------------------------------------------------------------


def test_replay_gives_the_recorded_bits_under_noise_and_without_it_they_change(tiny):
    """The published failure and its cure: a router whose choice differs from run to run makes an on-policy ratio other than 1."""
    from megatron_gptoss.model.replay import record, replay

    model = tiny(noise_seed=5)
    with record() as routing:
        first = loss_of(model)
    first.backward()
    expected, routes = gradients(model), routing.routes()
    assert (routing.num_own, routing.num_replayed) == (LAYERS * T, 0)

    model.zero_grad()
    with record() as other:
        changed = loss_of(model)
    changed.backward()
    moved = (other.routes().experts_LTK != routes.experts_LTK).any(-1).float().mean()
    assert moved > 0.3, "the noise must change routes, or this test shows nothing"
    assert abs(changed.item() - first.item()) > 1e-2 and not same(gradients(model), expected)

    model.zero_grad()
    with replay(routes) as routing:
        again = loss_of(model)
    again.backward()
    assert torch.equal(again, first) and same(gradients(model), expected)
    assert (routing.num_own, routing.num_replayed, routing.replayed_fraction) == (0, LAYERS * T, 1.0)
    assert torch.equal(routing.routes().experts_LTK, routes.experts_LTK)


def test_an_on_policy_update_is_clipped_under_noise_and_is_the_policy_gradient_under_replay(tiny):
    """Old log-probs are scored once, then the same weights are updated: by definition on-policy. A second forward pass that chooses other
    experts has ratios away from 1 and loses tokens to the clip; with the scored routes the update is sum A dlogp, bit for bit."""
    from megatron_gptoss.logprob.reference import selected_logprob
    from megatron_gptoss.model.gpt_oss import packed_params
    from megatron_gptoss.model.replay import record, replay
    from megatron_gptoss.rl.surrogates import ppo

    model = tiny(noise_seed=5)
    tokens, positions, cu_seqlens = packed_batch(LENGTHS, MODEL.vocab_size, seed=0)
    advantage_N = torch.randn(T - 1, generator=torch.Generator().manual_seed(2))

    def logp():
        return model(
            input_ids=tokens,
            position_ids=positions,
            packed_seq_params=packed_params(cu_seqlens, max(LENGTHS)),
            head=lambda hidden_TC, weight_VC: selected_logprob(hidden_TC[:-1], weight_VC, tokens[0, 1:])[0],
        )

    def update(logp_N, old_N):
        model.zero_grad()
        found = ppo(logp_N, old_N, advantage_N, clip_low=0.2, clip_high=0.2)
        found.loss_N.sum().backward()
        return found, gradients(model)

    with torch.no_grad(), record() as routing:
        old_N = logp()
    lost, without = update(logp(), old_N)
    with replay(routing.routes()):
        now_N = logp()
    kept, cured = update(now_N, old_N)

    with replay(routing.routes()):
        policy_gradient = -(advantage_N * logp()).sum()
    model.zero_grad()
    policy_gradient.backward()
    exact = gradients(model)
    assert lost.clipped_N.float().mean() > 0.2 and (lost.ratio_N - 1).abs().max() > 0.5
    assert max(float((without[n] - exact[n]).norm() / exact[n].norm()) for n in exact) > 0.5
    assert (kept.ratio_N == 1).all() and not kept.clipped_N.any()
    assert same(cured, exact)


def test_replaying_a_models_own_choice_changes_nothing(tiny):
    from megatron_gptoss.model.replay import record, replay

    model = tiny()
    free = loss_of(model)
    with record() as routing:
        recorded = loss_of(model)
    with replay(routing.routes()):
        replayed = loss_of(model)
    assert torch.equal(free, recorded) and torch.equal(free, replayed)


def test_replayed_routers_still_learn(tiny):
    """Routes are constants; the probabilities of the given experts are not."""
    from megatron_gptoss.model.replay import replay
    from megatron_gptoss.model.router import routers_of

    model = tiny()
    with replay(random_routes(3)):
        loss_of(model).backward()
    for router in routers_of(model):
        assert router.weight.grad.abs().max() > 0 and router.bias.grad.abs().max() > 0


def test_the_order_within_a_row_does_not_matter(tiny):
    """An engine's rows are in no order; only the softmax's sum is then added up differently, which is a rounding."""
    from dataclasses import replace

    from megatron_gptoss.model.replay import replay

    model, turned = tiny(), tiny()
    routes = random_routes(1)
    with replay(routes):
        loss_of(model).backward()
    with replay(replace(routes, experts_LTK=routes.experts_LTK.flip(-1))):
        loss_of(turned).backward()
    for ours, theirs in zip(turned.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6 * float(theirs.grad.abs().max()))


def test_routes_come_out_as_hugging_face_routes(tiny, weights, tmp_path):
    from megatron_gptoss.model.replay import record
    from tests.helpers.tiny_model import hugging_face_model

    hf = hugging_face_model(MODEL, weights, tmp_path)
    seen = []
    for layer in hf.model.layers:
        layer.mlp.router.register_forward_hook(lambda _module, _inputs, out: seen.append(out[2]))
    tokens, _, _ = packed_batch(LENGTHS, MODEL.vocab_size, seed=0)
    with torch.no_grad():
        for part in tokens.split(LENGTHS, dim=1):
            hf(part)
    with record() as routing:
        loss_of(tiny())
    theirs = torch.stack([torch.cat(seen[layer::LAYERS]) for layer in range(LAYERS)])
    assert torch.equal(routing.routes().experts_LTK.long(), theirs)


# --- Recomputation ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputation_under_noise_takes_the_routes_of_its_forward_pass(tiny, recompute):
    from megatron_gptoss.model.replay import record, replay

    plain, model = tiny(), tiny(recompute, noise_seed=5)
    with record() as routing:
        loss = loss_of(model)
    loss.backward()
    with replay(routing.routes()):
        expected = loss_of(plain)
    expected.backward()
    assert torch.equal(loss, expected) and same(gradients(model), gradients(plain))


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_without_the_memory_recomputation_would_choose_again(tiny, recompute, monkeypatch):
    """The control of the test above: Megatron's checkpoint as it is."""
    from megatron_gptoss.model import replay

    plain, model = tiny(), tiny(recompute, noise_seed=5)
    monkeypatch.setattr(replay._Remembering, "__call__", lambda self, *args: self.function(*args))
    with replay.record() as routing:
        loss = loss_of(model)
    loss.backward()
    with replay.replay(routing.routes()):
        loss_of(plain).backward()
    assert not same(gradients(model), gradients(plain))


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("order", ["one forward, one backward", "all forward first", "last in, first out"])
def test_several_microbatches_under_way_keep_their_own_routes(tiny, recompute, order):
    """Four microbatches with different routes, against one at a time, without recomputation, summed in the same order."""
    from megatron_gptoss.model.replay import replay

    routes = [random_routes(seed) for seed in range(4)]
    steps = {
        "one forward, one backward": ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"],
        "all forward first": ["f0", "f1", "f2", "f3", "b0", "b1", "b2", "b3"],
        "last in, first out": ["f0", "f1", "f2", "f3", "b3", "b2", "b1", "b0"],
    }[order]

    def run(model, steps):
        losses = {}
        for step in steps:
            which = int(step[1])
            if step[0] == "f":
                with replay(routes[which]):
                    losses[which] = loss_of(model, which)
            else:
                losses[which].backward()
        return [losses[which].detach() for which in range(4)]

    model, plain = tiny(recompute, noise_seed=5), tiny()
    losses = run(model, steps)
    expected = run(plain, [kind + step[1] for step in steps if step[0] == "b" for kind in "fb"])
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert same(gradients(model), gradients(plain))


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("where", ["inside another microbatch's context", "on another thread"])
def test_where_backward_runs_does_not_matter(tiny, recompute, where):
    """On a GPU autograd recomputes on its own thread; and a schedule may start a backward pass inside the next microbatch's context."""
    from megatron_gptoss.model.replay import replay

    model, plain = tiny(recompute, noise_seed=5), tiny()
    with replay(random_routes(1)):
        loss = loss_of(model)
    if where == "on another thread":
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
    else:
        with replay(random_routes(2)) as other:
            loss.backward()
            assert other.num_replayed == 0, "a recomputed row counts once, in its own pass"
            with torch.no_grad():
                loss_of(model, 2)
    with replay(random_routes(1)):
        loss_of(plain).backward()
    assert same(gradients(model), gradients(plain))


def test_recomputed_twice_and_nested(tiny):
    """A retained graph recomputes again, and a checkpoint inside a checkpoint asks the outer one's memory."""
    from megatron_gptoss.model.replay import replay

    model, plain = tiny("full", noise_seed=5), tiny()
    for layer in model.decoder.layers:
        layer.mlp.moe_layer_recompute = True
    with replay(random_routes(1)):
        loss = loss_of(model)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    with replay(random_routes(1)):
        loss_of(plain).backward()
    assert same(gradients(model), gradients(plain))


def test_memories_go_with_the_graph(tiny, monkeypatch):
    from megatron_gptoss.model import replay

    alive = []
    plain = replay._Memory.__init__

    def watched(self):
        plain(self)
        alive.append(weakref.ref(self))

    monkeypatch.setattr(replay._Memory, "__init__", watched)
    loss = loss_of(tiny("full"))
    assert len([r for r in alive if r()]) == LAYERS
    loss.backward()
    del loss
    gc.collect()
    assert not [r for r in alive if r()]


# --- Refusals ---------------------------------------------------------------------------------------------------------------------------


def with_row(layer, token, row):
    routes = random_routes(1)
    routes.experts_LTK[layer, token] = torch.tensor(row, dtype=torch.uint8)
    return routes


@pytest.mark.parametrize(
    "row, why",
    [
        ([0, 0], "all zero"),
        ([3, 3], "experts 3, 3 name one twice"),
        ([1, 8], r"expert 8 is outside 0\.\.7"),
        ([255, 255], "expert 255 is outside"),
    ],
)
def test_bad_rows_are_refused_before_anything_runs(row, why):
    from megatron_gptoss.model.replay import ReplayError, replay

    message = rf"^routes refused at layer 2, token 11: {why}.*\(1 of {LAYERS * T} rows are bad\)$"
    with pytest.raises(ReplayError, match=message), replay(with_row(2, 11, row)):
        raise AssertionError("not reached")


def test_negative_experts_are_refused():
    from megatron_gptoss.model.replay import ReplayError, Routes

    rows = random_routes(1).experts_LTK.to(torch.int16)
    rows[0, 4] = torch.tensor([2, -1], dtype=torch.int16)
    with pytest.raises(ReplayError, match="layer 0, token 4: expert -1 is outside"):
        Routes(rows, tuple(range(LAYERS)), E).check(missing="own")


def test_rows_with_expert_zero_are_not_missing():
    with_row(0, 0, [0, 5]).check()
    with_row(0, 0, [5, 0]).check()


def test_missing_rows_fall_back_to_the_router_and_are_counted(tiny):
    """Missing in all layers for two tokens and in one layer for a third: exactly these rows are the router's own."""
    from megatron_gptoss.model.replay import replay

    model = tiny()
    given = random_routes(1)
    given.experts_LTK[:, [3, 13]] = 0
    given.experts_LTK[1, 7] = 0
    with replay(given, missing="own") as routing:
        loss = loss_of(model)
    assert (routing.num_own, routing.num_replayed) == (2 * LAYERS + 1, LAYERS * T - 2 * LAYERS - 1)
    assert routing.replayed_fraction == 1 - (2 * LAYERS + 1) / (LAYERS * T)
    used = routing.routes()
    assert torch.equal(used.experts_LTK[~given.missing_LT], given.experts_LTK[~given.missing_LT])
    used.check()  # nothing is missing any more
    with replay(used):
        assert torch.equal(loss_of(model), loss)


def test_all_rows_missing_is_a_free_run(tiny):
    from megatron_gptoss.model.replay import Routes, replay

    model = tiny()
    nothing = Routes(torch.zeros(LAYERS, T, K, dtype=torch.uint8), tuple(range(LAYERS)), E)
    with replay(nothing, missing="own") as routing:
        loss = loss_of(model)
    assert torch.equal(loss, loss_of(model)) and routing.replayed_fraction == 0.0


def test_fallback_stays_what_it_was_when_recomputed(tiny):
    from megatron_gptoss.model.replay import replay

    model, plain = tiny("full", noise_seed=5), tiny()
    given = random_routes(1)
    given.experts_LTK[:, [3, 13]] = 0
    with replay(given, missing="own") as routing:
        loss_of(model).backward()
    with replay(routing.routes()):
        loss_of(plain).backward()
    assert same(gradients(model), gradients(plain))


def test_a_layer_without_routes_is_refused(tiny):
    from megatron_gptoss.model.replay import ReplayError, replay

    with pytest.raises(ReplayError, match="layer 2 has a router and no routes to replay; there are routes for layers 0, 1"):  # noqa: SIM117
        with replay(random_routes(1).cut(layers=[0, 1])):
            loss_of(tiny())


def test_routes_without_a_layer_are_refused(tiny):
    from megatron_gptoss.model.replay import ReplayError, replay

    routes = random_routes(1, layers=range(LAYERS + 2))
    with pytest.raises(ReplayError, match=rf"replayed {LAYERS * T} rows of {(LAYERS + 2) * T} .* no router asked for layers 3, 4"):  # noqa: SIM117
        with replay(routes):
            loss_of(tiny())


def test_another_number_of_tokens_is_refused(tiny):
    from megatron_gptoss.model.replay import ReplayError, replay

    with pytest.raises(ReplayError, match=rf"router of layer 0 sends {T} tokens to 2 of 8 experts; the routes are of {T + 1} tokens"):  # noqa: SIM117
        with replay(random_routes(1, num_tokens=T + 1)):
            loss_of(tiny())


def test_a_context_is_for_one_forward_pass(tiny):
    from megatron_gptoss.model.replay import ReplayError, record

    model = tiny()
    with record():
        loss_of(model)
        with pytest.raises(ReplayError, match="layer 0 ran twice"):
            loss_of(model)


def test_an_error_inside_is_not_hidden_by_the_count():
    from megatron_gptoss.model.replay import replay

    with pytest.raises(ZeroDivisionError), replay(random_routes(1)):
        _ = 1 / 0


def test_nothing_recorded_is_refused():
    from megatron_gptoss.model.replay import ReplayError, record

    with record() as routing:
        pass
    with pytest.raises(ReplayError, match="no router ran"):
        routing.routes()


def test_a_wrong_policy_is_refused():
    with pytest.raises(ValueError, match="one of refuse, own"):
        random_routes(1).check(missing="ignore")


# --- The value --------------------------------------------------------------------------------------------------------------------------


def test_sizes_in_bytes_per_token():
    """24 layers (20B) and 36 layers (120B), four experts each, one byte an expert."""
    from megatron_gptoss.model.replay import balanced_routes

    for layers, experts, num_bytes in ((24, 32, 96), (36, 128, 144)):
        assert balanced_routes(10, range(layers), num_experts=experts, top_k=4).num_bytes == 10 * num_bytes


@pytest.mark.parametrize("context, tensor", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 2)])
def test_shards_of_all_ranks_make_the_stream(context, tensor):
    from megatron_gptoss.model.replay import rows_of_rank

    routes = random_routes(1, num_tokens=16)
    shards = [
        routes.cut(rows=rows_of_rank(16, context=(c, context), sequence=(t, tensor))).experts_LTK
        for c in range(context)
        for t in range(tensor)
    ]
    assert {shard.shape[1] for shard in shards} == {16 // (context * tensor)}
    assert torch.equal(torch.cat(shards, dim=1), routes.experts_LTK)


def test_a_cut_that_does_not_come_out_even_is_refused():
    from megatron_gptoss.model.replay import rows_of_rank

    with pytest.raises(ValueError, match="cannot be cut into 2 equal shards"):
        rows_of_rank(14, context=(0, 2), sequence=(0, 2))


def test_stages_take_their_layers_by_name():
    routes = random_routes(1)
    last = routes.cut(layers=[2, 1])
    assert last.layers == (2, 1) and torch.equal(last.experts_LTK, routes.experts_LTK[[2, 1]])
    assert torch.equal(last.cut(layers=[1]).experts_LTK, routes.experts_LTK[1:2])
    with pytest.raises(ValueError, match="no layer 0; theirs are 2, 1"):
        last.cut(layers=[0])


def test_padding_is_valid_and_balanced():
    routes = random_routes(1).pad_to(T + 16)
    routes.check()
    assert torch.equal(routes.experts_LTK[:, :T], random_routes(1).experts_LTK)
    for layer in routes.experts_LTK[:, T:]:
        assert layer.long().flatten().bincount(minlength=E).tolist() == [16 * K // E] * E


def test_engine_rows_are_packed_with_missing_ones_marked():
    """Two conversations as the engine returns them, uint8 [tokens it ran, L, K], their last token never run; a third without routes."""
    from megatron_gptoss.model.replay import pack_routes

    whole = random_routes(1, num_tokens=9).experts_LTK.transpose(0, 1)  # TLK
    packed = pack_routes([whole[:4].numpy(), whole[4:8].numpy(), None], [5, 5, 2], layers=range(LAYERS), num_experts=E, top_k=K)
    assert packed.missing_LT.nonzero().tolist() == [[layer, token] for layer in range(LAYERS) for token in (4, 9, 10, 11)]
    assert torch.equal(packed.experts_LTK[:, [0, 1, 2, 3, 5, 6, 7, 8]], whole[:8].transpose(0, 1))


@pytest.mark.parametrize(
    "rows, why",
    [
        (torch.ones(6, LAYERS, K), "its 5 tokens in 3 layers with 2 experts each"),
        (torch.ones(5, LAYERS + 1, K), r"shape \(5, 4, 2\)"),
        (torch.ones(5, LAYERS, 1), r"shape \(5, 3, 1\)"),
        (torch.full((5, LAYERS, K), 300), "name expert 300; the model has 0..7"),
    ],
)
def test_engine_rows_of_another_shape_are_refused(rows, why):
    from megatron_gptoss.model.replay import ReplayError, pack_routes

    with pytest.raises(ReplayError, match=f"routes of sequence 0 .*{why}"):
        pack_routes([rows.long()], [5], layers=range(LAYERS), num_experts=E, top_k=K)


def test_one_expert_per_token_has_no_mark_for_missing():
    from megatron_gptoss.model.replay import ReplayError, Routes, pack_routes

    Routes(torch.zeros(1, 3, 1, dtype=torch.uint8), (0,), 4).check()  # three times expert 0
    with pytest.raises(ReplayError, match="cannot be told from expert 0"):
        pack_routes([torch.zeros(2, 1, 1)], [3], layers=[0], num_experts=4, top_k=1)


def test_many_experts_need_two_bytes():
    from megatron_gptoss.model.replay import balanced_routes, compact_dtype

    assert [compact_dtype(n) for n in (32, 128, 256, 257)] == [torch.uint8] * 3 + [torch.int16]
    balanced_routes(300, [0], num_experts=300, top_k=2).check()
