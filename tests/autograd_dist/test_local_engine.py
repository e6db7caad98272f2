"""One worker's share of a backward pass, against plain torch on the same expression."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from autograd_dist.recv_node import Origin
from tests.autograd_dist.local_passes import (
    CONTEXT,
    PEER,
    Counted,
    Counter,
    Node,
    param,
    skip_connection,
)


def test_gradients_of_leaves_go_to_the_context_and_not_to_grad():
    node, w = Node(), param()
    w.grad = torch.tensor([9.0, 9.0])
    node.start((w * w).sum())
    assert node.gradient(w).tolist() == [2.0, 4.0]
    assert w.grad.tolist() == [9.0, 9.0]


def test_repeated_passes_add_up():
    node, w = Node(), param()
    loss = (w * w).sum()
    node.start(loss, retain_graph=True)
    node.start(loss)
    assert node.gradient(w).tolist() == [4.0, 8.0]


def test_second_pass_without_retain_graph_fails_as_in_torch():
    node, w = Node(), param()
    loss = (w * w).sum()
    node.start(loss)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        node.start(loss)


def test_gradient_of_a_received_tensor_is_handed_out_whole():
    node = Node()
    (x,) = node.receive(5, torch.tensor([1.0, 2.0]))
    node.start((x * x).sum() + (3 * x).sum())
    assert node.departed[5][0].tolist() == [5.0, 7.0]


def test_unused_tensors_of_a_message_have_no_gradient():
    node = Node()
    x, _, z = node.receive(5, torch.ones(2), torch.ones(2), torch.ones(2))
    node.start((x * 2 + z).sum())
    assert [None if g is None else g.tolist() for g in node.departed[5]] == [[2, 2], None, [1, 1]]


def test_root_may_be_a_received_tensor_itself():
    node = Node()
    (x,) = node.receive(5, torch.tensor(1.0))
    node.start(x)
    assert node.departed[5][0].item() == 1.0


def test_received_tensor_that_is_sent_on_waits_for_all_its_gradients():
    node = Node()
    (x,) = node.receive(5, torch.tensor([1.0, 2.0]))
    sent = node.send(x)
    local = node.start((x * 3).sum())
    assert local.contributions
    assert node.departed == {}
    local.add_gradients(sent, [torch.tensor([10.0, 20.0])])
    local.run_wave()
    assert node.departed[5][0].tolist() == [13.0, 23.0]
    assert not local.contributions


def test_leaf_that_was_sent_by_value_gets_both_gradients():
    node, w = Node(), param()
    sent = node.send(w)
    local = node.start((w * 3).sum())
    local.add_gradients(sent, [torch.tensor([1.0, 1.0])])
    local.run_wave()
    assert node.gradient(w).tolist() == [4.0, 4.0]


def test_skip_connection_lets_the_remote_part_go_first():
    case = skip_connection()
    local = case.node.start((case.h * case.y).sum())
    assert case.node.departed[5][0].tolist() == [1.0, 4.0]
    local.add_gradients(case.sent, case.node.departed[5])
    local.run_wave()
    assert case.node.gradient(case.w).tolist() == [4.0, 32.0]


def test_hook_on_a_sent_tensor_fires_once_on_the_whole_gradient():
    hook = Counter(lambda gradient: gradient / 2)
    case = skip_connection(hook)
    local = case.node.start((case.h + case.y).sum())
    assert hook.seen == []
    local.add_gradients(case.sent, [torch.tensor([3.0, 3.0])])
    local.run_wave()
    assert [g.tolist() for g in hook.seen] == [[4.0, 4.0]]
    assert case.node.gradient(case.w).tolist() == [4.0, 8.0]


def test_hook_on_a_tensor_behind_the_border_acts_once_on_the_whole_gradient():
    node, w = Node(), param()
    shared = w * 1.0
    shared.register_hook(lambda gradient: gradient / 2)
    sent = node.send(shared * 1.0)
    (y,) = node.receive(5, torch.ones(2))
    local = node.start((shared + y).sum())
    local.add_gradients(sent, [torch.tensor([3.0, 3.0])])
    local.run_wave()
    assert node.gradient(w).tolist() == [2.0, 2.0]


def test_hook_of_a_leaf_fires_once_over_several_waves():
    node, w = Node(), param()
    hook = Counter(lambda gradient: gradient * 10)
    w.register_hook(hook)
    sent = node.send(w * 1.0)
    (y,) = node.receive(5, torch.ones(2))
    local = node.start((w * y).sum())
    local.add_gradients(sent, [torch.tensor([3.0, 3.0])])
    local.run_wave()
    assert [g.tolist() for g in hook.seen] == [[4.0, 4.0]]
    assert node.gradient(w).tolist() == [40.0, 40.0]


def test_hooks_are_as_they_were_after_a_wave_with_a_border():
    node, w = Node(), param()
    hook = Counter()
    handle = w.register_hook(hook)
    node.send(w * 1.0)
    (y,) = node.receive(5, torch.ones(2))
    node.start((w * y).sum())
    assert list(w._backward_hooks.values()) == [hook]
    handle.remove()
    assert not w._backward_hooks


def test_each_node_runs_once_however_many_waves():
    node, w, log = Node(), param(), []
    trunk = Counted.apply(w, log)
    sends = [node.send(trunk * k) for k in (1.0, 2.0)]
    (y,) = node.receive(5, torch.ones(2))
    head = []
    local = node.start((Counted.apply(y, head) + trunk).sum())
    for sent in sends:
        local.add_gradients(sent, [torch.ones(2)])
        local.run_wave()
    assert (len(log), len(head)) == (1, 1)
    assert node.gradient(w).tolist() == [8.0, 8.0]


def test_border_that_leads_to_itself_gives_right_gradients():
    node, w = Node(), param()
    x = w * 1.0
    h = x * x
    sent = node.send(h)
    (y,) = node.receive(5, torch.ones(2))
    hook = Counter(lambda gradient: gradient * 2)
    h.register_hook(hook)
    local = node.start((h + x + y * 7).sum())
    assert node.departed[5][0].tolist() == [7.0, 7.0]
    local.add_gradients(sent, [torch.tensor([1.0, 1.0])])
    local.run_wave()
    assert [g.tolist() for g in hook.seen] == [[2.0, 2.0]]
    assert node.gradient(w).tolist() == [1 + 8.0, 1 + 16.0]


def test_unused_send_holds_back_what_it_shares_until_it_is_resolved():
    node, w = Node(), param()
    sent = node.send(w * 5.0)
    local = node.start((w * 2.0).sum())
    assert local.contributions
    assert local.waiting_sends == {sent}
    local.resolve_without_gradient(sent)
    local.run_wave()
    assert not local.contributions
    assert node.gradient(w).tolist() == [2.0, 2.0]


def test_reach_names_the_tensors_that_will_get_a_gradient():
    node = Node()
    x, y = node.receive(5, torch.ones(2), torch.ones(2))
    forwarded = node.send(x * 2, y * 3)
    local = node.start((y * 1.0).sum())
    origin = Origin(CONTEXT, PEER, 5)
    assert local.reach_of_stuck() == {origin: {1}}
    assert local.reach_of_send(forwarded, [0]) == {origin: {0}}
    assert local.reach_of_send(forwarded, [0, 1]) == {origin: {0, 1}}


def test_post_accumulate_hook_sees_the_whole_gradient_once_and_grad_is_restored():
    node, w = Node(), param()
    w.grad = torch.tensor([9.0, 9.0])
    seen = []
    w.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.tolist()))
    sent = node.send(w * 1.0)
    (y,) = node.receive(5, torch.ones(2))
    local = node.start((w * y).sum())
    local.add_gradients(sent, [torch.tensor([3.0, 3.0])])
    local.run_wave()
    assert seen == [[4.0, 4.0]]
    assert node.gradient(w).tolist() == [4.0, 4.0]
    assert w.grad.tolist() == [9.0, 9.0]
    assert node.departed[5][0].tolist() == [1.0, 2.0]


def test_grad_is_restored_when_a_hook_raises():
    node, w = Node(), param()
    w.grad = torch.tensor([9.0, 9.0])

    def fail(_):
        raise ValueError("from the hook")

    w.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="from the hook"):
        node.start((w * w).sum())
    assert w.grad.tolist() == [9.0, 9.0]
    assert node.gradient(w) is None


@pytest.mark.parametrize("kind", ["register_hook", "register_prehook"])
def test_hooks_on_the_accumulation_node_run(kind):
    node, w = Node(), param()
    a = w + w
    calls = []
    accumulation = a.grad_fn.next_functions[0][0]
    getattr(accumulation, kind)(lambda *args: calls.append(len(args)))
    node.start(a.sum())
    assert len(calls) == 1
    assert node.gradient(w).tolist() == [2.0, 2.0]


def test_a_hook_on_several_leaves_is_called_once_with_all_whole_gradients():
    node, w, v = Node(), param(), param()
    calls = []
    register_multi_grad_hook((w, v), calls.append)
    sent = node.send(w)
    (y,) = node.receive(5, torch.ones(2))
    local = node.start((w * y + v * 3).sum())
    assert calls == []
    assert node.departed[5][0].tolist() == [1.0, 2.0]
    local.add_gradients(sent, [torch.tensor([3.0, 3.0])])
    local.run_wave()
    assert [node.gradient(leaf).tolist() for leaf in (w, v)] == [[4.0, 4.0], [3.0, 3.0]]
    (call,) = calls
    assert [each.tolist() for each in call] == [[4.0, 4.0], [3.0, 3.0]]
    assert w.grad is v.grad is None


def test_plain_backward_through_a_received_tensor_says_what_to_use():
    (x,) = Node().receive(5, torch.ones(2))
    with pytest.raises(RuntimeError, match=r"Use autograd_dist\.backward\(context_id, \[loss\]\)"):
        x.sum().backward()


def test_tensor_of_another_context_is_refused():
    (x,) = Node(context_id=99).receive(5, torch.ones(2))
    with pytest.raises(RuntimeError, match="received in autograd context 99"):
        Node().start(x.sum())


def test_received_tensor_may_be_modified_in_place():
    node = Node()
    x, y = node.receive(5, torch.ones(4).view(2, 2), torch.ones(2))
    x.mul_(3.0)
    y[0] = 7.0
    node.start((x * x).sum() + y.sum())
    assert node.departed[5][0].tolist() == [[18.0, 18.0], [18.0, 18.0]]
    assert node.departed[5][1].tolist() == [0.0, 1.0]


def test_gradient_belongs_to_the_value_that_was_sent():
    node, w = Node(), param()
    h = w * 2.0
    sent = node.send(h)
    h.mul_(100.0)
    local = node.start((h * 0.0).sum())
    local.add_gradients(sent, [torch.ones(2)])
    local.run_wave()
    assert node.gradient(w).tolist() == [2.0, 2.0]


def test_same_tensor_in_several_messages_adds_up():
    node, w = Node(), param()
    h = w * 2.0
    sends = [node.send(h, h), node.send(h)]
    local = node.start()
    local.add_gradients(sends[0], [torch.ones(2), torch.ones(2)])
    local.run_wave()
    local.add_gradients(sends[1], [torch.ones(2)])
    local.run_wave()
    assert node.gradient(w).tolist() == [6.0, 6.0]


def test_message_is_answered_once():
    node, w = Node(), param()
    sent = node.send(w * 2.0)
    local = node.start()
    local.add_gradients(sent, [torch.ones(2)])
    with pytest.raises(RuntimeError, match="does not wait for gradients"):
        local.add_gradients(sent, [torch.ones(2)])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_gradients_have_the_dtype_of_their_tensor(dtype):
    node = Node()
    w = torch.ones(2, dtype=dtype, requires_grad=True)
    (x,) = node.receive(5, torch.full((2,), 2.0).to(dtype))
    loss = (w * x).abs().sum()
    reference = torch.autograd.grad(loss, [w], retain_graph=True)[0]
    node.start(loss)
    assert torch.equal(node.gradient(w), reference)
    assert node.departed[5][0].dtype is dtype


def test_lstm_with_state_from_another_worker():
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(3, 3)
    node, inputs, state = Node(), torch.randn(2, 1, 3), torch.randn(1, 1, 3)
    h, c = node.receive(5, state, state * 2)
    out, (hn, cn) = lstm(inputs, (h, c))
    node.start(out.sum() + cn.sum() * hn.sum())
    ref_h, ref_c = (t.clone().requires_grad_() for t in (state, state * 2))
    out, (hn, cn) = lstm(inputs, (ref_h, ref_c))
    (out.sum() + cn.sum() * hn.sum()).backward()
    torch.testing.assert_close(node.departed[5], [ref_h.grad, ref_c.grad])
    for p in lstm.parameters():
        torch.testing.assert_close(node.gradient(p), p.grad)


def test_passes_on_one_parameter_in_many_threads_do_not_mix():
    w = param()
    nodes = [Node(context_id=k) for k in range(4)]

    def train(node):
        for _ in range(20):
            sent = node.send(w * 1.0)
            (y,) = node.receive(5, torch.full((2,), float(node.context_id)))
            local = node.start((w * y).sum())
            for message in local.waiting_sends - {sent}:
                local.resolve_without_gradient(message)
            local.add_gradients(sent, [torch.ones(2)])
            local.run_wave()

    threads = [threading.Thread(target=train, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for node in nodes:
        assert node.gradient(w).tolist() == [20.0 * (node.context_id + 1)] * 2


def test_a_pass_that_waits_while_torch_accumulates_holds_up_none_on_other_leaves():
    """DistributedDataParallel may wait like this for a worker that needs a pass here."""
    w, v = param(), param()
    waits, may_end = threading.Event(), threading.Event()

    def wait(_):
        waits.set()
        assert may_end.wait(20)

    w.register_post_accumulate_grad_hook(wait)
    v.register_post_accumulate_grad_hook(lambda _: None)
    first, second = Node(), Node(context_id=CONTEXT + 1)
    second.grad_fields = first.grad_fields
    with ThreadPoolExecutor(2) as threads:
        slow = threads.submit(first.start, (w * 2).sum())
        assert waits.wait(20)
        try:
            threads.submit(second.start, (v * 3).sum()).result(timeout=20)
        finally:
            may_end.set()
        slow.result(timeout=20)
    assert first.gradient(w).tolist() == [2.0, 2.0]
    assert second.gradient(v).tolist() == [3.0, 3.0]


@pytest.mark.parametrize("observed", [False, True])
def test_a_checkpoint_that_runs_a_backward_of_its_own_is_refused(observed):
    node, w = Node(), param()
    if observed:
        w.register_post_accumulate_grad_hook(lambda _: None)
    y = checkpoint(lambda x: x * w, param(), use_reentrant=True)
    with pytest.raises(RuntimeError, match="heckpoint"):
        node.start((y * w).sum())
    assert w.grad is None


@pytest.mark.parametrize("in_pass", ["also", "only there"])
def test_a_backward_that_a_function_starts_cannot_reach_a_received_tensor(in_pass):
    node, w = Node(), param()
    (x,) = node.receive(5, torch.ones(2))

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * 2

        @staticmethod
        def backward(ctx, gradient):
            with torch.enable_grad():
                (x * x).sum().backward()
            return gradient * 2

    root = Nested.apply(x if in_pass == "also" else w).sum()
    with pytest.raises(RuntimeError, match="a local backward cannot cross workers"):
        node.start(root)


def test_a_leaf_that_does_not_require_grad_any_more_gets_none():
    node, w, v = Node(), param(), param()
    root = (w * v).sum()
    w.requires_grad_(False)
    node.start(root)
    assert node.gradient(w) is None
    assert node.gradient(v).tolist() == [1.0, 2.0]


def test_errors_of_torch_pass_through_unchanged():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("original")

    with pytest.raises(KeyError, match="original"):
        Node().start(Broken.apply(param()).sum())


def test_a_gradient_that_came_over_another_device_is_moved_to_that_of_its_tensor():
    node = Node()
    leaf = torch.ones(2, device="meta", requires_grad=True)
    message = node.send(leaf * 3)
    local = node.start()
    local.add_gradients(message, [torch.ones(2)])
    local.run_wave()
    assert node.gradient(leaf).device == torch.device("meta")


def test_work_grows_with_the_graph_and_not_with_its_square_however_much_was_sent():
    """Every state of a chain is sent; the answers come back from the last to the first."""
    steps = [calls_of_a_chain(length) for length in (20, 40, 80)]
    assert steps[2] - steps[1] == 2 * (steps[1] - steps[0])


def calls_of_a_chain(length):
    node, leaf = Node(), param()
    state, sent = leaf, []
    for _ in range(length):
        state = state * 1.0
        sent.append(node.send(state))
    local = node.start()
    calls = 0

    def count(frame, event, _):
        nonlocal calls
        calls += event == "call" and frame.f_globals["__name__"].startswith("autograd_dist")

    sys.setprofile(count)
    try:
        for message in reversed(sent):
            local.add_gradients(message, [torch.ones(2)])
            local.run_wave()
    finally:
        sys.setprofile(None)
    assert node.gradient(leaf).tolist() == [float(length)] * 2
    return calls


def test_the_last_message_whose_gradients_a_wave_completes_is_known():
    node = Node()
    (first,), (second,) = node.receive(1, torch.ones(2)), node.receive(2, torch.ones(2))
    local = node.start((first * second).sum())
    assert [is_last for _, is_last in node.last] == [False, True]
    assert {number for number, _ in node.last} == {1, 2}
    assert not local.contributions


def test_a_message_that_gets_no_gradient_may_be_the_last():
    node = Node()
    (first,), (second,) = node.receive(1, torch.ones(2)), node.receive(2, torch.ones(2))
    node.start(first.sum() + second.detach().sum())
    assert node.last == [(1, True)]
